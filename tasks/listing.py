"""What `t0repro tasks ls` shows: each registered prompt, its rate, its size, where it is cached."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import seqio

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.p3_sizes import p3_sizes
from t0repro.tasks.registry import PromptedTask, prompted_tasks

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
      metrics: names of the task's metric functions.
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
    names: Iterable[str] = known
    if mixture is not None:
        names = {task.name for task in _mixture(mixture).tasks} & set(known)
    if dataset is not None:
        names = [name for name in names if dataset in _labels(known[name])]
        if not names:
            everywhere = sorted({label for task in known.values() for label in _labels(task)})
            inside = f" in {mixture}" if mixture else ""
            raise UserError(
                f"There is no task of dataset {dataset!r}{inside}.",
                where="--dataset",
                fix=f"Nearest: {nearest_names(dataset, everywhere)}.",
            )
    mixtures = _mixtures_of_tasks() if mixture is None else {name: mixture for name in names}
    return [_listed(known[name], mixtures.get(name), caches) for name in sorted(names)]


def _labels(task: PromptedTask) -> tuple[str, ...]:
    label = task.dataset if task.subset is None else f"{task.dataset}/{task.subset}"
    return (task.dataset, label)


def _mixture(name: str) -> seqio.Mixture:
    if name not in seqio.MixtureRegistry.names():
        raise UserError(
            f"There is no mixture {name!r}.",
            where="--mixture",
            fix=f"Nearest: {nearest_names(name, seqio.MixtureRegistry.names())}.",
        )
    return seqio.MixtureRegistry.get(name)


def _mixtures_of_tasks() -> dict[str, str]:
    """Task -> the first registered mixture that has it; T0's give a task one rate in all."""
    found: dict[str, str] = {}
    for name in seqio.MixtureRegistry.names():
        for task in seqio.MixtureRegistry.get(name).tasks:
            found.setdefault(task.name, name)
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
        metrics=_metric_names(task.name),
        original_task=task.original_task,
        mixture=mixture,
        rate=rate,
        examples=examples,
        oversampled=rate / examples if trains and rate and examples else None,
        cached=None if cached is None else str(cached),
    )


def _rate(mixture: str, task: str) -> float | None:
    try:
        rate = seqio.MixtureRegistry.get(mixture).get_rate(seqio.TaskRegistry.get(task))
    except UserError:  # a rate that is the number of rows, which are not at hand
        return None
    return int(rate) if float(rate).is_integer() else rate


def _training_examples(task: str, cached: Path | None) -> int | None:
    if cached is not None:
        statistics = cached / task / "stats.train.json"
        if statistics.is_file():
            return json.loads(statistics.read_text()).get("examples")
    return p3_sizes().get(task, {}).get("train")


def _metric_names(task: str) -> tuple[str, ...]:
    names = []
    for metric in seqio.TaskRegistry.get(task).metric_fns:
        while isinstance(metric, functools.partial):
            metric = metric.func
        names.append(getattr(metric, "__name__", str(metric)))
    return tuple(names)


def as_json(tasks: Sequence[ListedTask]) -> list[dict[str, Any]]:
    """The lines as JSON values; choices that differ by example are `per example`."""
    return [_task_as_json(task) for task in tasks]


def _task_as_json(task: ListedTask) -> dict[str, Any]:
    values: Mapping[str, Any] = dataclasses.asdict(task)
    return {**values, "choices": "per example" if task.choices == () else values["choices"]}
