"""Computes `t0repro tasks ls`, and prints the tables of ls, show and check on a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks.catalog import p3_sizes
from t0repro.tasks.metrics import metric_names
from t0repro.tasks.registry import (
    prompted_mixtures,
    prompted_tasks,
    registered_mixtures,
    select_tasks,
    task_descriptions,
)
from t0repro.tasks.task import PromptedTask

OVERSAMPLED = 2.0
"""A rate above this multiple of the training examples is marked."""


@dataclasses.dataclass(frozen=True)
class ListedTask:
    """A line of the list.

    Attributes:
      task: The SeqIO task's name.
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      template: promptsource's name for the template.
      choices: The answer choices; empty if they differ between examples, None if there are none.
      metrics: Names of its evaluation metrics.
      original_task: Whether the prompt poses the dataset's original task.
      mixture: The mixture of the rate, or None if no registered one has the task.
      rate: Its weight in the mixture, in examples; None if not known.
      examples: Number of training examples after the template has dropped rows; None if not known.
      oversampled: Rate divided by examples, if both are known and the task is not a twin.
      cached: The cache folder that has the complete task, or None.
    """

    task: str
    dataset: str
    subset: str | None
    template: str
    choices: tuple[str, ...] | None
    metrics: tuple[str, ...]
    original_task: bool
    mixture: str | None
    rate: float | None
    examples: int | None
    oversampled: float | None
    cached: str | None


def list_tasks(
    mixture: str | None = None,
    dataset: str | None = None,
    caches: Sequence[Path] = (),
    *,
    skip_missing: bool = False,
) -> list[ListedTask]:
    """The registered prompted tasks, sorted by name.

    Args:
      mixture: Only tasks of this mixture; defaults to all.
      dataset: Only tasks of this dataset, given as `dataset` or `dataset/subset`.
      caches: SeqIO cache folders to look for each task in; the first that has it wins.
      skip_missing: Only tasks that are cached there, or have a split with rows on this machine.

    Raises:
      UserError: If the mixture or the dataset does not exist; lists the nearest names.
    """
    known = prompted_tasks()
    names = select_tasks(mixture, dataset)
    mixtures = _mixtures_of_tasks() if mixture is None else {name: mixture for name in names}
    found = [_list_task(known[name], mixtures.get(name), caches) for name in names]
    if not skip_missing:
        return found
    rows = {name: task_descriptions()[name].rows for name in names}
    return [task for task in found if task.cached or rows[task.task].available_splits()]


def _mixtures_of_tasks() -> dict[str, str]:
    """Task -> the first registered mixture that has it; all of T0's give it the same rate."""
    found: dict[str, str] = {}
    for name, tasks in registered_mixtures().items():
        for task in tasks:
            found.setdefault(task, name)
    return found


def _list_task(task: PromptedTask, mixture: str | None, caches: Sequence[Path]) -> ListedTask:
    rate = None if mixture is None else _rate(mixture, task.name)
    # The marker is written last, so a folder with it is complete.
    cached = next(
        (folder for folder in caches if (folder / task.name / "COMPLETED").is_file()), None
    )
    examples = _training_examples(task.name, cached)
    trains = rate is not None and not task.score_eval
    return ListedTask(
        task=task.name,
        dataset=task.dataset,
        subset=task.subset,
        template=task.template_name,
        choices=(task.fixed_choices or ()) if task.has_answer_choices else None,
        metrics=metric_names(task),
        original_task=task.original_task,
        mixture=mixture,
        rate=rate,
        examples=examples,
        # A twin's rate has no meaning, since nothing trains on it.
        oversampled=rate / examples if trains and rate and examples else None,
        cached=None if cached is None else str(cached),
    )


def _rate(mixture: str, task: str) -> float | None:
    try:
        known = prompted_mixtures().get(mixture)
        rate = _rate_in_seqio(mixture, task) if known is None else known.rate(task)
    except UserError:  # the rate is a number of rows, which are not available
        return None
    # Most rates are integers; print these without a fraction.
    return int(rate) if float(rate).is_integer() else rate


def _rate_in_seqio(mixture: str, task: str) -> float:
    import seqio

    return seqio.MixtureRegistry.get(mixture).get_rate(seqio.TaskRegistry.get(task))


def _training_examples(task: str, cached: Path | None) -> int | None:
    if cached is not None:
        statistics = cached / task / "stats.train.json"
        if statistics.is_file():
            # The cache's own statistics are exact; P3's sizes are those of the released version.
            return json.loads(statistics.read_text()).get("examples")
    return p3_sizes().get(task, {}).get("train")


def as_json(tasks: Sequence[ListedTask]) -> list[dict[str, Any]]:
    """The lines as JSON values; choices that differ between examples become `per example`."""
    return [
        dataclasses.asdict(task) | ({"choices": "per example"} if task.choices == () else {})
        for task in tasks
    ]
