"""Which prompted tasks and mixtures are registered, here and in SeqIO."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from t0repro.errors import UserError, nearest_names, similar_names
from t0repro.storage import input_path
from t0repro.tasks.catalog import label
from t0repro.tasks.mixture_checks import check_alike, check_seqio_rates
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import ADDS_EOS, SCORE_EVAL_SUFFIX, PromptedTask, TaskDescription
from t0repro.tasks.vocabulary import VocabularyFile
from t0repro.words import some

if TYPE_CHECKING:
    import seqio


DEMO_MODULE = "t0repro.tasks.demo"

_tasks: dict[str, TaskDescription] = {}


def prompted_tasks() -> Mapping[str, PromptedTask]:
    """Every prompted task registered so far, by name, the `_score_eval` twins included."""
    return {name: description.prompt for name, description in _tasks.items()}


def task_descriptions() -> Mapping[str, TaskDescription]:
    """Descriptions of every prompted task registered so far, by name, including twins."""
    return types.MappingProxyType(_tasks)


def record_task(description: TaskDescription) -> None:
    """Adds a task, replacing any task of the same name."""
    _tasks[description.prompt.name] = description


def registered_tasks() -> list[str]:
    """Names of all tasks, including those that only SeqIO knows."""
    known = task_descriptions()
    # Do not import it here: that takes seconds, and nothing is registered in it yet.
    seqio = sys.modules.get("seqio")
    others = () if seqio is None else seqio.TaskRegistry.names()
    return [*known, *(name for name in others if name not in known)]


@dataclasses.dataclass(frozen=True)
class Feature:
    """How a described task's inputs or targets are encoded; attributes as in seqio.Feature."""

    vocabulary: VocabularyFile | seqio.Vocabulary
    add_eos: bool


class DescribedTask:
    """A prompted task that SeqIO has not been given, with attributes named as in seqio.Task.

    Attributes:
      name: The task's name.
      prompt: The prompt that it renders.
      description: Its contents.
      source: Its rows.
      output_features: Its features by name.
    """

    supports_caching, requires_caching = True, False

    def __init__(self, description: TaskDescription):
        self.name, self.prompt = description.prompt.name, description.prompt
        self.description = description
        self.source = description.rows
        self.output_features = {
            name: Feature(description.vocabulary, adds_eos) for name, adds_eos in ADDS_EOS.items()
        }

    @property
    def splits(self) -> Sequence[str]:
        """Names of its splits."""
        return tuple(self.source.files_of_splits)

    @property
    def cache_dir(self) -> str | None:
        """The task's folder in the first folder of caches that has it."""
        found = (os.path.join(folder, self.name) for folder in cache_dirs())
        return next((path for path in found if os.path.exists(f"{path}/COMPLETED")), None)


def find_task(name: str) -> DescribedTask | seqio.Task:
    """A registered task: SeqIO's own or, if SeqIO does not have it, a `DescribedTask`.

    Raises:
      KeyError: If there is no such task.
    """
    seqio = sys.modules.get("seqio")
    if seqio is not None and name in seqio.TaskRegistry.names():
        return seqio.TaskRegistry.get(name)
    return DescribedTask(_tasks[name])


def find_tasks(name: str) -> Sequence[DescribedTask | seqio.Task]:
    """The tasks of a registered mixture, or the task of that name, each as from `find_task`.

    Raises:
      KeyError: If there is neither.
      UserError: If the tasks have different features or vocabularies, or SeqIO cannot mix their
        rates.
    """
    seqio = sys.modules.get("seqio")
    if seqio is not None and name in seqio.MixtureRegistry.names():
        # A user's module may have made it of any tasks.
        mixture = seqio.MixtureRegistry.get(name)
        check_alike(name, mixture.tasks)
        check_seqio_rates(mixture)
        return mixture.tasks
    # By name, as SeqIO sorts them.
    return [
        find_task(each) for each in sorted(_mixtures[name].tasks if name in _mixtures else [name])
    ]


def find_named_tasks(name: str, option: str) -> Sequence[DescribedTask | seqio.Task]:
    """The tasks of `find_tasks`, of a name from the command line.

    Args:
      name: The mixture's or task's name.
      option: The option that gave it, for the message.

    Raises:
      UserError: If it is not registered, with the nearest names; or see `find_tasks`.
    """
    try:
        return find_tasks(name)
    except KeyError as error:
        _check_is_one(name, option)
        known = dict.fromkeys([*registered_mixtures(), *registered_tasks()])
        # Not what has a twin, of a mixture too: the twin ranks choices.
        ranked = [each for each in known if f"{each}{SCORE_EVAL_SUFFIX}" not in known]
        raise UserError(
            f"There is no mixture or task {name!r}.",
            where=option,
            fix=how_to_register(name, nearest_names(name, ranked)),
        ) from error


def is_described(name: str) -> bool:
    """Whether a mixture or task is registered, and none of its tasks is SeqIO's."""
    try:
        return all(isinstance(task, DescribedTask) for task in find_tasks(name))
    except KeyError:
        return False


_cache_dirs: list[str] = []


def cache_dirs() -> Sequence[str]:
    """The folders in which the caches of registered tasks are looked for."""
    seqio = sys.modules.get("seqio")
    known = () if seqio is None else seqio.get_global_cache_dirs()
    # Those of before SeqIO was imported stay: a task that was described then has its cache there.
    return [*known, *(folder for folder in _cache_dirs if folder not in known)]


def add_cache_dirs(folders: Iterable[str | os.PathLike[str]], where: str | None = None) -> None:
    """Adds folders or addresses to `cache_dirs`; in SeqIO, if it has been imported.

    Args:
      folders: The folders.
      where: The option that names them, for messages.

    Raises:
      UserError: For an address that cannot be opened.
    """
    paths = [str(input_path(folder, where)) for folder in folders]
    if "seqio" in sys.modules:
        # Of a cache in a bucket, this disk holds sparse files in place of the shards.
        from t0repro.tasks.prompt_cache.seqio_stream import stream_into_seqio

        stream_into_seqio()
        sys.modules["seqio"].add_global_cache_dirs(paths)
    else:
        _cache_dirs.extend(path for path in paths if path not in _cache_dirs)


@dataclasses.dataclass(frozen=True)
class PromptedMixture:
    """A mixture of prompted tasks.

    Attributes:
      name: The mixture's name.
      tasks: Names of its tasks, and of those of the mixtures in it.
      rates: Task or mixture in it -> its rate, in examples.
      default_rate: Computes, from its rows, the rate of a task that is not in `rates`.
    """

    name: str
    tasks: tuple[str, ...]
    rates: Mapping[str, float]
    default_rate: Callable[[PromptedRows], float] | None

    def rate(self, task: str) -> float:
        """A task's rate.

        Raises:
          UserError: If the rate is a number of rows, and the rows are missing.
        """
        # In SeqIO's order, since sums of floating point depend on it.
        rate = 0.0
        for name, share in self.rates.items():
            part = None if name in _tasks else _mixtures.get(name)
            if part is not None and task in part.tasks:
                rate += share * part.rate(task) / part._total_rate()
        return rate + self._own_rate(task)

    def _own_rate(self, task: str) -> float:
        if task in self.rates or self.default_rate is None:
            return self.rates.get(task, 0.0)
        # Count rows only when needed, since that needs the data.
        return self.default_rate(task_descriptions()[task].rows)

    def _total_rate(self) -> float:
        rates = self.rates.values() if self.rates else map(self._own_rate, self.tasks)
        return sum(map(float, rates))


_mixtures: dict[str, PromptedMixture] = {}


def prompted_mixtures() -> Mapping[str, PromptedMixture]:
    """Every mixture of prompted tasks registered so far, by name."""
    return types.MappingProxyType(_mixtures)


def record_mixture(mixture: PromptedMixture) -> None:
    """Adds a mixture."""
    _mixtures[mixture.name] = mixture


def registered_mixtures() -> Mapping[str, Sequence[str]]:
    """Name of each mixture -> its tasks, including mixtures that only SeqIO knows."""
    found: dict[str, Sequence[str]] = {
        name: mixture.tasks for name, mixture in prompted_mixtures().items()
    }
    # Never import it here: that takes seconds, and until another module does, it has no mixtures.
    seqio = sys.modules.get("seqio")
    if seqio is not None:
        for name in seqio.MixtureRegistry.names():
            found[name] = [task.name for task in seqio.MixtureRegistry.get(name).tasks]
    return found


def tasks_of_mixture(name: str, option: str = "--mixture") -> Sequence[str]:
    """Names of a mixture's tasks.

    Args:
      name: The mixture's name.
      option: The command-line option that named it, for the error.

    Raises:
      UserError: If there is no such mixture, with the nearest names, or its tasks have different
        vocabularies.
    """
    mixtures = registered_mixtures()
    if name not in mixtures:
        _check_is_one(name, option)
        if name in registered_tasks():
            raise UserError(
                f"{name!r} is a task, not a mixture.",
                where=option,
                fix=f"Give a mixture; t0repro cache takes a task as --tasks {name}.",
            )
        raise UserError(
            f"There is no mixture {name!r}.",
            where=option,
            fix=how_to_register(name, _nearest(name, mixtures)),
        )
    if name not in prompted_mixtures():
        find_tasks(name)  # checks the vocabularies of what a user's module made
    return mixtures[name]


def _check_is_one(name: str, option: str) -> None:
    """Raises UserError for several mixtures or tasks: names with commas between them, a pattern."""
    if mark := re.search(r"[,*?\[]", name):
        what = "several names" if mark[0] == "," else "a pattern"
        matched = []
        with contextlib.suppress(re.error):
            matched = [each for each in registered_tasks() if re.fullmatch(name, each)]
        raise UserError(
            f"{name!r} is {what}, and one mixture or task is taken at a time.",
            where=option,
            fix='Give one at a time, or a mixture of them: docs/tasks.md, "Mixtures".'
            + (f" It matches {some(matched, 5)}." if matched else ""),
        )


def how_to_register(name: str, nearest: str) -> str:
    """The fix for a name of tasks that no imported module registers; `nearest` lists others."""
    if _is_demos(name):
        return how_to_register_own(name)
    datasets = {each for task in prompted_tasks().values() for each in _labels(task)}
    if dataset := next((each for each in datasets if each.replace("/", "_") == name), None):
        said = f"It is a dataset, whose tasks `t0repro tasks ls --dataset {dataset}` lists. "
    else:
        said = ""
    return f"{said}Nearest: {nearest}. {how_to_register_own(name)}"


def _is_demos(name: str) -> bool:
    return name.startswith(("demo_", "synthetic_")) and DEMO_MODULE not in sys.modules


# Files of T0REPRO_TEMPLATES whose tasks are not registered, since their rows are missing -> why.
left_out_files: dict[str, UserError] = {}


def how_to_register_own(name: str) -> str:
    """The fix for a task of the demo's or the user's that is not registered."""
    if _is_demos(name):
        return f"The demo's tasks need --module_import {DEMO_MODULE}, in Python its import."
    left_out = (
        f" Of T0REPRO_TEMPLATES, {path} is left out: {error.what} {error.fix}"
        for path, error in left_out_files.items()
    )
    own = "For your own tasks add --module_import, or set T0REPRO_TEMPLATES."
    return f"{own}{next(left_out, '')}"


def _nearest(name: str, mixtures: Iterable[str]) -> str:
    """The mixtures nearest to a name; if none is, the tasks."""
    if not similar_names(name, mixtures) and similar_names(name, registered_tasks()):
        return f"no mixture, but tasks {nearest_names(name, registered_tasks())}"
    return nearest_names(name, mixtures)


def select_tasks(mixture: str | None = None, dataset: str | None = None) -> list[str]:
    """Names of prompted tasks, sorted.

    Args:
      mixture: Only tasks of this mixture; defaults to all.
      dataset: Only tasks of this dataset, given as `dataset` or `dataset/subset`.

    Raises:
      UserError: If the mixture or the dataset does not exist; lists the nearest names.
    """
    known = prompted_tasks()
    names: Iterable[str] = known
    if mixture is not None:
        names = set(tasks_of_mixture(mixture)) & set(known)
    if dataset is not None:
        labels = sorted({each for name in names for each in _labels(known[name])})
        names = [name for name in names if dataset in _labels(known[name])]
        if not names:
            inside = f" in {mixture}" if mixture else ""
            subsets = [each for each in labels if each.endswith(f"/{dataset}")]
            raise UserError(
                f"There is no task of dataset {dataset!r}{inside}.",
                where="--dataset",
                fix=how_to_register(dataset, nearest_names(dataset, subsets or labels)),
            )
    return sorted(names)


def _labels(task: PromptedTask) -> tuple[str, ...]:
    return (task.dataset, label(task.dataset, task.subset))


def name_is_taken(name: str, difference: str) -> UserError:
    """The error for two different tasks with one name."""
    return UserError(
        f"A task {name!r} {difference} is registered already.",
        fix="Import only one of the modules that register it, or give this one another name.",
    )
