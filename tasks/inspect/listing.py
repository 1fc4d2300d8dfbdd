"""What `t0repro tasks ls` shows: each registered prompt, its rate, its size, where it is cached."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks.catalogue import p3_sizes
from t0repro.tasks.mixture import prompted_mixtures, registered_mixtures, select_tasks
from t0repro.tasks.task import PromptedTask, metric_names, prompted_tasks

OVERSAMPLED = 2.0
"""A rate above so many times the training examples is pointed out."""


@dataclasses.dataclass(frozen=True)
class ListedTask:
    """A line of the list.

    Attributes:
      task: the SeqIO task's name.
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      template: promptsource's name of the template.
      choices: the answer choices; empty where they differ from example to example, None where the
        template has none.
      metrics: names of the metrics that it is evaluated by.
      original_task: whether the prompt asks for what the dataset was made for.
      mixture: the mixture that the rate is of, or None where no registered one has the task.
      rate: its weight in the mixture, in examples; None where it is not known.
      examples: of the training split, after the template has dropped rows; None if not known.
      oversampled: rate over examples, where a mixture to train on is concerned and both are known.
      cached: the cache folder that holds it whole, or None.
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
    mixture: str | None = None, dataset: str | None = None, caches: Sequence[Path] = ()
) -> list[ListedTask]:
    """The registered prompted tasks, sorted by name.

    Args:
      mixture: only its tasks.
      dataset: only this one's, `dataset` or `dataset/subset`.
      caches: SeqIO cache folders to look for the tasks in, the first that holds one wins.

    Raises:
      UserError: if the mixture or the dataset is not there; the nearest names are listed.
    """
    known = prompted_tasks()
    names = select_tasks(mixture, dataset)
    mixtures = _mixtures_of_tasks() if mixture is None else {name: mixture for name in names}
    return [_listed(known[name], mixtures.get(name), caches) for name in names]


def _mixtures_of_tasks() -> dict[str, str]:
    """Task -> the first registered mixture that has it; T0's give a task one rate in all."""
    found: dict[str, str] = {}
    for name, tasks in registered_mixtures().items():
        for task in tasks:
            found.setdefault(task, name)
    return found


def _listed(task: PromptedTask, mixture: str | None, caches: Sequence[Path]) -> ListedTask:
    rate = None if mixture is None else _rate(mixture, task.name)
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
        oversampled=rate / examples if trains and rate and examples else None,
        cached=None if cached is None else str(cached),
    )


def _rate(mixture: str, task: str) -> float | None:
    try:
        known = prompted_mixtures().get(mixture)
        rate = _rate_in_seqio(mixture, task) if known is None else known.rate(task)
    except UserError:  # a rate that is the number of rows, which are not at hand
        return None
    return int(rate) if float(rate).is_integer() else rate


def _rate_in_seqio(mixture: str, task: str) -> float:
    import seqio

    return seqio.MixtureRegistry.get(mixture).get_rate(seqio.TaskRegistry.get(task))


def _training_examples(task: str, cached: Path | None) -> int | None:
    if cached is not None:
        statistics = cached / task / "stats.train.json"
        if statistics.is_file():
            return json.loads(statistics.read_text()).get("examples")
    return p3_sizes().get(task, {}).get("train")


def as_json(tasks: Sequence[ListedTask]) -> list[dict[str, Any]]:
    """The lines as JSON values; choices that differ by example are `per example`."""
    return [_task_as_json(task) for task in tasks]


def _task_as_json(task: ListedTask) -> dict[str, Any]:
    values: Mapping[str, Any] = dataclasses.asdict(task)
    return {**values, "choices": "per example" if task.choices == () else values["choices"]}
