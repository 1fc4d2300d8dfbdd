"""The state of a training run's auxiliary jobs, for people and for programs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.jobs.controller import FOLDER
from t0repro.jobs.journal import JOURNAL, Journal, Point, Progress
from t0repro.terminal import bars

HEADER = ("checkpoint", "mixture", "state", "attempts", "seconds", "metric")


def read_status(model_dir: Path) -> dict[Point, Progress]:
    """Every point of a training run's auxiliary jobs, by step and mixture.

    Raises:
      UserError: if there are none.
    """
    folder = model_dir / FOLDER
    if not (folder / JOURNAL).exists():
        raise UserError(
            "There are no auxiliary jobs here.",
            where=str(model_dir),
            fix="Give the folder of a training run beside which `t0repro aux` runs or has run.",
        )
    return dict(sorted(Journal(folder).progress.items()))


def rows(status: dict[Point, Progress]) -> list[tuple[str, ...]]:
    """The cells of a table with the columns of HEADER."""
    return [
        (
            f"{point.step:,}",
            point.mixture,
            # A point that succeeded in the end still has the reason of an earlier failure.
            f"{each.state}: {each.reason}" if _is_bad(each) else each.state,
            str(each.attempt),
            "" if each.seconds is None else f"{each.seconds:.0f}",
            "" if each.metric is None else f"{each.metric[0]} {each.metric[1]:.4g}",
        )
        for point, each in status.items()
    ]


def _is_bad(progress: Progress) -> bool:
    return progress.state in ("retrying", "given up") and bool(progress.reason)


def to_json(status: dict[Point, Progress]) -> list[dict[str, Any]]:
    """One object for each point."""
    return [
        {
            "step": point.step,
            "mixture": point.mixture,
            "state": each.state,
            "attempts": each.attempt,
            "seconds": each.seconds,
            "metric": None if each.metric is None else {each.metric[0]: each.metric[1]},
            "reason": each.reason or None,
        }
        for point, each in status.items()
    ]


def curves(status: dict[Point, Progress]) -> list[str]:
    """One line for each mixture: its main metric over the steps, as bars between its extremes.

    Values that are NaN or Inf have no place in a curve; the table has them.
    """
    lines = []
    by_mixture = sorted(status.items(), key=lambda item: (item[0].mixture, item[0].step))
    for mixture, points in itertools.groupby(by_mixture, key=lambda item: item[0].mixture):
        found = [
            (point.step, each.metric)
            for point, each in points
            if each.metric is not None and math.isfinite(each.metric[1])
        ]
        # One point is no curve.
        if len(found) > 1:
            tag, values = found[0][1][0], [metric[1] for _, metric in found]
            steps = f"steps {found[0][0]:,} to {found[-1][0]:,}"
            extremes = f"{min(values):.4g} to {max(values):.4g}"
            lines.append(f"{mixture}: {tag}  {bars(values)}  {extremes}, {steps}")
    return lines
