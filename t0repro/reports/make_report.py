"""Builds a report from one run's scores and whatever else it should show, and writes its files."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.outputs import (
    TaskScores,
    find_tasks,
    iterate_task_scores,
    latest_step,
    read_records,
)
from t0repro.evaluation.rank import RankResult, rank_classification
from t0repro.files import make_folder, output_path, sync_directory, sync_tree, write_atomically
from t0repro.reports.comparison import RunComparison, compare_runs
from t0repro.reports.losses import LossComparison, compare_losses, loss_curve
from t0repro.reports.models import corrected as corrected_comparisons
from t0repro.reports.page import Page, render_html, render_markdown
from t0repro.reports.report import Report, published_figures, task_costs
from t0repro.reports.report_page import report_page
from t0repro.reports.results import (
    GROUP_TITLES,
    DatasetResult,
    GroupResult,
    calibration,
    confusion,
    corrected,
    dataset_result,
    generation_results,
    group_of,
    group_result,
    prompt_flips,
    prompt_result,
    rank_folder,
)
from t0repro.reports.run import (
    PromptInfo,
    Run,
    collect_provenance,
    dataset_label,
    fixed_classes,
    synthetic_datasets,
    tasks_by_dataset,
    template_name,
)
from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Outcomes,
    random_prompts_interval,
    reweighted,
)

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
    """

    other: Run | None = None
    metrics: _Path | None = None
    losses: tuple[tuple[str, _Path], tuple[str, _Path]] | None = None
    conversion: str | None = None


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
    ranked, decoded = _by_mode(run, records, options.tasks)
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
        provenance=collect_provenance(
            run,
            step,
            checkpoint=options.checkpoint,
            device=options.device,
            duration_seconds=options.duration_seconds,
        ),
        bootstrap=options.bootstrap,
        groups=groups,
        datasets=datasets,
        stacks=_stacks(run, prompts, options.bootstrap, beside),
        losses=_losses(beside),
        loss_curve=None if beside.metrics is None else loss_curve(beside.metrics, run.label),
        conversion=beside.conversion,
        notes=(
            *options.notes,
            *_step_notes(run, options.tasks),
            *_row_notes(results, prompts),
            *_overlap_notes(results, prompts, options.overlap, without),
        ),
        published=published_figures({dataset.dataset for dataset in datasets}),
        tasks=task_costs(records, evaluated),
        generation=generation,
        synthetic=synthetic_datasets({dataset_label(task, prompts) for task in evaluated}),
    )


def _by_mode(
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


def _step_notes(run: Run, tasks: Sequence[str] | None) -> Iterator[str]:
    """A sentence about the folder's tasks that the step lacks, if the report is of all tasks."""
    found = find_tasks(run.eval_dir) if tasks is None else {}
    if lacking := [task for task, steps in found.items() if run.step not in steps]:
        yield f"Not evaluated at step {run.step}: {', '.join(lacking)}."


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
    if not any(np.isin(each.example, overlap.get(each.task, ())).any() for each in results):
        yield "No example that was evaluated shares text with the training rows that were read."
    of_task = {result.task: result for result in results}
    for dataset, tasks in tasks_by_dataset(of_task, prompts).items():
        members = [of_task[task] for task in tasks]
        # The prompts read the same rows, of which some may drop a few: the largest number counts.
        listed = max(int(np.isin(r.example, overlap.get(r.task, ())).sum()) for r in members)
        if not listed:
            continue
        whole = float(np.mean([result.accuracy for result in members]))
        # A prompt all of whose examples are listed has no accuracy without them.
        rest = [
            without.get(r.task, r.accuracy)
            for r in members
            if r.task in without or not np.isin(r.example, overlap.get(r.task, ())).any()
        ]
        examples = max(len(result.example) for result in members)
        others = f"{float(np.mean(rest)):.1f} without" if rest else "and no prompt has others"
        yield (
            f"{dataset}: {listed} of {examples} examples share text with training rows. Mean over"
            f" prompts {whole:.1f} with them, {others}."
        )


# ---- The figures of each dataset and group -------------------------------------------------------


def _summarize(
    results: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    eval_dir: _Path,
    options: ReportOptions,
    extras: Mapping[str, Mapping[str, float]],
) -> tuple[tuple[GroupResult, ...], tuple[DatasetResult, ...]]:
    """The report's groups and datasets; a task without a prompt is a dataset of its own.

    `extras` has accuracies in percent: task -> name of another definition -> accuracy under it.
    """
    # A dataset may be in two groups: under prompts trained on and under held-out ones.
    parts: dict[tuple[str, str], list[RankResult]] = {}
    for result in sorted(results, key=lambda result: result.task):
        label = dataset_label(result.task, prompts)
        group = group_of(result.task, label, options.training_datasets, options.training_tasks)
        parts.setdefault((label, group), []).append(result)
    datasets, means = [], {}
    for (label, group), members in sorted(parts.items()):
        dataset, means[label, group] = _summarize_dataset(
            label, group, members, prompts, eval_dir, options.bootstrap, extras
        )
        datasets.append(dataset)
    # After the loop, since Holm's correction needs the p-values of all datasets.
    datasets = corrected(datasets)
    groups = [group_result(group, datasets, means, options.bootstrap) for group in GROUP_TITLES]
    return tuple(group for group in groups if group is not None), datasets


def _summarize_dataset(
    label: str,
    group: str,
    results: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    eval_dir: str | os.PathLike[str],
    bootstrap: Bootstrap,
    extras: Mapping[str, Mapping[str, float]],
) -> tuple[DatasetResult, DatasetMean]:
    """The dataset's result with diagnostics, and its mean over prompts."""
    outcomes = Outcomes.of(results)
    found = reweighted(outcomes, label, bootstrap)
    errors, error_of_mean = outcomes.standard_errors()
    shown = [
        dataclasses.replace(
            prompt_result(
                result,
                prompts,
                eval_dir,
                found.each(lambda values, at=at: values[:, at]).interval(bootstrap),
                float(errors[at]),
            ),
            extras=dict(extras.get(result.task, {})),
        )
        for at, result in enumerate(results)
    ]
    flips, flipped = prompt_flips(results, eval_dir)
    choices = {task: info.fixed_choices for task, info in prompts.items()}
    dataset = dataset_result(
        label, group, shown, found, float(error_of_mean), outcomes.same_rows, bootstrap
    )
    dataset = dataclasses.replace(
        dataset,
        random_prompts_interval=random_prompts_interval(outcomes, dataset.mean_interval, bootstrap),
        confusion=confusion(results, choices),
        calibration=calibration(results),
        flips=flips,
        flipped=flipped,
    )
    return dataset, DatasetMean.of(outcomes, found)


# ---- A report's files, and every score as a table: all files of a kind, or none ------------------


def write_report(report: Report, out: str | os.PathLike[str]) -> list[Path]:
    """Writes report.json, report.md and report.html into a folder; returns their paths.

    Raises:
      UserError: like write_files.
    """
    return write_page("report", report_page(report), report.to_json(), out)


def write_page(name: str, page: Page, content: str, out: str | os.PathLike[str]) -> list[Path]:
    """Writes <name>.json with the content, and the page as <name>.md and <name>.html.

    Raises:
      UserError: like write_files.
    """
    files = {
        f"{name}.json": content,
        f"{name}.md": render_markdown(page),
        f"{name}.html": render_html(page),
    }
    return write_files(files, out)


def write_files(files: Mapping[str, str | bytes], out: str | os.PathLike[str]) -> list[Path]:
    """Writes files into a folder, all of them or none, and returns their paths.

    Raises:
      UserError: if a file cannot be written; it names the file.
    """
    with _all_or_none(out) as staging:
        for name, content in files.items():
            write_atomically(staging / name, content)
    return [Path(out) / name for name in files]


@contextlib.contextmanager
def _all_or_none(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder; its files are moved into `out` if the block raises nothing.

    All files are synced before the first is renamed into place, so that a full disk leaves the
    files of an earlier report as they were.

    Raises:
      UserError: if a file cannot be written; it names the file, or else the folder.
    """
    out = output_path(out)
    # A unique name: two reports may be written to one folder at the same time.
    staging = out / f".{uuid.uuid4().hex[:8]}.tmp"
    try:
        make_folder(staging)
        yield staging
        sync_tree(staging)
        # By now everything is on disk, so running out of space is unlikely from here on.
        for path in sorted(staging.iterdir()):
            os.replace(path, out / path.name)
        sync_directory(out)
    except OSError as error:
        # Named as in the user's folder: the temporary one is gone when the message is read.
        at_fault = Path(error.filename or staging)
        path = out / at_fault.name if at_fault.parent == staging else out
        raise UserError(
            f"{path.name} cannot be written: {error.strerror or error}.",
            where=str(path),
            fix="Free some space, or name another folder with --out, and run the command again.",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def as_json(values: Sequence[Any]) -> str:
    """Dataclasses as an indented JSON list."""
    return json.dumps([dataclasses.asdict(value) for value in values], indent=1) + "\n"


# ---- Every (example, choice, score), for analysis ----------------------------------------------

COLUMNS = (
    "task", "dataset", "template", "step", "example", "choice",
    "score", "target_length", "is_correct", "predicted",
)  # fmt: skip


def write_tables(
    eval_dir: str | os.PathLike[str],
    step: int,
    prompts: Mapping[str, PromptInfo],
    out: str | os.PathLike[str],
    tasks: Sequence[str] | None = None,
) -> list[Path]:
    """Writes scores.csv and scores.parquet, a row for each pair of the tasks; returns their paths.

    Scores are in natural-log units; `predicted` marks the example's prediction. In the CSV file, a
    name that a spreadsheet would interpret as a formula is prefixed with an apostrophe.

    Raises:
      UserError: if the files cannot be read or written.
    """
    import pyarrow
    import pyarrow.parquet

    csv_name, parquet_name = "scores.csv", "scores.parquet"
    with _all_or_none(out) as staging, contextlib.ExitStack() as stack:
        # newline="": the csv module ends lines itself, and a cell may contain line breaks.
        file = stack.enter_context(open(staging / csv_name, "w", encoding="utf-8", newline=""))
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        parquet = None
        # One task at a time: T0's held-out suite has 339,392 pairs.
        for scores in iterate_task_scores(eval_dir, step, tasks):
            columns = _columns(scores, prompts)
            rows.writerows(_cells(columns))
            table = pyarrow.table(columns)
            # The writer needs the columns' types, which the first task shows.
            if parquet is None:
                parquet = stack.enter_context(
                    pyarrow.parquet.ParquetWriter(
                        staging / parquet_name, table.schema, compression="zstd"
                    )
                )
            parquet.write_table(table)
    return [Path(out) / csv_name, Path(out) / parquet_name]


def _cells(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[Any, ...]]:
    """The rows of a CSV file."""
    cells = (
        [_plain(cell) if isinstance(cell, str) else cell for cell in columns[name].tolist()]
        for name in COLUMNS
    )
    return zip(*cells, strict=True)


def _plain(text: str) -> str:
    """Prefixes a name that a spreadsheet would take for a formula with an apostrophe."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def _columns(scores: TaskScores, prompts: Mapping[str, PromptInfo]) -> dict[str, Any]:
    classes = fixed_classes(prompts).get(scores.task)
    ranked = rank_classification(scores, num_classes=classes)
    # Look up a pair's example by index; ranked.example is sorted.
    predicted = ranked.predicted[np.searchsorted(ranked.example, scores.input_index)]
    constants = {
        "task": scores.task,
        "dataset": dataset_label(scores.task, prompts),
        "template": template_name(scores.task, prompts) if scores.task in prompts else "",
        "step": scores.step,
    }
    return {
        **{name: np.full(len(scores), value) for name, value in constants.items()},
        "example": scores.input_index,
        "choice": scores.choice_index,
        "score": scores.score,
        "target_length": scores.target_length,
        "is_correct": scores.is_correct,
        "predicted": predicted == scores.choice_index,
    }
