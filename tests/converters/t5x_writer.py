"""T5X's Orbax checkpoints as its manager writes them: items `state` and `dataset`."""

from __future__ import annotations

from pathlib import Path

import flax.traverse_util
import numpy as np
import orbax.checkpoint as ocp


def write_by_t5x_manager(
    model_dir: Path, tree: dict[str, np.ndarray], *, ocdbt: bool = True, dataset: bool = False
) -> Path:
    """Writes a tree by Orbax's CheckpointManager with T5X's options; returns the checkpoint.

    Args:
      model_dir: made if it is not there.
      tree: a flat tree, its step and dummies included.
      ocdbt: whether all arrays are in one store, T5X's default today.
      dataset: whether there is the place in the training data (SaveCheckpointConfig.save_dataset).
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    step = int(tree["state/step"])
    manager = ocp.CheckpointManager(
        model_dir,
        {"state": ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt))},
        options=ocp.CheckpointManagerOptions(step_prefix="checkpoint"),
    )
    manager.save(step, {"state": flax.traverse_util.unflatten_dict(tree, sep="/")})
    manager.wait_until_finished()
    directory = model_dir / f"checkpoint_{step}"
    if dataset:
        # What tf.train.Checkpoint(ds=iterator).write leaves of one host's iterator.
        (directory / "dataset").mkdir()
        for ending in ("index", "data-00000-of-00001"):
            (directory / "dataset" / f"train_ds-000-of-001.{ending}").write_bytes(b"iterator")
    return directory
