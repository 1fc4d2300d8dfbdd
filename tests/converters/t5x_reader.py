"""How T5X finds and reads a checkpoint, by the rules of its own code.

T5X does not install beside the versions that this project runs on. What its checkpoint manager does
by default (t5x/checkpoints.py, t5x/checkpoint_utils.py) is done here over again: the same files
decide, TensorStore and Orbax read them.
"""

from __future__ import annotations

import re
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import serialization


def restore_as_t5x(model_dir: Path, step: int) -> dict[str, np.ndarray]:
    """What `OrbaxCheckpointManagerInterface.restore` gives, as a flat tree.

    Its manager opens the whole directory with Orbax, whatever the checkpoints' layout. A file
    `checkpoint` without `_METADATA` beside it is then read by T5X's legacy Checkpointer, everything
    else by Orbax from the item `state`.
    """
    manager = ocp.CheckpointManager(
        model_dir,
        item_names=("state",),
        options=ocp.CheckpointManagerOptions(step_prefix="checkpoint", read_only=True),
    )
    directory = model_dir / f"checkpoint_{step}"
    if (directory / "checkpoint").exists() and not (directory / "_METADATA").exists():
        return _restore_legacy(directory)
    assert manager.latest_step() == step
    assert (directory / "state").is_dir(), "T5X asserts this"
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        structure = checkpointer.metadata(directory / "state").item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
    restored = manager.restore(
        step, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(restore_args=as_numpy))
    )
    return flax.traverse_util.flatten_dict(restored["state"], sep="/")


def _restore_legacy(directory: Path) -> dict[str, np.ndarray]:
    """T5X's Checkpointer: msgpack, and specifications that TensorStore opens.

    Chunks and compressor are dropped from a specification, and the directory is put before its
    path. The parameters' and states' names must be the model's exactly, which the caller compares.
    """
    content = serialization.msgpack_restore((directory / "checkpoint").read_bytes())
    assert set(content) == {"version", "optimizer"}
    flat = flax.traverse_util.flatten_dict(
        content["optimizer"],
        is_leaf=lambda _, value: isinstance(value, dict) and {"driver", "kvstore"} <= value.keys(),
        sep="/",
    )
    return {name: _read(directory, leaf) for name, leaf in flat.items()}


def _read(directory: Path, leaf) -> np.ndarray:
    if not isinstance(leaf, dict):
        return np.asarray(leaf)
    spec = ts.Spec(leaf).to_json()
    del spec["metadata"]["chunks"], spec["metadata"]["compressor"]
    assert not re.match(r"/|\.\.", spec["kvstore"]["path"])
    spec["kvstore"]["path"] = f"{directory}/{spec['kvstore']['path']}"
    return np.asarray(ts.open(spec, open=True).result().read().result())
