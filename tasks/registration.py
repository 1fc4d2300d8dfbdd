"""Registers a prompted task, and the twin that rank classification evaluates, as T0 did."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError
from t0repro.tasks import registry
from t0repro.tasks.metric_names import METRICS, OF_T5
from t0repro.tasks.prompted_rows import PromptedRows
from t0repro.tasks.registry import TaskDescription
from t0repro.tasks.splits import Split
from t0repro.tasks.templates import fixed_choices, load_template, task_name
from t0repro.tasks.vocabulary import VocabularyFile, default_vocabulary

if TYPE_CHECKING:
    import seqio

_only_described = False


@contextlib.contextmanager
def describing() -> Iterator[None]:
    """Within it, tasks and mixtures are described in `t0repro.tasks.registry`, not added to SeqIO.

    SeqIO and TensorFlow take seconds and a gigabyte, and who only renders prompts needs neither.
    Where SeqIO has been imported, it gets them nevertheless; where it is imported later, it does
    not: modules are imported once.
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
) -> registry.PromptedTask:
    """Registers a task and, where its template has answer choices, `<name>_score_eval`.

    Nothing is read but the template. Registering the same task once more does nothing, unless it
    has splits besides: then it stands in for the first.

    Args:
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      template_name: promptsource's name of the template.
      splits: the task's splits, by name -> where each comes from; a sequence of names stands for
        files of the same names.
      root: the folder of the datasets; None is the one that T0REPRO_DATA_DIR names.
      vocabulary: of both features; None is `default_vocabulary()`.
      name: of the task; None is T0's.
      template: a promptsource `Template` that promptsource does not hold, a user's own; None is
        the one of that name.

    Raises:
      UserError: if the dataset or the template does not exist, the template names a metric that t5
        has not, or another task has the name.
    """
    if template is None:
        template = load_template(dataset, subset, template_name)
    name = name or task_name(dataset, subset, template_name)
    if not isinstance(splits, Mapping):
        splits = {split: Split(split) for split in splits}
    _check_metrics(dataset, template)
    rows = PromptedRows(name, dataset, subset, template, splits, root)
    description = _with_most_splits(
        TaskDescription(_prompt(rows), rows, vocabulary or default_vocabulary())
    )
    twins = [description.twin()] if description.prompt.has_answer_choices else []
    for each in (description, *twins):
        if _seqio_wants_it():
            from t0repro.tasks.seqio_tasks import add_task

            add_task(each)
        registry.record_task(each)
    return description.prompt


def add_mixture(
    name: str,
    tasks: Sequence[str] | Mapping[str, float],
    default_rate: Callable[[PromptedRows], float] | None = None,
) -> None:
    """Registers a mixture of prompted tasks; once more does nothing.

    Args:
      name: of the mixture.
      tasks: their names, with a rate each where there is no default.
      default_rate: a task's rows -> its rate.
    """
    if _seqio_wants_it():
        from t0repro.tasks.seqio_tasks import add_mixture as add_to_seqio

        add_to_seqio(name, tasks, default_rate)
    rates = tasks if isinstance(tasks, Mapping) else {}
    registry.record_mixture(registry.PromptedMixture(name, tuple(tasks), rates, default_rate))


def _seqio_wants_it() -> bool:
    return not _only_described or "seqio" in sys.modules


def _check_metrics(dataset: str, template: Any) -> None:
    if dataset in OF_T5:
        return
    unknown = [name for name in template.metadata.metrics or () if name not in METRICS]
    if unknown:
        raise UserError(
            f"Template {template.name!r} of {dataset} names metrics that t5 has not: {unknown}.",
            fix=f"Leave the template out, or name others: {', '.join(METRICS)}.",
        )


def _prompt(rows: PromptedRows) -> registry.PromptedTask:
    template = rows.template
    return registry.PromptedTask(
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
    """The task, or the same one as registered before where that has more splits.

    t0repro.tasks.local takes what is at hand, t0repro.tasks.t0 all splits: in either order of their
    imports, the task has all.
    """
    known = registry.task_descriptions().get(description.prompt.name)
    if known is None:
        return description
    ours, theirs = description.rows, known.rows
    if (
        known.prompt != description.prompt
        or theirs.root != ours.root
        or not _agree(theirs.files_of_splits, ours.files_of_splits)
    ):
        raise name_is_taken(description.prompt.name)
    return known if ours.files_of_splits.keys() <= theirs.files_of_splits.keys() else description


def _agree(one: Mapping[str, Split], other: Mapping[str, Split]) -> bool:
    """Whether one has all splits of the other, of the same rows."""
    few, many = sorted((one, other), key=len)
    return few.items() <= many.items()


def name_is_taken(name: str) -> UserError:
    """The error about two tasks of one name."""
    return UserError(
        f"A task {name!r} with other data or another prompt is registered already.",
        fix="Import only one of the modules that register it, or give this one another name.",
    )
