"""Curves: a metric of several runs by step, for a terminal and as a page."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from t0repro.errors import UserError, nearest_names
from t0repro.evaluation.outputs import refuse_without_scores
from t0repro.event_files import MARK, read_scalars
from t0repro.progress import say
from t0repro.reports.losses import (
    LOSS,
    MAX_CURVE_POINTS,
    metric_rows,
    number_of,
    step_of,
    thin,
)
from t0repro.reports.page import Column, Page, Section
from t0repro.reports.plots import curves_plot
from t0repro.reports.training_runs import folders_with
from t0repro.terminal import bars
from t0repro.training.metrics import LOSS_PER_TOKEN, METRICS_FILE, OWN_UNIT
from t0repro.words import rename_for_reader

Points = list[tuple[int, float]]
# What the values are, such as "accuracy" -> label -> points: curves that share an axis.
Panels = dict[str, dict[str, Points]]


TOKEN_ACCURACY = "accuracy of target tokens, from 0 to 1"
"""What a training run's accuracy is."""

_COLUMNS = 60  # width of a curve on a terminal


# The names of a run's own values: _TRAIN in metrics.jsonl, _TOP in event files of its folder.
_TRAIN = "train"


_TOP = "."


# What rank-eval's lines call the split, and the prefix of evaluations' tags.
_EVAL_SPLIT = "eval"
_EVAL = f"{_EVAL_SPLIT}/"


_OF_TASK = "-metrics.jsonl"  # follows a task's name in the files of SeqIO's JSONLogger


# What is drawn unless a metric is named: the first that a run has. Evaluations have no loss.
_DEFAULT_METRICS = ("loss", "accuracy", f"{_EVAL}accuracy")


def read_curves(folders: Sequence[Path], metric: str | None = None) -> tuple[str, Panels]:
    """A metric and its curves in several runs, the steps of each ascending.

    Without a metric, it is the loss or, of evaluations, the accuracy.

    The loss is per target token. Where only another is recorded, as in TensorBoard's files of other
    programs, its unit is unknown, and the run has a panel of its own.

    A folder that is not a run itself stands for the runs below it. A run's metrics.jsonl has the
    metrics of training and of its evaluations, by split. What it lacks, such as the results of
    auxiliary jobs, is searched for as a tag in all event files below the run. If a step occurs
    twice, as after a restart, the last value counts. Values that are NaN or Inf are dropped.
    `eval/<metric>` also selects the metric of every task with the tag `eval/<task>/<metric>`, and
    of every task of a rank evaluation. Runs without the metric are left out, and named.

    Raises:
      UserError: if a run has no metrics, or none of them has this one.
    """
    known: set[str] = set()
    curves: dict[tuple[Path, str], Points] = {}
    titles: dict[tuple[Path, str], str] = {}
    runs = {
        run: _read_lines(run) if (run / METRICS_FILE).is_file() else _read_evaluation(run)
        for given in folders
        for run in _runs_at(given)
    }
    if metric is None:
        for run, found in runs.items():
            if not found:
                found |= _read_events(run)
        names = set[str]().union(*runs.values())
        metric = next((each for each in _DEFAULT_METRICS if each in names), _DEFAULT_METRICS[0])
    elif all(metric not in found and _EVAL + metric in found for found in runs.values()):
        metric = _EVAL + metric
    for folder, found in runs.items():
        # Only if metrics.jsonl lacks it, since this reads every event file below the run.
        if metric not in found:
            found |= _read_events(folder)
        if not found:
            raise _no_metrics_error(folder)
        known |= found.keys()
        for place in sorted(found.get(metric, {})):
            title, values = _convert_unit(found, metric, place, folder)
            points = sorted(item for item in values.items() if math.isfinite(item[1]))
            if points:
                curves[folder, place], titles[folder, place] = points, title
    if not curves:
        raise UserError(
            f"No run has a finite value of {metric!r}.",
            where="--metric",
            fix=f"Nearest: {nearest_names(metric, known, count=5)}.",
        )
    drawn = {folder for folder, _ in curves}
    if left_out := {folder: found for folder, found in runs.items() if folder not in drawn}:
        there = set[str]().union(*left_out.values())
        other = next((each for each in _DEFAULT_METRICS if each in there - {metric}), min(there))
        say(
            f"note: left out {', '.join(map(str, left_out))}, without a finite value of {metric!r};"
            f" --metric draws another, such as {other}."
        )
    panels: Panels = {}
    for label, key in zip(_labels(list(curves)), curves, strict=True):
        panels.setdefault(titles[key], {})[label] = curves[key]
    return metric, panels


def _no_metrics_error(folder: Path) -> UserError:
    refuse_without_scores(folder)
    if (folder / METRICS_FILE).is_file():
        is_empty = not (folder / METRICS_FILE).read_bytes().strip()
        what = f"{METRICS_FILE} {'is empty' if is_empty else 'has no number with a step'}"
    elif folder.is_dir():
        what = "There are no metrics here"
    else:
        what = "This is a file, not a folder" if folder.exists() else "There is no such folder"
    return UserError(
        f"{what}.",
        where=str(folder),
        fix="Give the folder of a training run; `t0repro runs DIR` lists those below DIR.",
    )


def _convert_unit(
    found: _Found, metric: str, place: str, folder: Path
) -> tuple[str, dict[int, float]]:
    """What a metric's values at a place are, and the values; losses per target token if known."""
    values = found[metric][place]
    if metric == "accuracy" and place == _TRAIN:  # an evaluation's is in percent
        return TOKEN_ACCURACY, values
    if metric != "loss":
        return metric, values
    per_token = found.get(LOSS_PER_TOKEN, {}).get(place, {})
    # A run that 0.1.0 began has it for its later steps only.
    if per_token.keys() >= values.keys():
        return LOSS, per_token
    return f"loss of {rename_for_reader(str(folder))}{OWN_UNIT}", values


def _labels(curves: Sequence[tuple[Path, str]]) -> list[str]:
    """A name for each curve, as short as distinguishes it from the others."""
    runs = {folder for folder, _ in curves}
    names = {folder.resolve().name for folder in runs}
    places = {place for _, place in curves}
    last = {place.rpartition("/")[2] for place in places}
    labels = []
    for folder, place in curves:
        # Two runs may have folders of the same name, such as a/model and b/model.
        run = folder.resolve().name if len(names) == len(runs) else rename_for_reader(str(folder))
        shown = place.rpartition("/")[2] if len(last) == len(places) else place
        of_the_run = place in (_TRAIN, _TOP)
        parts = [run] if len(runs) > 1 or of_the_run else []
        labels.append(": ".join([*parts, *([] if of_the_run else [shown])]))
    return labels


# Metric -> where it was measured -> step -> value.
_Found = dict[str, dict[str, dict[int, float]]]


def _nothing_found() -> _Found:
    return collections.defaultdict(lambda: collections.defaultdict(dict))


def _runs_at(folder: Path) -> list[Path]:
    """The folder itself, if it is a run; otherwise the runs below it."""
    if (folder / METRICS_FILE).is_file():
        return [folder]
    # Otherwise it may still have TensorBoard's files, as Mesh TensorFlow's training runs do.
    return list(folders_with(METRICS_FILE, folder)) or [folder]


def _read_lines(folder: Path) -> _Found:
    found = _nothing_found()
    # In writing order: after a restart, a step's later line replaces the earlier one.
    for row in metric_rows(folder / METRICS_FILE):
        place, step = str(row.get("split", _TRAIN)), step_of(row)
        if step is None:
            continue
        # An evaluation has a line for each task.
        if "task" in row:
            place += f"/{row['task']}"
        for name, field in row.items():
            if name == "step" or (value := number_of(field)) is None:
                continue
            found[name][place][step] = value
            if name == "neg_log_perplexity":  # the mean over target tokens, of an evaluation
                found[LOSS_PER_TOKEN][place][step] = -value
            # A rank evaluation's name, <task>/<metric>.
            task, slash, metric = name.rpartition("/")
            if slash and place == _EVAL_SPLIT:
                found[_EVAL + metric][f"{place}/{task}"][step] = value
    return found


def _read_evaluation(folder: Path) -> _Found:
    """What SeqIO's JSONLogger wrote, which takes no TensorBoard to read."""
    found = _nothing_found()
    for path in folder.rglob(f"*{_OF_TASK}"):
        task = path.relative_to(folder).as_posix().removesuffix(_OF_TASK)
        for row in metric_rows(path):
            step = step_of(row)
            for name, field in row.items():
                if name != "step" and step is not None and (value := number_of(field)) is not None:
                    found[_EVAL + name][task][step] = value
    return found


def _read_events(folder: Path) -> _Found:
    found = _nothing_found()
    for parent, _, names in os.walk(folder):
        # Each folder of event files is a separate TensorBoard run.
        if any(MARK in name for name in names):
            place = os.path.relpath(parent, folder)
            for tag, points in read_scalars(parent).items():
                found[tag][place] = dict(points)
                # Mesh TensorFlow's tag, eval/<task>/<metric>; T5X has a folder for each task.
                task, slash, metric = tag.removeprefix(_EVAL).rpartition("/")
                if slash and tag.startswith(_EVAL):
                    found[_EVAL + metric][f"{place}/{task}"] = dict(points)
    return found


def curves_page(panels: Panels) -> Page:
    """For each panel, the curves, and their extremes in a table."""
    sections = tuple(_section(title, curves) for title, curves in panels.items())
    return Page("Curves of training runs", sections)


def _section(title: str, curves: Mapping[str, Points]) -> Section:
    drawn = {label: thin(points, MAX_CURVE_POINTS) for label, points in curves.items()}
    header = (Column("curve"), "points", "first", "lowest", "highest", "last", "last step")
    rows = tuple(
        (
            label,
            f"{len(points):,}",
            f"{points[0][1]:.4g}",
            f"{min(value for _, value in points):.4g}",
            f"{max(value for _, value in points):.4g}",
            f"{points[-1][1]:.4g}",
            f"{points[-1][0]:,}",
        )
        for label, points in curves.items()
    )
    plot = curves_plot(drawn, f"{title} by step", title)
    return Section(f"{title}, by step", plot=plot, header=header, rows=rows)


def curves_in_words(panels: Panels) -> Iterable[str]:
    """Each curve as a line of bars, those of a panel on the same scale, below what they are."""
    for title, curves in panels.items():
        yield f"{title}:"
        yield from _bars(curves)


def _bars(curves: Mapping[str, Points]) -> Iterable[str]:
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    longest = max(map(len, curves))
    for label, points in curves.items():
        shown = [value for _, value in thin(points, _COLUMNS)]
        ends = f"{points[0][1]:.4g} to {points[-1][1]:.4g}"
        steps = f"steps {points[0][0]:,} to {points[-1][0]:,}"
        yield f"  {label:{longest}}  {bars(shown, low, high)}  {ends}, {steps}"
