"""Which checkpoints are removed: T5X's save rules keep the latest, or the best and the latest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from t0repro.config.training_plan import SaveConfig
from t0repro.training.checkpoints import checkpoint_path, list_checkpoints, remove_checkpoint
from t0repro.training.metrics import METRICS_FILE

PINNED = "PINNED"  # a file of this name in a checkpoint exempts it, as in T5X


def remove_superfluous(
    model_dir: str | os.PathLike[str], save: SaveConfig, values: Mapping[int, float]
) -> None:
    """Removes the checkpoints that a rule does not keep; call it once a new one is whole.

    Args:
      model_dir: the run's folder.
      save: see `superfluous`.
      values: see `superfluous`.
    """
    paths = {step: checkpoint_path(model_dir, step) for step in list_checkpoints(model_dir)}
    # A pinned checkpoint is neither removed nor counted among those that are kept.
    steps = [step for step, path in paths.items() if not (path / PINNED).exists()]
    for step in superfluous(steps, save, values):
        remove_checkpoint(paths[step])


def superfluous(steps: Sequence[int], save: SaveConfig, values: Mapping[int, float]) -> list[int]:
    """Steps whose checkpoints are to be removed; the latest is never among them.

    Args:
      steps: steps of all checkpoints that are not pinned, ascending.
      save: how many to keep, and by what.
      values: step -> the metric's value there, for `save.best`.
    """
    # With a negative number, tf.train.Saver would delete what it has just saved.
    if save.keep is None or save.keep <= 0:
        return []
    # A step is saved before it is evaluated, so the latest has no value yet to be ranked by.
    last = 1 if save.best else save.keep
    earlier = [
        step for step in steps[:-last] if not (save.keep_period and step % save.keep_period == 0)
    ]
    best = save.best
    if best is None:
        return earlier
    with_value = [step for step in earlier if step in values]
    sign = -1 if best.mode == "max" else 1
    # Among equals the later one is better.
    ranked = sorted(with_value, key=lambda step: (sign * values[step], -step))
    without = [] if best.keep_without_metric else [s for s in earlier if s not in values]
    return sorted([*ranked[save.keep :], *without])


def metric_by_step(model_dir: str | os.PathLike[str], metric: str) -> dict[int, float]:
    """Step -> a metric's latest value in metrics.jsonl, named `<run>/<tag>` as in TensorBoard."""
    path, values = Path(model_dir) / METRICS_FILE, dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        tag = metric.removeprefix(f"{row.get('split')}/")
        if tag != metric and tag in row:
            values[int(row["step"])] = float(row[tag])
    return values
