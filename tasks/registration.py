"""Registers prompted tasks, and their twins for rank classification, as T0 did.

Tasks come from modules that call `add_prompted_task` and `add_mixture` when they are imported, and
from users' own template files.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.catalogue import modelled_on, rounds_of
from t0repro.tasks.rows import data_folder, dataset_folder, splits_on_disk
from t0repro.tasks.source import PromptedRows, Split
from t0repro.tasks.task import (
    METRICS,
    OF_T5,
    PromptedMixture,
    PromptedTask,
    TaskDescription,
    check_alike,
    check_rates,
    find_tasks,
    may_be_same,
    prompted_mixtures,
    prompted_tasks,
    record_mixture,
    record_task,
    registered_mixtures,
    registered_tasks,
    resolved_modules,
    task_descriptions,
)
from t0repro.tasks.template_files import TemplateFile, read_template_file
from t0repro.tasks.templates import fixed_choices, load_template, task_name
from t0repro.tasks.vocabulary import VocabularyFile, default_vocabulary
from t0repro.words import shortened, some

if TYPE_CHECKING:
    import seqio

_only_described = False


@contextlib.contextmanager
def describing() -> Iterator[None]:
    """Context in which tasks and mixtures are registered in `t0repro.tasks.task` but not in SeqIO.

    SeqIO and TensorFlow take seconds and a gigabyte to import, and rendering prompts needs neither.
    If SeqIO has already been imported, the tasks are added to it anyway; otherwise, the next
    `load_tasks(into_seqio=True)` adds them.
    """
    global _only_described
    before, _only_described = _only_described, True
    try:
        yield
    finally:
        _only_described = before


def add_prompted_task(
    dataset: str,
    subset: str | None,
    template_name: str,
    splits: Mapping[str, Split] | Sequence[str],
    *,
    root: Path | None = None,
    vocabulary: VocabularyFile | seqio.Vocabulary | None = None,
    name: str | None = None,
    template: Any = None,
) -> PromptedTask:
    """Registers a task and, where its template has answer choices, `<name>_score_eval`.

    Only the template is read, no rows. Registering the same task again does nothing, unless it now
    has more splits: then it replaces the first.

    Args:
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      template_name: promptsource's name for the template.
      splits: Split name -> where its rows come from; a sequence of names means files of the same
        names.
      root: The folder of datasets; defaults to the one that T0REPRO_DATA_DIR names.
      vocabulary: Vocabulary of both features; defaults to `default_vocabulary()`.
      name: Name of the task; defaults to T0's name for it.
      template: A user's own `Template`, which promptsource does not have; defaults to
        promptsource's template of that name.

    Returns:
      The task, without its twin.

    Raises:
      UserError: If the dataset or the template does not exist, the template names a metric that t5
        does not have, the vocabulary has no texts, or the name is taken by another task.
    """
    if template is None:
        template = load_template(dataset, subset, template_name)
    name = name or task_name(dataset, subset, template_name)
    if not isinstance(splits, Mapping):
        splits = {split: Split(split) for split in splits}
    _check_metrics(dataset, template)
    _check_texts(name, vocabulary)
    rows = PromptedRows(name, dataset, subset, template, splits, root)
    # Check before registering anything: SeqIO and the descriptions must not disagree.
    description = _with_most_splits(
        TaskDescription(_prompt(rows), rows, vocabulary or default_vocabulary())
    )
    twins = [description.twin()] if description.prompt.has_answer_choices else []
    for each in (description, *twins):
        if _seqio_wants_it():
            from t0repro.tasks.seqio_tasks import add_task

            add_task(each)
        record_task(each)
    return description.prompt


def add_mixture(
    name: str,
    tasks: Sequence[str] | Mapping[str, float],
    default_rate: Callable[[PromptedRows], float] | None = None,
) -> None:
    """Registers a mixture of prompted tasks; registering it again has no effect.

    Args:
      name: The mixture's name.
      tasks: Task names, each mapped to its rate unless there is a default.
      default_rate: Computes a task's rate from its rows.

    Raises:
      UserError: If a rate is missing, negative or non-finite, or all are 0; if a task is not
        registered, or the tasks have different features or vocabularies; or if there is another
        mixture of this name.
    """
    rates = tasks if isinstance(tasks, Mapping) else {}
    check_rates(name, rates)
    mixtures = registered_mixtures()
    # SeqIO alone mixes mixtures.
    _check_registered(tasks, {*registered_tasks(), *(mixtures if _seqio_wants_it() else ())})
    _check_default_rate(name, tasks, default_rate)
    members = {task.name: task for each in tasks for task in find_tasks(each)}
    before = prompted_mixtures().get(name)
    if (name in mixtures and set(mixtures[name]) != set(members)) or (
        before is not None and before.rates != rates
    ):
        raise UserError(
            f"There is a mixture {name!r} of other tasks or rates already.",
            fix="Give another name.",
        )
    check_alike(name, list(members.values()))
    if _seqio_wants_it():
        from t0repro.tasks.seqio_tasks import add_mixture as add_to_seqio

        add_to_seqio(name, tasks, default_rate)
    # One with other tasks, or with mixtures in it, is SeqIO's.
    if set(tasks) <= prompted_tasks().keys():
        record_mixture(PromptedMixture(name, tuple(tasks), rates, default_rate))


def _check_registered(tasks: Iterable[str], known: Set[str], where: str | None = None) -> None:
    for task in tasks:
        if task not in known:
            raise UserError(
                f"There is no task {task!r}.",
                where=where,
                fix=f"Nearest: {nearest_names(task, sorted(known))}; or name its --module_import.",
            )


def _check_default_rate(name: str, tasks: Iterable[str], rate: Callable[..., float] | None) -> None:
    if isinstance(tasks, Mapping):
        return
    others = [task for task in tasks if task not in prompted_tasks()]
    if others or not callable(rate):
        what = f"{some(others)} in mixture {name!r}" if others else f"mixture {name!r}"
        why = "no prompted task, whose rows" if others else "no function of a task's rows"
        raise UserError(
            f"There is no rate for {what}: the default is {why}.",
            fix="Give each task its rate: add_mixture(name, {task: rate, ...}).",
        )


def _seqio_wants_it() -> bool:
    return not _only_described or "seqio" in sys.modules


def _check_metrics(dataset: str, template: Any) -> None:
    if modelled_on(dataset) in OF_T5:
        return
    unknown = [name for name in template.metadata.metrics or () if name not in METRICS]
    if unknown:
        raise UserError(
            f"Template {template.name!r} of {dataset} names metrics that t5 lacks: {unknown}.",
            fix=f"Leave the template out, or name others: {', '.join(METRICS)}.",
        )


def _check_texts(task: str, vocabulary: object) -> None:
    seqio = sys.modules.get("seqio")
    if seqio is not None and isinstance(vocabulary, seqio.PassThroughVocabulary):
        raise UserError(
            f"The task {task} cannot have a PassThroughVocabulary, which takes tokens: a prompt"
            " gives texts.",
            fix="Give it a VocabularyFile, or another vocabulary of SeqIO's.",
        )


def _prompt(rows: PromptedRows) -> PromptedTask:
    template = rows.template
    return PromptedTask(
        name=rows.name,
        dataset=rows.dataset,
        subset=rows.subset,
        template_name=template.name,
        template_id=template.id,
        has_answer_choices=bool(template.answer_choices),
        fixed_choices=fixed_choices(template),
        metrics=tuple(template.metadata.metrics or ()),
        original_task=bool(template.metadata.original_task),
        prompt=template.jinja,
    )


def _with_most_splits(description: TaskDescription) -> TaskDescription:
    """The task, or its earlier registration if that one already has all of its splits."""
    known = task_descriptions().get(description.prompt.name)
    if known is None:
        return description
    ours, theirs = description.rows, known.rows
    # Equal in everything but the splits; otherwise it is another task of the same name.
    if (
        known.prompt != description.prompt
        or theirs.root != ours.root
        or not may_be_same(known.vocabulary, description.vocabulary)
        or not _agree(theirs.files_of_splits, ours.files_of_splits)
    ):
        raise name_is_taken(description.prompt.name)
    # t0repro.tasks.local registers the splits on disk, t0repro.tasks.t0 all of them. Whichever is
    # imported first, the task ends up with all splits.
    return known if ours.files_of_splits.keys() <= theirs.files_of_splits.keys() else description


def _agree(one: Mapping[str, Split], other: Mapping[str, Split]) -> bool:
    """Whether one has all of the other's splits, with the same rows."""
    # The registration with fewer splits has to be a part of the other.
    few, many = sorted((one, other), key=len)
    return few.items() <= many.items()


def name_is_taken(name: str) -> UserError:
    """The error for two different tasks with one name."""
    return UserError(
        f"A task {name!r} with other data, or another prompt or vocabulary, is registered already.",
        fix="Import only one of the modules that register it, or give this one another name.",
    )


# Modules ----------------------------------------------------------------------------------------

_OWN = "t0repro."


def needs_seqio(modules: Iterable[str]) -> bool:
    """Whether a module may register directly with SeqIO, as any but t0repro's own may."""
    return not all(module.startswith(_OWN) for module in modules)


def load_tasks(
    modules: Sequence[str], templates: Sequence[str | Path] = (), *, into_seqio: bool
) -> Mapping[str, PromptedTask]:
    """Imports modules that register tasks, and registers the tasks of template files.

    Args:
      modules: Module names.
      templates: Files in promptsource's YAML format.
      into_seqio: Whether to add the tasks to SeqIO. If not, they are only described, which takes
        under a second unless a module needs SeqIO.

    Returns:
      Every prompted task registered so far.

    Raises:
      UserError: If a module cannot be found, or a file is broken.
    """
    modules = resolved_modules(modules)
    for path in templates:
        read_template_file(path)  # report a broken file before seconds of imports
    # A user's module may register plain SeqIO tasks in addition to prompted ones.
    with_seqio = into_seqio or needs_seqio(modules)
    if with_seqio and modules:
        # First: on a current TensorFlow, SeqIO and t5 cannot be imported without it.
        from t0repro import compat

        compat.quiet_logs()
        compat.install()
        from t0repro.tasks.seqio_tasks import read_t5s_vocabulary_as_ours

        read_t5s_vocabulary_as_ours()
        hand_to_seqio()
    with contextlib.nullcontext() if with_seqio else describing():
        for module in modules:
            _import(module)
        for path in templates:
            register_templates(path)
    return prompted_tasks()


def hand_to_seqio() -> None:
    """Adds to SeqIO what was only described, since a module registers tasks on its first import."""
    if not task_descriptions():
        return
    import seqio

    from t0repro.tasks import seqio_tasks

    names = set(seqio.TaskRegistry.names())
    for name, description in task_descriptions().items():
        if name not in names:
            seqio_tasks.add_task(description)
    # After the tasks: SeqIO makes no mixture of tasks that it does not have.
    for mixture in prompted_mixtures().values():
        rates = mixture.rates or mixture.tasks
        seqio_tasks.add_mixture(mixture.name, rates, mixture.default_rate)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module exists but one of its own imports does not: this is not a typo of the user's.
        if error.name is None or not module.startswith(error.name):
            raise
        raise UserError(
            f"There is no module {module!r}.",
            where="--module_import",
            fix="Name a module that registers tasks, for instance t0repro.tasks.t0. One of your own"
            " is looked for in PYTHONPATH and in the working folder.",
        ) from error
    except UserError:
        raise
    except Exception as error:  # whatever a user's module raises, or SeqIO for it
        if module.startswith(_OWN):
            raise
        others = (sys.prefix, sys.base_prefix, str(Path(__file__).parent), "<")
        own = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(others)
        ]
        raise UserError(
            f"The module {module!r} cannot be imported:"
            f" {shortened(f'{type(error).__name__}: {error}', 300)}",
            where=own[-1] if own else None,
            fix="Correct the module; --debug shows the traceback.",
        ) from error


# Files of prompts -------------------------------------------------------------------------------


def register_templates(path: str | Path) -> list[PromptedTask]:
    """Registers a task and its `_score_eval` twin for each template of a file, and its mixtures.

    Tasks are named by T0's rule. Their splits are the files in the dataset's folder under
    T0REPRO_DATA_DIR; ANLI's rounds give three tasks, as in T0. Registering the same file again does
    nothing.

    Returns:
      The tasks, without the twins.

    Raises:
      UserError: If the file is broken, a name is taken, or the folder of the rows is missing.
    """
    content = read_template_file(path)
    splits_of_suffix = _splits(content)
    registered = []
    # One suffix, the empty one, except for ANLI, whose rounds are tasks of their own.
    for suffix, splits in splits_of_suffix.items():
        for template in content.templates:
            name = task_name(content.dataset, content.subset, template.name) + suffix
            _check_name_is_free(name, template, content)
            try:
                task = add_prompted_task(
                    content.dataset,
                    content.subset,
                    template.name,
                    splits,
                    name=name,
                    template=template,
                )
            except UserError as error:
                raise UserError(
                    error.what, where=f"{path}, template {template.name!r}", fix=error.fix
                ) from error
            registered.append(task)
    for name, rates in content.mixtures.items():
        _register_mixture(name, rates, content)
    return registered


def _register_mixture(name: str, rates: Mapping[str, float], content: TemplateFile) -> None:
    # Checked here, not by read_template_file: a mixture may name tasks of modules imported since.
    where = f"{content.path}, mixture {name!r}"
    known = set(registered_tasks())
    _check_registered(rates, known, where)
    mixtures = registered_mixtures()
    before = prompted_mixtures().get(name)
    # The same mixture again is no error: a process may read a file twice.
    if name in known or (
        name in mixtures and (before is None or dict(before.rates) != dict(rates))
    ):
        raise UserError(
            f"There is a task or mixture {name!r} already.", where=where, fix="Give another name."
        )
    add_mixture(name, rates)


def _check_name_is_free(name: str, template: Any, content: TemplateFile) -> None:
    known = task_descriptions().get(name)
    other = None if known is None else known.rows.template
    if other is not None and (other.jinja, other.id) != (template.jinja, template.id):
        raise UserError(
            f"There is a task {name!r} already, of another template.",
            where=f"{content.path}, template {template.name!r}",
            fix="Give the template another name.",
        )


def _splits(content: TemplateFile) -> dict[str, dict[str, Split]]:
    """Task name suffix -> split -> where its rows come from, for the splits on disk."""
    root = data_folder()
    folder = dataset_folder(root, content.dataset, content.subset)
    held = splits_on_disk(folder)
    rounds = rounds_of(content.dataset) or {"": {split: split for split in held}}
    found = {
        suffix: {split: Split(file) for split, file in splits.items() if file in held}
        for suffix, splits in rounds.items()
    }
    found = {suffix: splits for suffix, splits in found.items() if splits}
    if found:
        return found
    known = [str(path.parent.relative_to(root)) for path in sorted(root.glob("*/*/*.*"))]
    raise UserError(
        f"There are no rows for {content.path}: dataset {content.dataset!r}, subset"
        f" {content.subset!r}.",
        where=str(folder),
        fix="Put <split>.jsonl or <split>.parquet there; folders there are, nearest: "
        f"{nearest_names(str(folder.relative_to(root)), known)}.",
    )
