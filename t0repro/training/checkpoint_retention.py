"""Which checkpoints a run keeps."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from t0repro.config.checkpoints import SaveConfig
from t0repro.converters.jax_tree import jax_ref
from t0repro.converters.orbax_dir import COMMITTED
from t0repro.converters.witnesses import (
    INTEGRITY,
)
from t0repro.partitioning.processes import (
    is_first,
)
from t0repro.storage import is_address, leases, list_names, output_path, place, remove_all
from t0repro.training.checkpoints import checkpoint_path, list_checkpoints
from t0repro.training.metrics import METRICS_FILE

PINNED = "PINNED"  # a file of this name in a checkpoint exempts it, as in T5X


def remove_superfluous(
    model_dir: str | os.PathLike[str], save: SaveConfig, values: Mapping[int, float]
) -> None:
    """Removes the checkpoints that a rule does not keep; call it once a new one is complete.

    Args:
      model_dir: the run's folder.
      save: see `list_superfluous`.
      values: see `list_superfluous`.
    """
    paths = {step: checkpoint_path(model_dir, step) for step in list_checkpoints(model_dir)}
    # A pinned checkpoint is neither removed nor counted toward the number to keep.
    steps = [step for step, path in paths.items() if not (path / PINNED).exists()]
    for step in list_superfluous(steps, save, values):
        remove_checkpoint(paths[step])


def list_superfluous(
    steps: Sequence[int], save: SaveConfig, values: Mapping[int, float]
) -> list[int]:
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
    # Of equal values, the later step ranks higher.
    ranked = sorted(with_value, key=lambda step: (sign * values[step], -step))
    without = [] if best.keep_without_metric else [s for s in earlier if s not in values]
    return sorted([*ranked[save.keep :], *without])


def metric_by_step(model_dir: str | os.PathLike[str], metric: str) -> dict[int, float]:
    """Step -> a metric's latest value in metrics.jsonl, named `<run>/<tag>` as in TensorBoard."""
    path, values = output_path(model_dir) / METRICS_FILE, dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        tag = metric.removeprefix(f"{row.get('split')}/")
        if tag != metric and tag in row:
            values[int(row["step"])] = float(row[tag])
    return values


def remove_interrupted_saves(model_dir: str | os.PathLike[str]) -> None:
    """Removes what killed saves left behind; no other run may be writing to model_dir."""
    if not is_first():
        return
    if is_address(model_dir):
        for name in list_names(str(place(model_dir))):
            path = str(place(model_dir) / name)
            if name.startswith("checkpoint_") and jax_ref(path, None) is None:
                # Without the other description, this one alone would pass for an older checkpoint.
                remove_all(path, ("_METADATA",))
        return
    for path in Path(model_dir).glob(".checkpoint_*.tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint; while it is partly removed, it is not listed.

    Of several processes, only the first one removes it. In a bucket, one that auxiliary jobs read
    stays; their controller, or the next call, removes it.
    """
    if not is_first():
        return
    if is_address(path):
        with leases.hold_for_removal(str(path)) as is_free:
            if is_free:
                # These mark a checkpoint as complete; either of the last two does so alone.
                remove_all(str(path), (INTEGRITY, COMMITTED, "_CHECKPOINT_METADATA", "_METADATA"))
        return
    hidden = path.with_name(f".{path.name}.removed.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden)
