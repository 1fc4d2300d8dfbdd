"""Training losses: read from metrics.jsonl, compared between two runs, thinned for a plot.

The difference between two losses is relative to the first run's.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from t0repro.errors import UserError
from t0repro.training.metrics import LOSS_PER_TOKEN, OWN_UNIT
from t0repro.words import counted, parse_json

MAX_CURVE_POINTS = 1000
MAX_ROWS = 40
LOSS = "loss per target token"
_LINE = "Remove the line, or name a metrics.jsonl that training wrote."
_SEED = re.compile(r"^(\S*seed) = (.+)$", re.MULTILINE | re.IGNORECASE)

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """Training losses, thinned evenly to what a plot can show, in `unit`."""

    label: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    total_steps: int
    unit: str = "training loss"  # reports of 0.1.0 do not say


@dataclasses.dataclass(frozen=True)
class LossRow:
    """The losses of two runs after the same update.

    Attributes:
      relative_difference: to the first run's loss; absolute where that is zero.
    """

    step: int
    loss_a: float
    loss_b: float
    relative_difference: float


@dataclasses.dataclass(frozen=True)
class LossComparison:
    """The losses of two runs, step by step.

    Attributes:
      rows: the steps that both runs have, ascending.
      only_a: number of steps that the second run lacks; only_b those that the first lacks.
      unit: of both losses.
      seeds: the seeds that the runs' gin files bind otherwise, with both values.
    """

    label_a: str
    label_b: str
    rows: tuple[LossRow, ...]
    only_a: int
    only_b: int
    unit: str = "training loss"  # reports of 0.1.0 do not say
    seeds: tuple[str, ...] = ()

    @property
    def worst(self) -> LossRow:
        """The row with the largest relative difference."""
        return max(self.rows, key=lambda row: row.relative_difference)

    def within(self, tolerance: float) -> bool:
        """Whether the relative difference is at most `tolerance` at every step."""
        return self.worst.relative_difference <= tolerance


def metric_rows(metrics: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, without an incomplete last line of a killed run.

    Raises:
      UserError: if the file is missing, or a line is not a JSON object (reported with its number).
    """
    path = Path(metrics)
    if not path.is_file():
        raise UserError(
            "There is no metrics file here.",
            where=str(path),
            fix="Training writes metrics.jsonl into its model_dir; name that file.",
        )
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            if not line.endswith((b"\n", b"\r")):  # the writer was killed in the middle
                break
            raise UserError(
                f"This line is not JSON ({error}).", where=f"{path}:{number}", fix=_LINE
            ) from error
        if not isinstance(record, dict):
            raise UserError("This line is not a JSON object.", where=f"{path}:{number}", fix=_LINE)
        yield record


def step_of(row: Mapping[str, Any]) -> int | None:
    """The step of a line of metrics; None if it has none."""
    step = row.get("step")
    # pandas writes whole numbers so, if a line lacked the field.
    if isinstance(step, float) and step.is_integer():
        return int(step)
    return step if isinstance(step, int) else None


def number_of(value: Any) -> float | None:
    """A value in a line of metrics as a float; None if it is not a number."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.inf


def read_losses(metrics: str | os.PathLike[str], name: str = "loss") -> dict[int, float]:
    """Reads the training loss of each step from a metrics.jsonl, by ascending step.

    Args:
      metrics: the file.
      name: `loss`, which each dialect defines in its own way, or LOSS_PER_TOKEN.

    If a step occurs twice, as after a restart from an earlier checkpoint, its last line counts.
    Lines of evaluations or without a loss are skipped.

    Raises:
      UserError: if no line has a training loss, one is not a number, or as metric_rows does.
    """
    rows = list(metric_rows(metrics))
    losses: dict[int, float] = {}
    for row in rows:
        if row.get("split") != "train" or row.get(name) is None:
            continue
        # Keep NaN and infinity here: each caller decides what such a loss means.
        step, loss = step_of(row), number_of(row[name])
        if step is None or loss is None:
            raise UserError(
                f"A line of training has step {row.get('step')!r} and {name} {row[name]!r}, which"
                " are not both numbers.",
                where=str(metrics),
                fix=_LINE,
            )
        losses[step] = loss
    if not losses:
        lines = f"none of its {counted(len(rows), 'line')} has one" if rows else "it is empty"
        raise UserError(
            f"This file has no loss of the split 'train': {lines}.",
            where=str(metrics),
            fix="Name the metrics.jsonl of a run that has made a step.",
        )
    return dict(sorted(losses.items()))


def compare_losses(
    metrics_a: str | os.PathLike[str],
    metrics_b: str | os.PathLike[str],
    *,
    label_a: str = "a",
    label_b: str = "b",
) -> LossComparison:
    """Compares the training losses of two metrics.jsonl at the steps that both have.

    They are per target token if both runs have recorded that for every step.

    Raises:
      UserError: if one has no loss, they share no step, or a loss is NaN or Inf.
    """
    unit, (losses_a, losses_b) = _read_in_one_unit(metrics_a, metrics_b)
    shared = losses_a.keys() & losses_b.keys()
    if not shared:
        raise UserError(
            f"The two runs have no training step in common ({_extent(losses_a)} and"
            f" {_extent(losses_b)}).",
            where=f"{metrics_a} and {metrics_b}",
            fix="Start both from the same checkpoint, so that their global steps overlap.",
        )
    for path, losses in ((metrics_a, losses_a), (metrics_b, losses_b)):
        # max() passes over a NaN that is not first, so a diverged run could appear to agree.
        for step in sorted(shared):
            if not math.isfinite(losses[step]):
                raise UserError(
                    f"The loss at step {step} is {losses[step]}.",
                    where=str(path),
                    fix="Compare runs whose losses are finite; `t0repro plot` draws them up to it.",
                )
    rows = (_loss_row(step, losses_a[step], losses_b[step]) for step in sorted(shared))
    return LossComparison(
        label_a=label_a,
        label_b=label_b,
        rows=tuple(rows),
        only_a=len(losses_a.keys() - shared),
        only_b=len(losses_b.keys() - shared),
        unit=unit,
        seeds=_differing_seeds(Path(metrics_a).parent, Path(metrics_b).parent),
    )


def _differing_seeds(*folders: Path) -> tuple[str, ...]:
    """The seeds of two runs that their gin files do not bind alike, each with both values."""
    found = []
    for folder in folders:
        # Mesh TensorFlow's name for what a run writes, and T5X's.
        paths = [folder / name for name in ("operative_config.gin", "config.gin")]
        if not (path := next((each for each in paths if each.is_file()), None)):
            return ()
        found.append(dict(_SEED.findall(path.read_text(encoding="utf-8", errors="replace"))))
    a, b = found
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return tuple(f"{name} ({a.get(name, 'unset')}; {b.get(name, 'unset')})" for name in names)


def loss_curve(metrics: str | os.PathLike[str], label: str) -> LossCurve | None:
    """Training losses of a metrics.jsonl for a plot; None if none is finite.

    They are per target token if the run has recorded that for every step.

    Raises:
      UserError: as read_losses does.
    """
    unit, (by_step,) = _read_in_one_unit(metrics)
    found = [(step, loss) for step, loss in by_step.items() if math.isfinite(loss)]
    if not found:
        return None
    steps, losses = zip(*thin(found, MAX_CURVE_POINTS), strict=True)
    return LossCurve(label, steps, losses, len(found), unit)


def _read_in_one_unit(*metrics: str | os.PathLike[str]) -> tuple[str, list[dict[int, float]]]:
    """The losses of runs, with their unit: per target token if each step of each has that."""
    losses = [read_losses(path) for path in metrics]
    rows = (row for path in metrics for row in metric_rows(path))
    if all(LOSS_PER_TOKEN in row for row in rows if row.get("split") == "train" and "loss" in row):
        return LOSS, [read_losses(path, LOSS_PER_TOKEN) for path in metrics]
    return f"loss{OWN_UNIT}", losses


def thin_losses(compared: LossComparison) -> list[LossRow]:
    """The rows to show: evenly spaced if there are many, and always including the worst."""
    rows = thin(compared.rows, MAX_ROWS)
    # Compare by identity: an equal row at another step is not the worst.
    if not any(row is compared.worst for row in rows):
        rows = sorted([*rows, compared.worst], key=lambda row: row.step)
    return rows


def thin(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    # Round the positions, so that the first and the last item are always included.
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _loss_row(step: int, loss_a: float, loss_b: float) -> LossRow:
    difference = abs(loss_a - loss_b)
    return LossRow(step, loss_a, loss_b, difference / abs(loss_a) if loss_a else difference)


def _extent(losses: dict[int, float]) -> str:
    return f"steps {min(losses)} to {max(losses)}"
