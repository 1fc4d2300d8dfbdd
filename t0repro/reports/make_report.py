"""Builds a report: scores of one run, and what else there is to put beside them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t0repro.evaluation.outputs import find_tasks, latest_step
from t0repro.evaluation.records import read_records
from t0repro.reports import provenance
from t0repro.reports.compare import (
    LossComparison,
    ScoreComparison,
    compare_losses,
    compare_scores,
)
from t0repro.reports.generation_summary import generation_results
from t0repro.reports.published import published_figures
from t0repro.reports.report import Bootstrap, Report, TaskCost
from t0repro.reports.summary import (
    PromptInfo,
    fixed_classes,
    loss_curve,
    rank_folder,
    summarize,
)


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a report may show beside its own run's scores.

    Attributes:
      other_label: what to call the second run.
      other_eval_dir: the second run's `<split>_eval` folder.
      metrics: metrics.jsonl of the training, for its loss curve.
      losses: two metrics.jsonl to compare, this run's stack first.
      conversion: what a conversion of the checkpoint and back gave, as text.
      notes: sentences for the top of the report.
    """

    other_label: str | None = None
    other_eval_dir: str | os.PathLike[str] | None = None
    metrics: str | os.PathLike[str] | None = None
    losses: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None
    losses_labels: tuple[str, str] | None = None
    conversion: str | None = None
    notes: tuple[str, ...] = ()


def make_report(
    eval_dir: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    *,
    label: str,
    training_datasets: Collection[str] | None = None,
    training_tasks: Collection[str] = (),
    step: int | None = None,
    title: str = "Rank evaluation",
    bootstrap: Bootstrap | None = None,
    checkpoint: str | None = None,
    device: str | None = None,
    duration_seconds: float | None = None,
    beside: Beside | None = None,
    tasks: Sequence[str] | None = None,
    extras: Collection[str] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Ranks a folder's tasks and gathers the report; nothing is written.

    Args:
      eval_dir: the `<split>_eval` folder.
      prompts: task name -> its prompt, as t0repro.tasks.prompted_tasks() gives them; may be empty.
      label: what to call the run, for instance `jax`.
      training_datasets: labels of the datasets that were trained on, as summary.dataset_label gives
        them; None where unknown.
      training_tasks: names of the tasks that were trained on.
      step: the step to report, the latest in the folder when None.
      title: the report's heading.
      bootstrap: how to make the intervals.
      checkpoint: path of the checkpoint.
      device: what it was evaluated on.
      duration_seconds: how long the evaluation took.
      beside: a second run, losses and text.
      tasks: report only these of the folder's.
      extras: definitions to report beside T0's: target_length (a score is divided by its choice's
        tokens), calibrated (less the score after a content-free input, where that was scored).
      notes: further sentences for the top of the report.

    Raises:
      UserError: if files are missing or cannot be read, or scores are NaN.
    """
    bootstrap, beside = bootstrap or Bootstrap(), beside or Beside()
    step = latest_step(eval_dir) if step is None else step
    records = read_records(eval_dir, step)
    ranked, decoded = _by_mode(eval_dir, records, tasks)
    results = rank_folder(eval_dir, prompts, step=step, tasks=ranked)
    groups, datasets = summarize(
        results,
        prompts,
        eval_dir=eval_dir,
        training_datasets=training_datasets,
        training_tasks=training_tasks,
        bootstrap=bootstrap,
        extras=_extras(eval_dir, prompts, step, ranked, extras, records),
    )
    stacks, losses = _compared(eval_dir, prompts, step, label, beside)
    return Report(
        title=title,
        provenance=provenance.collect(
            eval_dir,
            label=label,
            step=step,
            checkpoint=checkpoint,
            device=device,
            duration_seconds=duration_seconds,
        ),
        bootstrap=bootstrap,
        groups=groups,
        datasets=datasets,
        stacks=stacks,
        losses=losses,
        loss_curve=loss_curve(beside.metrics, label) if beside.metrics is not None else None,
        conversion=beside.conversion,
        notes=(*beside.notes, *notes),
        published=published_figures({dataset.dataset for dataset in datasets}),
        tasks=_costs(records, [result.task for result in results]),
        generation=generation_results(
            eval_dir, decoded, prompts, training_datasets, training_tasks
        ),
    )


def _by_mode(
    eval_dir: str | os.PathLike[str],
    records: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[str] | None,
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """The tasks that were ranked, and the records of those that were decoded."""
    decoded = {name: found for name, found in records.items() if found.get("mode") == "generate"}
    if tasks is None:
        return list(find_tasks(eval_dir)), list(decoded.values())
    ranked = [task for task in tasks if task not in decoded]
    return ranked, [decoded[task] for task in tasks if task in decoded]


def _compared(
    eval_dir: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    step: int,
    label: str,
    beside: Beside,
) -> tuple[ScoreComparison | None, LossComparison | None]:
    """This run's scores and losses beside the other's, as far as there is one."""
    other = beside.other_label or "other"
    stacks = losses = None
    if beside.other_eval_dir is not None:
        stacks = compare_scores(
            eval_dir,
            beside.other_eval_dir,
            step_a=step,
            label_a=label,
            label_b=other,
            num_classes=fixed_classes(prompts),
        )
    if beside.losses is not None:
        label_a, label_b = beside.losses_labels or (label, other)
        losses = compare_losses(*beside.losses, label_a=label_a, label_b=label_b)
    return stacks, losses


def _extras(
    eval_dir: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    step: int,
    tasks: Sequence[str],
    names: Collection[str],
    records: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, float]]:
    """Task -> name of a definition -> accuracy under it, in percent."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        less = None
        if name == "calibrated":
            less = {
                task: record["content_free"]
                for task, record in records.items()
                if record.get("content_free") is not None
            }
        results = rank_folder(
            eval_dir,
            prompts,
            step=step,
            tasks=list(tasks),
            normalize_by_target_length=name == "target_length",
            less=less,
        )
        for result in results:
            found.setdefault(result.task, {})[name] = result.accuracy
    return found


def _costs(records: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> tuple[TaskCost, ...]:
    """What each task took, the slowest first, where the evaluation recorded it."""
    costs = [
        TaskCost(
            task=task,
            pairs=records[task]["pairs"],
            tokens=records[task]["input_tokens"] + records[task]["target_tokens"],
            longest_input=records[task]["longest_input"],
            seconds=records[task]["seconds"],
        )
        for task in tasks
        if task in records
    ]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))
