"""Registers prompted tasks, and their twins for rank classification, as T0 did.

Tasks come from modules that call `add_prompted_task` and `add_mixture` when they are imported, and
from users' own template files.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.catalog import modeled_on
from t0repro.tasks.metrics import PROMPTSOURCE_METRICS, T5_DATASETS
from t0repro.tasks.mixture_checks import check_alike, check_rates, may_be_same
from t0repro.tasks.registry import (
    PromptedMixture,
    find_tasks,
    how_to_register,
    name_is_taken,
    prompted_mixtures,
    prompted_tasks,
    record_mixture,
    record_task,
    registered_mixtures,
    registered_tasks,
    task_descriptions,
)
from t0repro.tasks.rendering import fixed_choices
from t0repro.tasks.source import PromptedRows, Split
from t0repro.tasks.task import PromptedTask, TaskDescription
from t0repro.tasks.templates import load_template, task_name
from t0repro.tasks.user_files import TEMPLATES_VARIABLE, template_files
from t0repro.tasks.vocabulary import VocabularyFile, default_vocabulary, shown
from t0repro.words import some

if TYPE_CHECKING:
    import seqio

_only_described = False


@contextlib.contextmanager
def describing() -> Iterator[None]:
    """Context in which tasks and mixtures are registered here but not in SeqIO.

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
      root: The folder of datasets; defaults to those that T0REPRO_DATA_DIR names.
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
    description = _choose_most_splits(describe(rows, vocabulary))
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
      tasks: Names of tasks, or of other mixtures, each mapped to its rate unless there is a
        default. As in SeqIO, a mixture's rate is shared by its tasks by their own rates.
      default_rate: Computes a task's rate from its rows.

    Raises:
      UserError: If a rate is missing, negative or non-finite, or all are 0; if a task is not
        registered, or the tasks have different features or vocabularies; or if there is another
        mixture of this name.
    """
    rates = tasks if isinstance(tasks, Mapping) else {}
    check_rates(name, rates)
    mixtures = registered_mixtures()
    check_registered(tasks, {*registered_tasks(), *mixtures})
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
    # One with other tasks in it is SeqIO's.
    if set(tasks) <= prompted_tasks().keys() | prompted_mixtures().keys():
        record_mixture(PromptedMixture(name, tuple(members), rates, default_rate))


def check_registered(tasks: Iterable[str], known: Set[str], where: str | None = None) -> None:
    """Raises UserError for a task or mixture that is not known, with the nearest names."""
    for task in tasks:
        if task not in known:
            nearest = nearest_names(task, sorted(known))
            fix = how_to_register(task, nearest)
            # Without a place in a file, a module asks.
            if where is None and template_files():
                fix = (
                    f"Nearest: {nearest}. A module gets the prompts of {TEMPLATES_VARIABLE} by"
                    " `import t0repro.tasks.user_templates`."
                )
            raise UserError(
                f"There is no task or mixture {task!r}.",
                where=where,
                fix=fix,
            )


def _check_default_rate(name: str, tasks: Iterable[str], rate: Callable[..., float] | None) -> None:
    if isinstance(tasks, Mapping):
        return
    others = [task for task in tasks if task not in prompted_tasks()]
    if others or not callable(rate):
        what = f"{some(others)} in mixture {name!r}" if others else f"mixture {name!r}"
        why = "no prompted task, whose rows" if others else "not a function of a task's rows"
        raise UserError(
            f"There is no rate for {what}: the default is {why}.",
            fix="Give each task its rate: add_mixture(name, {task: rate, ...}).",
        )


def _seqio_wants_it() -> bool:
    return not _only_described or "seqio" in sys.modules


def _check_metrics(dataset: str, template: Any) -> None:
    if modeled_on(dataset) in T5_DATASETS:
        return
    unknown = [name for name in template.metadata.metrics or () if name not in PROMPTSOURCE_METRICS]
    if unknown:
        raise UserError(
            f"Template {template.name!r} of {dataset} names metrics that t5 lacks: {unknown}.",
            fix=f"Leave the template out, or name others: {', '.join(PROMPTSOURCE_METRICS)}.",
        )


def _check_texts(task: str, vocabulary: object) -> None:
    seqio = sys.modules.get("seqio")
    if seqio is not None and isinstance(vocabulary, seqio.PassThroughVocabulary):
        raise UserError(
            f"The task {task} cannot have a PassThroughVocabulary, which takes tokens: a prompt"
            " gives texts.",
            fix="Give it a VocabularyFile, or another vocabulary of SeqIO's.",
        )


def describe(
    rows: PromptedRows, vocabulary: VocabularyFile | seqio.Vocabulary | None = None
) -> TaskDescription:
    """The task that renders these rows with their template; it is not registered."""
    template = rows.template
    prompt = PromptedTask(
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
    return TaskDescription(prompt, rows, vocabulary or default_vocabulary())


def _choose_most_splits(description: TaskDescription) -> TaskDescription:
    """The task, or its earlier registration if that one already has all of its splits."""
    known = task_descriptions().get(description.prompt.name)
    if known is None:
        return description
    name, ours, theirs = description.prompt.name, description.rows, known.rows
    # Equal in everything but the splits; otherwise it is another task of the same name.
    if known.prompt != description.prompt:
        raise name_is_taken(name, "with another prompt")
    if theirs.root != ours.root or not _agree(theirs.files_of_splits, ours.files_of_splits):
        raise name_is_taken(name, "with other data")
    if not may_be_same(known.vocabulary, description.vocabulary):
        raise name_is_taken(name, f"with another vocabulary ({shown(known.vocabulary)})")
    # t0repro.tasks.local registers the splits on disk, t0repro.tasks.t0 all of them. Whichever is
    # imported first, the task ends up with all splits.
    return known if ours.files_of_splits.keys() <= theirs.files_of_splits.keys() else description


def _agree(one: Mapping[str, Split], other: Mapping[str, Split]) -> bool:
    """Whether one has all of the other's splits, with the same rows."""
    # The registration with fewer splits has to be a part of the other.
    few, many = sorted((one, other), key=len)
    return few.items() <= many.items()
