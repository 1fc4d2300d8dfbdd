"""Prompted tasks and mixtures: their contents, which are registered, and which can be read here.

Does not import SeqIO.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError, nearest_names
from t0repro.files import input_path
from t0repro.progress import say
from t0repro.tasks.catalogue import is_synthetic, label, modelled_on
from t0repro.tasks.vocabulary import (
    VOCABULARY_VARIABLE,
    VocabularyFile,
    address_of,
    are_same,
    default_vocabulary,
    model_of,
    shown,
)
from t0repro.words import counted, some

if TYPE_CHECKING:
    import seqio

    from t0repro.tasks.source import PromptedRows


SCORE_EVAL_SUFFIX = "_score_eval"

ADDS_EOS = {"inputs": False, "targets": True}
"""T0 ends targets with EOS, but not inputs."""


@dataclasses.dataclass(frozen=True)
class PromptedTask:
    """A registered task and the prompt that it renders.

    Attributes:
      name: The SeqIO task's name.
      dataset: The Hugging Face name, for instance `super_glue`; datasets of generated rows have
        names such as `synthetic_imdb`.
      subset: The dataset's configuration, or None if it has only one.
      template_name: promptsource's name for the template, unchanged.
      template_id: promptsource's identifier for the template.
      has_answer_choices: Whether the template lists answers to rank.
      fixed_choices: The answers if every example has the same ones, else None.
      metrics: Names of the metrics in the template's metadata.
      original_task: Whether the prompt poses the dataset's original task.
      prompt: The template's Jinja, with `|||` between input and target.
      score_eval: Whether this is the twin that expands each example to one per answer choice.
    """

    name: str
    dataset: str
    subset: str | None
    template_name: str
    template_id: str
    has_answer_choices: bool
    fixed_choices: tuple[str, ...] | None
    metrics: tuple[str, ...]
    original_task: bool
    prompt: str
    score_eval: bool = False

    @property
    def synthetic(self) -> bool:
        """Whether its rows are generated, like the demo's; scores say nothing of real data."""
        return is_synthetic(self.dataset)

    def twin(self) -> PromptedTask:
        """The `_score_eval` task of this prompt, which rank classification evaluates."""
        return dataclasses.replace(self, name=self.name + SCORE_EVAL_SUFFIX, score_eval=True)


@dataclasses.dataclass(frozen=True)
class TaskDescription:
    """The contents of a task.

    Attributes:
      prompt: The task and its prompt.
      rows: The rows that it renders.
      vocabulary: Vocabulary of inputs and targets; SeqIO's own class if a user's module passed one.
    """

    prompt: PromptedTask
    rows: PromptedRows
    vocabulary: VocabularyFile | seqio.Vocabulary

    @property
    def sp_model(self) -> bytes | None:
        """The vocabulary's serialized model; None for other kinds than pieces and bytes."""
        return model_of(self.vocabulary)

    def twin(self) -> TaskDescription:
        """The twin's description, over the same rows."""
        return dataclasses.replace(self, prompt=self.prompt.twin())


# What is registered -----------------------------------------------------------------------------

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
      splits: Names of its splits.
      output_features: Its features by name.
    """

    supports_caching, requires_caching = True, False

    def __init__(self, description: TaskDescription):
        self.name, self.prompt = description.prompt.name, description.prompt
        self.description = description
        self.source, self.splits = description.rows, tuple(description.rows.files_of_splits)
        self.output_features = {
            name: Feature(description.vocabulary, adds_eos) for name, adds_eos in ADDS_EOS.items()
        }

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
        _check_seqios_rates(mixture)
        return mixture.tasks
    # By name, as SeqIO sorts them.
    return [
        find_task(each) for each in sorted(_mixtures[name].tasks if name in _mixtures else [name])
    ]


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
        from t0repro.tasks.prompt_cache.records import stream_into_seqio

        stream_into_seqio()
        sys.modules["seqio"].add_global_cache_dirs(paths)
    else:
        _cache_dirs.extend(path for path in paths if path not in _cache_dirs)


# Metrics ----------------------------------------------------------------------------------------

METRICS = {
    "Accuracy": "accuracy",
    "AUC": "auc",
    "BLEU": "bleu",
    "COQA F1": "coqa_f1",
    "Edit Distance": "edit_distance",
    "MultiRC": "multirc_f1_over_all_answers",
    "Other": "accuracy",
    "Pearson Correlation": "pearson_corrcoef",
    "ROUGE": "rouge",
    "Sequence Accuracy": "sequence_accuracy",
    "Span Squad": "span_squad",
    "Spearman Correlation": "spearman_corrcoef",
    "Squad": "squad",
    "Trivia QA": "trivia_qa",
}
"""promptsource's names -> functions of t5.evaluation.metrics; "Other" counts as accuracy in T0."""

OF_T5 = ("glue", "super_glue")
"""Datasets whose tasks have T5's metrics, whatever the template names."""

# Tasks with other metrics than accuracy. Source: t5.data.glue_utils.
_T5S: dict[tuple[str, str | None], tuple[str, ...]] = {
    # ax, axb and axg are test sets alone.
    ("glue", "ax"): (),
    ("glue", "cola"): ("matthews_corrcoef",),
    ("glue", "mrpc"): ("f1_score_with_invalid", "accuracy"),
    ("glue", "qqp"): ("f1_score_with_invalid", "accuracy"),
    ("glue", "stsb"): ("pearson_corrcoef", "spearman_corrcoef"),
    ("super_glue", "axb"): (),
    ("super_glue", "axg"): (),
    ("super_glue", "cb"): ("mean_3class_f1", "accuracy"),
    ("super_glue", "record"): ("squad",),
}


def metric_names(task: PromptedTask) -> tuple[str, ...]:
    """Names of a task's evaluation metrics; for a twin, rank_classification."""
    if task.score_eval:
        return ("rank_classification",)
    dataset = modelled_on(task.dataset)
    if dataset in OF_T5:
        return _T5S.get((dataset, task.subset), ("accuracy",))
    return tuple(METRICS[name] for name in task.metrics)


# ---- Mixtures ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PromptedMixture:
    """A mixture of prompted tasks.

    Attributes:
      name: The mixture's name.
      tasks: Names of its tasks.
      rates: Task -> its rate, in examples.
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
        # Count rows only when needed, since that needs the data.
        if task in self.rates or self.default_rate is None:
            return self.rates[task]
        return self.default_rate(task_descriptions()[task].rows)


_mixtures: dict[str, PromptedMixture] = {}


def prompted_mixtures() -> Mapping[str, PromptedMixture]:
    """Every mixture of prompted tasks registered so far, by name."""
    return types.MappingProxyType(_mixtures)


def record_mixture(mixture: PromptedMixture) -> None:
    """Adds a mixture."""
    _mixtures[mixture.name] = mixture


def check_alike(mixture: str, tasks: Sequence[DescribedTask | seqio.Task]) -> None:
    """Checks that the tasks of a mixture have the same features, of one vocabulary and type each.

    A vocabulary that cannot be read here is not compared: whatever needs its tokens says so.

    Raises:
      UserError: If two tasks differ; names both, and how to have one vocabulary.
    """
    # SeqIO compares them too, but only once a run reads its first examples.
    _check_same(mixture, "features", {task.name: tuple(task.output_features) for task in tasks})
    for feature in tasks[0].output_features if tasks else ():
        own = {task.name: task.output_features[feature] for task in tasks}
        types = {name: getattr(each, "dtype", "int32") for name, each in own.items()}
        _check_same(mixture, f"types of {feature}", types)
        vocabularies = {name: getattr(each, "vocabulary", None) for name, each in own.items()}
        found = _kinds(vocabularies, may_be_same)
        if len(found) > 1:
            raise _several_vocabularies(mixture, feature, found)


def _check_same(mixture: str, what: str, of_tasks: Mapping[str, Any]) -> None:
    found = _kinds(of_tasks, operator.eq)
    if len(found) > 1:
        sides = [
            f"{', '.join(own) if isinstance(own, tuple) else getattr(own, 'name', own)} in"
            f" {some(names, 2)}"
            for own, names in found
        ]
        raise UserError(
            f"The tasks of mixture {mixture!r} have different {what}: {'; '.join(sides)}.",
            fix="Mix only tasks with the same output_features; a prompted task has inputs and"
            " targets, of int32.",
        )


def _kinds(
    of_tasks: Mapping[str, Any], same: Callable[[Any, Any], bool]
) -> list[tuple[Any, list[str]]]:
    """The different values of tasks, each with the names of those that have it."""
    found: list[tuple[Any, list[str]]] = []
    for task, own in of_tasks.items():
        names = next((names for known, names in found if same(known, own)), None)
        if names is None:
            found.append((own, [task]))
        else:
            names.append(task)
    return found


def may_be_same(one: Any, other: Any) -> bool:
    """Whether two vocabularies are the same, or one cannot be read here."""
    try:
        return are_same(one, other)
    except (UserError, OSError):
        return True


def _several_vocabularies(
    mixture: str, feature: str, found: Sequence[tuple[Any, list[str]]]
) -> UserError:
    default = default_vocabulary()
    sides = [f"{shown(vocabulary)} in {some(names, 2)}" for vocabulary, names in found]
    fix = "Register the tasks with one vocabulary"
    # Only tasks with the default vocabulary can be given another one from outside.
    others = [address_of(own) for own, _ in found if not may_be_same(own, default)]
    if len(others) == len(found) - 1 == 1 and others[0]:
        fix = f"Give all the same: {VOCABULARY_VARIABLE}={others[0]}; or register them with one"
    return UserError(
        f"The tasks of mixture {mixture!r} have different vocabularies of {feature}:"
        f" {'; '.join(sides)}.",
        fix=f"{fix} (vocabulary=, in a SeqIO task its output_features), or mix only tasks that"
        " share one.",
    )


def check_rates(mixture: str, rates: Mapping[str, float]) -> None:
    """Checks that a mixture's rates are finite, not negative, and not all 0.

    Raises:
      UserError: If they are not; names the task.
    """
    for task, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise UserError(
                f"The rate of {task} in mixture {mixture!r} is {rate}.",
                fix="Give a number of examples, 0 or more.",
            )
    # SeqIO never samples a task with rate 0, so such a mixture would be silently empty.
    if rates and not any(rates.values()):
        raise UserError(
            f"No task of mixture {mixture!r} has a rate above 0, so it has no examples.",
            where=", ".join(list(rates)[:5]) + (", ..." if len(rates) > 5 else ""),
            fix="Give at least one of its tasks a rate above 0.",
        )


def _check_seqios_rates(mixture: seqio.Mixture) -> None:
    """Checks the rates of a mixture that is SeqIO's, and those of the mixtures in it."""
    rates = mixture.rate_per_task_name
    for part in mixture._sub_mixtures:
        if callable(rates[part.name]):
            raise UserError(
                f"The rate of mixture {part.name!r} in mixture {mixture.name!r} is a function,"
                " which SeqIO has for tasks alone.",
                fix="Give it a number.",
            )
        _check_seqios_rates(part)
    # What a function returns may need the rows.
    check_rates(mixture.name, {name: 1 if callable(r) else r for name, r in rates.items()})


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
        raise UserError(
            f"There is no mixture {name!r}.",
            where=option,
            fix=f"Nearest: {nearest_names(name, mixtures)}; or name its --module_import.",
        )
    if name not in prompted_mixtures():
        find_tasks(name)  # checks the vocabularies of what a user's module made
    return mixtures[name]


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
        names = [name for name in names if dataset in _labels(known[name])]
        if not names:
            everywhere = sorted({name for task in known.values() for name in _labels(task)})
            inside = f" in {mixture}" if mixture else ""
            raise UserError(
                f"There is no task of dataset {dataset!r}{inside}.",
                where="--dataset",
                fix=f"Nearest: {nearest_names(dataset, everywhere)}.",
            )
    return sorted(names)


def _labels(task: PromptedTask) -> tuple[str, ...]:
    return (task.dataset, label(task.dataset, task.subset))


# T0's own names for the module that registers its tasks.
_ALIASES = {
    "t0.seqio_tasks": "t0repro.tasks.t0",
    "promptsource.seqio_tasks": "t0repro.tasks.t0",  # an earlier name; it downloads on import
}


def resolved_modules(modules: Iterable[str]) -> list[str]:
    """The modules, with T0's names replaced by this project's; each change is noted on stderr."""
    found = []
    for module in modules:
        name = _ALIASES.get(module, module)
        if name != module:
            print(f"--module_import={module}: {name} registers T0's tasks here.", file=sys.stderr)
        found.append(name)
    return found


# ---- Which tasks can be read on this machine, and mixtures reduced to those ----------------------


def missing_rows(rows: PromptedRows, split: str) -> UserError | None:
    """The reason why the rows of a task's split cannot be read, or None if they can."""
    try:
        rows.reader(split)
    except UserError as error:
        return error
    return None


def rows_at_hand(tasks: Iterable[str], split: str) -> list[str]:
    """The tasks that have the split and whose rows for it are available here.

    Raises:
      UserError: If there is none.
    """
    names = list(tasks)
    sources = {name: task_descriptions()[name].rows for name in names}
    found = [
        name
        for name, rows in sources.items()
        if split in rows.files_of_splits and missing_rows(rows, split) is None
    ]
    if not found:
        raise UserError(
            f"None of {counted(len(names), 'task')} has rows of split {split!r} on this machine.",
            where="--at_hand",
            fix="Set T0REPRO_DATA_DIR to the folder of the datasets.",
        )
    return found


def lacks_cache(task: DescribedTask | seqio.Task) -> bool:
    """Whether a task lacks the cache that reading it with `use_cached` needs.

    SeqIO computes the examples of a task without a CacheDatasetPlaceholder while reading it.
    """
    return task.supports_caching and not task.cache_dir


def not_at_hand(
    tasks: Iterable[DescribedTask | seqio.Task], split: str, *, use_cached: bool
) -> dict[str, str]:
    """Task -> why its split cannot be read here; tasks that have no such split are skipped.

    Args:
      tasks: Tasks from SeqIO's registry.
      split: The split to be read.
      use_cached: Whether to read caches rather than rows.
    """
    found = {}
    for task in tasks:
        if split not in task.splits:
            continue
        source: Any = task.source
        if use_cached:
            if lacks_cache(task):
                found[task.name] = "not cached"
        # A source without prompted rows reports missing data itself, when it is read.
        elif hasattr(source, "reader") and missing_rows(source, split):
            found[task.name] = "rows not available"
    return found


def keep_at_hand(name: str, split: str, *, use_cached: bool) -> None:
    """Drops tasks that cannot be read here from a mixture; the others keep their rates.

    Args:
      name: The mixture's name; if it is a task's, nothing is done.
      split: The split to be read.
      use_cached: Whether to read caches rather than rows.

    Raises:
      UserError: If none of the mixture's tasks can be read.
    """
    if name not in registered_mixtures():
        return
    tasks = find_tasks(name)
    missing = not_at_hand(tasks, split, use_cached=use_cached)
    if not missing:
        return
    kept = [task for task in tasks if task.name not in missing]
    # Tasks that lack the split altogether do not make a mixture trainable.
    if not any(split in task.splits for task in kept):
        raise UserError(
            f"Nothing of {name!r} is available: split {split!r} of {counted(len(missing), 'task')},"
            f" {' or '.join(sorted(set(missing.values())))}.",
            where="--at_hand",
            fix="Set T0REPRO_DATA_DIR to the folder of the datasets, or name a folder of caches by"
            " --additional_task_cache_dirs.",
        )
    # Never import SeqIO here: it would have neither the described mixture nor the cache folders.
    seqio = sys.modules.get("seqio")
    # Count rates that are numbers of rows here, for the remaining tasks only: for the full mixture,
    # counting would fail on the missing rows.
    if seqio is not None and name in seqio.MixtureRegistry.names():
        mixture = seqio.MixtureRegistry.get(name)
        rates = {task.name: mixture.get_rate(task) for task in kept}
        check_rates(name, rates)
        # SeqIO cannot change a mixture in place.
        seqio.MixtureRegistry.remove(name)
        seqio.MixtureRegistry.add(name, list(rates.items()))
    else:
        rates = {task.name: prompted_mixtures()[name].rate(task.name) for task in kept}
        check_rates(name, rates)
        record_mixture(PromptedMixture(name, tuple(rates), rates, None))
    left_out = "; ".join(f"{task} ({why})" for task, why in missing.items())
    say(
        f"{name}: {len(kept)} of {counted(len(tasks), 'task')}, with the rates that they"
        f" have in the full mixture. Left out: {left_out}"
    )
