"""Which checkpoints T5X's save rules keep: the latest, or the best by a metric and the latest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from t0repro.config.training_plan import BestCheckpoints, SaveConfig
from t0repro.training.metrics import METRICS_FILE

PINNED = "PINNED"  # a file of this name in a checkpoint exempts it, as in T5X


def superfluous(steps: Sequence[int], save: SaveConfig, values: Mapping[int, float]) -> list[int]:
    """Steps whose checkpoints are to be removed; the latest is never among them.

    Args:
      steps: steps of all checkpoints that are not pinned, ascending.
      save: how many to keep, and by what.
      values: step -> the metric's value there, for `save.best`.
    """
    if save.keep is None:
        return []
    if save.best is None:
        return list(steps[: -save.keep])
    best = save.best
    # A step is saved before it is evaluated, so the latest has no value yet to be ranked by.
    earlier = [step for step in steps[:-1] if not _is_forced(step, best)]
    with_value = [step for step in earlier if step in values]
    sign = -1 if best.mode == "max" else 1
    # Among equals the later one is better.
    ranked = sorted(with_value, key=lambda step: (sign * values[step], -step))
    without = [] if best.keep_without_metric else [s for s in earlier if s not in values]
    return sorted([*ranked[save.keep :], *without])


def _is_forced(step: int, best: BestCheckpoints) -> bool:
    return best.force_keep_period is not None and step % best.force_keep_period == 0


def metric_by_step(model_dir: str | os.PathLike[str], metric: str) -> dict[int, float]:
    """Step -> a metric's latest value in metrics.jsonl, named `<run>/<tag>` as in TensorBoard."""
    path, values = Path(model_dir) / METRICS_FILE, dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        tag = metric.removeprefix(f"{row.get('split')}/")
        if tag != metric and tag in row:
            values[int(row["step"])] = float(row[tag])
    return values
