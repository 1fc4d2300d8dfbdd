"""Builds a report from one run's scores and whatever else it should show, and writes its files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.evaluation.outputs import find_tasks, latest_step
from t0repro.evaluation.rank import RankResult
from t0repro.evaluation.records import read_records
from t0repro.reports.comparison import RunComparison, compare_runs
from t0repro.reports.decoded_tasks import generation_results
from t0repro.reports.history import History
from t0repro.reports.losses import LossComparison, compare_losses, loss_curve
from t0repro.reports.models import correct_p_values as corrected_comparisons
from t0repro.reports.prompts import PromptInfo, dataset_label, synthetic_datasets, tasks_by_dataset
from t0repro.reports.provenance import Provenance, collect_provenance, describe_unfinished
from t0repro.reports.published import published_figures
from t0repro.reports.ranking import rank_folder
from t0repro.reports.report import Report
from t0repro.reports.results import (
    GROUP_TITLES,
    DatasetOutcomes,
    DatasetResult,
    GroupResult,
    dataset_results,
    group_of,
    group_result,
)
from t0repro.reports.run import Run
from t0repro.reports.statistics import Bootstrap
from t0repro.reports.task_costs import task_costs

_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Options of a report.

    Attributes:
      title: the report's heading.
      bootstrap: how to compute the intervals.
      training_datasets: labels of the datasets trained on, as prompts.dataset_label returns them;
        None if unknown.
      training_tasks: names of the tasks trained on.
      tasks: names of the tasks to report; None for all in the folder.
      extras: definitions of accuracy to report besides T0's: target_length (divides a score by its
        choice's tokens), calibrated (subtracts the score for a content-free input, if scored).
      checkpoint: path of the checkpoint; defaults to the evaluation's record.
      device: the device of the evaluation; defaults to the evaluation's record.
      duration_seconds: duration of the evaluation; defaults to the evaluation's record.
      notes: sentences for the top of the report.
      overlap: task -> indices of its examples that share text with training rows, as returned by
        tasks.overlap.read_overlap; the report also gives accuracies without them. None if unknown.
    """

    title: str = "Rank evaluation"
    bootstrap: Bootstrap = dataclasses.field(default_factory=Bootstrap)
    training_datasets: Collection[str] | None = None
    training_tasks: Collection[str] = ()
    tasks: Sequence[str] | None = None
    extras: Collection[str] = ()
    checkpoint: str | None = None
    device: str | None = None
    duration_seconds: float | None = None
    notes: tuple[str, ...] = ()
    overlap: Mapping[str, Sequence[int]] | None = None


@dataclasses.dataclass(frozen=True)
class ExtraContent:
    """Optional parts of a report besides its run's scores.

    Attributes:
      other: a second run to compare scores with.
      metrics: the training run's metrics.jsonl, for its loss curve.
      losses: label and metrics.jsonl of two training runs to compare, this run's stack first.
      conversion: the result of converting the checkpoint and back, as text.
      history: accuracy by step, of an evaluation of several checkpoints.
    """

    other: Run | None = None
    metrics: _Path | None = None
    losses: tuple[tuple[str, _Path], tuple[str, _Path]] | None = None
    conversion: str | None = None
    history: History | None = None


def make_report(
    run: Run,
    prompts: Mapping[str, PromptInfo],
    options: ReportOptions | None = None,
    beside: ExtraContent | None = None,
) -> Report:
    """Ranks a folder's tasks and builds the report, without writing anything.

    Args:
      run: the run to report on.
      prompts: task name -> its prompt, from t0repro.tasks.prompted_tasks(); may be empty.
      options: the report's options.
      beside: a second run, losses and a conversion's result to show.

    Raises:
      UserError: if files are missing or cannot be read, or scores are NaN.
    """
    options, beside = options or ReportOptions(), beside or ExtraContent()
    step = latest_step(run.eval_dir) if run.step is None else run.step
    # Fix the step: a training run may write the next one while the report is being built.
    run = dataclasses.replace(run, step=step)
    records = read_records(run.eval_dir, step)
    ranked, decoded = _split_by_mode(run, records, options.tasks)
    results = rank_folder(run.eval_dir, prompts, step=step, tasks=ranked)
    extras = _extras(run, prompts, ranked, options.extras, records)
    without = accuracies_without(results, options.overlap or {})
    for task, accuracy in without.items():
        extras.setdefault(task, {})["without_overlap"] = accuracy
    groups, datasets = _summarize(results, prompts, run.eval_dir, options, extras)
    generation = generation_results(
        run.eval_dir, decoded, prompts, options.training_datasets, options.training_tasks
    )
    evaluated = [result.task for result in results] + [result.task for result in generation]
    return Report(
        title=options.title,
        provenance=_provenance(run, step, options),
        bootstrap=options.bootstrap,
        groups=groups,
        datasets=datasets,
        stacks=_stacks(run, prompts, options.bootstrap, beside),
        losses=_losses(beside),
        loss_curve=None if beside.metrics is None else loss_curve(beside.metrics, run.label),
        conversion=beside.conversion,
        history=beside.history,
        notes=(
            *options.notes,
            *_step_notes(Path(run.eval_dir), step, options.tasks),
            *_row_notes(results, prompts),
            *_overlap_notes(results, prompts, options.overlap, without),
        ),
        published=published_figures({dataset.dataset for dataset in datasets}),
        tasks=task_costs(records, evaluated),
        generation=generation,
        synthetic=synthetic_datasets({dataset_label(task, prompts) for task in evaluated}),
    )


def _provenance(run: Run, step: int, options: ReportOptions) -> Provenance:
    """The evaluation's record, except for what the options say in its place."""
    names = ("checkpoint", "device", "duration_seconds")
    given = {name: value for name in names if (value := getattr(options, name)) not in (None, "")}
    return dataclasses.replace(collect_provenance(run, step), **given)


def _split_by_mode(
    run: Run, records: Mapping[str, Mapping[str, Any]], tasks: Sequence[str] | None
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """The ranked tasks, and the records of the decoded ones."""
    decoded = {name: found for name, found in records.items() if found.get("mode") == "generate"}
    if tasks is None:
        # Decoded tasks have no scores: find_tasks does not list them.
        found = find_tasks(run.eval_dir)
        ranked = [task for task, steps in found.items() if run.step in steps]
        return ranked or list(found), list(decoded.values())
    ranked = [task for task in tasks if task not in decoded]
    return ranked, [decoded[task] for task in tasks if task in decoded]


def _stacks(
    run: Run, prompts: Mapping[str, PromptInfo], bootstrap: Bootstrap, beside: ExtraContent
) -> RunComparison | None:
    if beside.other is None:
        return None
    # The stacks must agree in every score, so a pair that one lacks is an error.
    (compared,) = corrected_comparisons(
        [compare_runs(run, beside.other, prompts, bootstrap, same_pairs=True)]
    )
    return compared


def _losses(beside: ExtraContent) -> LossComparison | None:
    if beside.losses is None:
        return None
    (label_a, metrics_a), (label_b, metrics_b) = beside.losses
    return compare_losses(metrics_a, metrics_b, label_a=label_a, label_b=label_b)


def _extras(
    run: Run,
    prompts: Mapping[str, PromptInfo],
    tasks: Sequence[str],
    names: Collection[str],
    records: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, float]]:
    """Task -> name of a definition -> accuracy under it, in percent."""
    accuracies: dict[str, dict[str, float]] = {}
    for name in names:
        less = None
        if name == "calibrated":
            less = {
                task: record["content_free"]
                for task, record in records.items()
                if record.get("content_free") is not None
            }
        # Rank the same scores again; only the added or dividing term differs.
        results = rank_folder(
            run.eval_dir,
            prompts,
            step=run.step,
            tasks=list(tasks),
            normalize_by_target_length=name == "target_length",
            less=less,
        )
        for result in results:
            accuracies.setdefault(result.task, {})[name] = result.accuracy
    return accuracies


def accuracies_without(
    results: Sequence[RankResult], overlap: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Task -> accuracy in percent without the examples that `overlap` lists.

    Tasks that it does not list, or whose examples are all listed, are omitted.
    """
    found = {}
    for result in results:
        kept = ~np.isin(result.example, overlap.get(result.task, ()))
        weight = np.where(kept, result.weight, 0.0)
        if not kept.all() and weight.any():
            found[result.task] = float(100 * (weight * result.correct).sum() / weight.sum())
    return found


def _step_notes(eval_dir: Path, step: int, tasks: Sequence[str] | None) -> Iterator[str]:
    """A sentence about the folder's tasks that the step lacks, if the report is of all tasks."""
    found = find_tasks(eval_dir) if tasks is None else {}
    if lacking := [task for task, steps in found.items() if step not in steps]:
        yield f"Not evaluated at step {step}: {', '.join(lacking)}."
    if tasks is None and (unfinished := describe_unfinished(eval_dir, step)):
        yield unfinished


def _row_notes(results: Sequence[RankResult], prompts: Mapping[str, PromptInfo]) -> Iterator[str]:
    """A sentence for each dataset whose prompts may have numbered one row differently."""
    of_task = {result.task: result for result in results}
    for dataset, tasks in tasks_by_dataset(of_task, prompts).items():
        members = [of_task[task] for task in tasks]
        same = all(np.array_equal(each.example, members[0].example) for each in members)
        if not same and any(each.row is None for each in members):
            yield (
                f"{dataset}: prompts have different examples, and it was not recorded which rows"
                " these are. Examples are paired by their number, so that intervals may be too"
                " narrow."
            )


def _overlap_notes(
    results: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    overlap: Mapping[str, Sequence[int]] | None,
    without: Mapping[str, float],
) -> Iterator[str]:
    """A sentence for each dataset of which examples share text with training rows."""
    if overlap is None:
        return
    of_task = {result.task: result for result in results}
    listed = {
        task: int(np.isin(result.example, overlap.get(task, ())).sum())
        for task, result in of_task.items()
    }
    if not any(listed.values()):
        yield "No example that was evaluated shares text with the training rows that were read."
    for dataset, tasks in tasks_by_dataset(of_task, prompts).items():
        # The prompts read the same rows, of which some may drop a few: the largest number counts.
        most = max(listed[task] for task in tasks)
        if not most:
            continue
        whole = float(np.mean([of_task[task].accuracy for task in tasks]))
        # A prompt all of whose examples are listed has no accuracy without them.
        rest = [
            without.get(task, of_task[task].accuracy)
            for task in tasks
            if task in without or not listed[task]
        ]
        examples = max(len(of_task[task].example) for task in tasks)
        others = f"{float(np.mean(rest)):.1f} without" if rest else "and no prompt has others"
        yield (
            f"{dataset}: {most} of {examples} examples share text with training rows. Mean over"
            f" prompts {whole:.1f} with them, {others}."
        )


def _summarize(
    results: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    eval_dir: _Path,
    options: ReportOptions,
    extras: Mapping[str, Mapping[str, float]],
) -> tuple[tuple[GroupResult, ...], tuple[DatasetResult, ...]]:
    """The report's groups and datasets; a task without a prompt is a dataset of its own."""
    # A dataset may be in two groups: under prompts trained on and under held-out ones.
    members: dict[tuple[str, str], list[RankResult]] = {}
    for result in sorted(results, key=lambda result: result.task):
        label = dataset_label(result.task, prompts)
        group = group_of(result.task, label, options.training_datasets, options.training_tasks)
        members.setdefault((label, group), []).append(result)
    ranked = [
        DatasetOutcomes.of(label, group, ranked, options.bootstrap)
        for (label, group), ranked in sorted(members.items())
    ]
    datasets = dataset_results(ranked, prompts, eval_dir, options.bootstrap, extras)
    groups = []
    for group in GROUP_TITLES:
        inside = [dataset for dataset in datasets if dataset.group == group]
        means = [dataset.mean for dataset in ranked if dataset.group == group]
        if inside:
            groups.append(group_result(group, inside, means, options.bootstrap))
    return tuple(groups), datasets
