"""Curves: a metric of several runs by step, for a terminal and as a page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from t0repro.errors import UserError, nearest_names
from t0repro.event_files import MARK, read_scalars
from t0repro.reports.losses import MAX_CURVE_POINTS, metric_rows, thinned
from t0repro.reports.page import Column, Page, Section
from t0repro.reports.plots import curves_plot
from t0repro.reports.training_runs import folders_with
from t0repro.terminal import bars
from t0repro.training.metrics import METRICS_FILE
from t0repro.words import as_reader_knows

Points = list[tuple[int, float]]


_COLUMNS = 60  # width of a curve on a terminal


# The names of a run's own values: _TRAIN in metrics.jsonl, _TOP in event files of its folder.
_TRAIN = "train"


_TOP = "."


# Prefix of evaluations' tags.
_EVAL = "eval/"


def read_curves(folders: Sequence[Path], metric: str) -> dict[str, Points]:
    """A metric's curves in several runs: label -> (step, value), ascending.

    A folder that is not a run itself stands for the runs below it. A run's metrics.jsonl has the
    metrics of training and of its evaluations, by split. What it lacks, such as the results of
    auxiliary jobs, is searched for as a tag in all event files below the run. If a step occurs
    twice, as after a restart, the last value counts. Values that are NaN or Inf are dropped.
    `eval/<metric>` also selects the metric of every task with the tag `eval/<task>/<metric>`.

    Raises:
      UserError: if a run has no metrics, or none of them has this one.
    """
    known: set[str] = set()
    curves: dict[tuple[Path, str], Points] = {}
    for folder in (run for given in folders for run in _runs_at(given)):
        found = _of_lines(folder)
        # Only if metrics.jsonl lacks it, since this reads every event file below the run.
        if metric not in found:
            found |= _of_events(folder)
        if not found:
            lines = folder / METRICS_FILE
            what = f"{METRICS_FILE} is empty" if lines.is_file() else "There are no metrics here"
            raise UserError(
                f"{what}.",
                where=str(folder),
                fix="Give the folder of a training run; `t0repro runs DIR` lists those below DIR.",
            )
        known |= found.keys()
        for place, values in sorted(found.get(metric, {}).items()):
            points = sorted(item for item in values.items() if math.isfinite(item[1]))
            if points:
                curves[folder, place] = points
    if not curves:
        raise UserError(
            f"No run has the metric {metric!r}.",
            where="--metric",
            fix=f"Nearest: {nearest_names(metric, known, count=5)}.",
        )
    return dict(zip(_labels(list(curves)), curves.values(), strict=True))


def _labels(curves: Sequence[tuple[Path, str]]) -> list[str]:
    """A name for each curve, as short as distinguishes it from the others."""
    runs = {folder for folder, _ in curves}
    names = {folder.resolve().name for folder in runs}
    places = {place for _, place in curves}
    last = {place.rpartition("/")[2] for place in places}
    labels = []
    for folder, place in curves:
        # Two runs may have folders of the same name, such as a/model and b/model.
        run = folder.resolve().name if len(names) == len(runs) else as_reader_knows(str(folder))
        shown = place.rpartition("/")[2] if len(last) == len(places) else place
        of_the_run = place in (_TRAIN, _TOP)
        parts = [run] if len(runs) > 1 or of_the_run else []
        labels.append(": ".join([*parts, *([] if of_the_run else [shown])]))
    return labels


# Metric -> where it was measured -> step -> value.
_Found = dict[str, dict[str, dict[int, float]]]


def _runs_at(folder: Path) -> list[Path]:
    """The folder itself, if it is a run; otherwise the runs below it."""
    if (folder / METRICS_FILE).is_file():
        return [folder]
    # Otherwise it may still have TensorBoard's files, as Mesh TensorFlow's training runs do.
    return list(folders_with(METRICS_FILE, folder)) or [folder]


def _of_lines(folder: Path) -> _Found:
    found: _Found = {}
    path = folder / METRICS_FILE
    # In writing order: after a restart, a step's later line replaces the earlier one.
    for row in metric_rows(path) if path.is_file() else ():
        place, step = str(row.get("split", _TRAIN)), row.get("step")
        # An evaluation has a line for each task.
        if "task" in row:
            place += f"/{row['task']}"
        for name, value in row.items():
            if name != "step" and isinstance(step, int) and isinstance(value, int | float):
                found.setdefault(name, {}).setdefault(place, {})[step] = float(value)
    return found


def _of_events(folder: Path) -> _Found:
    found: _Found = {}
    for parent, _, names in os.walk(folder):
        # Each folder of event files is a separate TensorBoard run.
        if any(MARK in name for name in names):
            place = os.path.relpath(parent, folder)
            for tag, points in read_scalars(parent).items():
                found.setdefault(tag, {})[place] = dict(points)
                # Mesh TensorFlow's tag, eval/<task>/<metric>; T5X has a folder for each task.
                task, slash, metric = tag.removeprefix(_EVAL).rpartition("/")
                if slash and tag.startswith(_EVAL):
                    found.setdefault(_EVAL + metric, {})[f"{place}/{task}"] = dict(points)
    return found


def curves_page(curves: Mapping[str, Points], metric: str) -> Page:
    """The curves, and their extremes in a table."""
    drawn = {label: thinned(points, MAX_CURVE_POINTS) for label, points in curves.items()}
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
    section = Section(
        f"{metric}, by step",
        plot=curves_plot(drawn, f"{metric} by step", metric),
        header=header,
        rows=rows,
    )
    return Page("Curves of training runs", (section,))


def curves_in_words(curves: Mapping[str, Points]) -> Iterable[str]:
    """Each curve as a line of bars, all on the same scale."""
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    longest = max(map(len, curves))
    for label, points in curves.items():
        shown = [value for _, value in thinned(points, _COLUMNS)]
        steps = f"steps {points[0][0]:,} to {points[-1][0]:,}"
        yield f"{label:{longest}}  {bars(shown, low, high)}  {steps}"
