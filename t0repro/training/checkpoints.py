"""Checkpoints of the JAX stack: one Orbax directory `checkpoint_<step>/` each, with T5X's tree.

A checkpoint is written under a temporary name and renamed when it is whole. The last file written
is `integrity.json`, the length and CRC-32 of every other file, so that a file that is missing or
was changed is named before any value is used. Orbax directories that others wrote have no such file
and are read without that check.

Trees are flat here: "target/encoder/encoder_norm/scale" -> array (t0repro.training.train_state).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np

from t0repro.converters.integrity import (
    check_contents,
    describe_files,
    read_integrity,
    write_integrity,
)
from t0repro.converters.jax_tree import jax_refs
from t0repro.converters.orbax_dir import is_orbax
from t0repro.errors import UserError
from t0repro.files import atomic_directory
from t0repro.training.train_state import FlatTree, TrainState, to_flat_tree
from t0repro.training.writing import writing

DATA = "data"  # the folder with the data's position
_CHOOSE_ANOTHER = "Copy the checkpoint again from where it came from, or choose another step."

PathLike = str | os.PathLike[str]


def checkpoint_path(model_dir: PathLike, step: int) -> Path:
    """Where the checkpoint of a step is: model_dir/checkpoint_<step>."""
    return Path(model_dir) / f"checkpoint_{step}"


def list_checkpoints(model_dir: PathLike) -> list[int]:
    """Steps of the whole checkpoints in a directory, ascending; empty if there is no directory."""
    return [ref.step or 0 for ref in jax_refs(os.fspath(model_dir)) if ref.format == "jax"]


def latest_step(model_dir: PathLike) -> int | None:
    """The step of the latest whole checkpoint in a directory, or None."""
    steps = list_checkpoints(model_dir)
    return steps[-1] if steps else None


def save_checkpoint(
    model_dir: PathLike,
    state: TrainState,
    keep: int | None = None,
    save_data: Callable[[Path], None] | None = None,
) -> Path:
    """Writes a state as model_dir/checkpoint_<step> and returns that path.

    Args:
      model_dir: created if it is not there.
      state: read from the device here, which waits for the step that computes it.
      keep: how many of the latest checkpoints stay in model_dir; None or 0 keeps all.
      save_data: writes the data's position into the folder that it is given, `data_folder` later.

    Raises:
      UserError: if there is a checkpoint of that step already, or the disk is full; nothing of the
        checkpoint is left then.
    """
    path = checkpoint_path(model_dir, int(jax.device_get(state.step)))
    with writing(path):
        save_tree(path, to_flat_tree(state), save_data)
        # A negative number, with which tf.train.Saver deletes what it has just saved, keeps all.
        for step in list_checkpoints(model_dir)[:-keep] if keep and keep > 0 else []:
            _remove(checkpoint_path(model_dir, step))
    return path


def data_folder(path: PathLike) -> Path | None:
    """Where a checkpoint keeps the data's position, or None if it has none."""
    folder = Path(path) / DATA
    return folder if folder.is_dir() else None


def save_tree(
    path: PathLike, tree: FlatTree, save_data: Callable[[Path], None] | None = None
) -> None:
    """Writes a flat tree as an Orbax checkpoint directory; there is no directory until it is whole.

    Args:
      path: the directory.
      tree: its values.
      save_data: see `save_checkpoint`.

    Raises:
      UserError: if `path` exists already.
    """
    # Orbax takes a second to import, which commands that read no checkpoint need not wait for.
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    arrays = {name: np.asarray(value) for name, value in tree.items()}
    try:
        with atomic_directory(path) as temporary:
            nested = flax.traverse_util.unflatten_dict(arrays, sep="/")
            try:
                with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                    checkpointer.save(temporary, nested, force=True)
            except BaseException:
                # Orbax writes beside its target, and leaves what it wrote when it fails. On a full
                # disk that would stay in the way.
                for partial in path.parent.glob(f"{temporary.name}.*"):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            if save_data is not None:
                (temporary / DATA).mkdir()
                save_data(temporary / DATA)
            write_integrity(temporary, describe_files(temporary))
    except FileExistsError as error:
        raise UserError(
            "There is a checkpoint already.",
            where=str(path),
            fix="Remove it or choose another name.",
        ) from error


def load_tree(path: PathLike) -> dict[str, np.ndarray]:
    """Reads an Orbax checkpoint directory as a flat tree of numpy arrays; needs no model.

    Raises:
      UserError: if there is no checkpoint or a file of it is missing or damaged, by its name.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    check_integrity(path)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(path).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
            nested = checkpointer.restore(path, restore_args=as_numpy)
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged checkpoint.
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"The checkpoint cannot be read: {message[0]}", where=str(path), fix=_CHOOSE_ANOTHER
        ) from error
    flat = flax.traverse_util.flatten_dict(nested, sep="/")
    return {name: np.asarray(value) for name, value in flat.items() if value is not None}


def check_integrity(path: PathLike) -> None:
    """Raises a UserError unless a checkpoint is there and its files are as they were written."""
    if not is_orbax(os.fspath(path)):
        raise UserError(
            "There is no whole JAX checkpoint here.",
            where=str(path),
            fix="Name a checkpoint_<step> directory that a training run or a conversion wrote.",
        )
    check_contents(path, read_integrity(os.fspath(path)))


def remove_interrupted_saves(model_dir: PathLike) -> None:
    """Removes what saves that were killed left in a model_dir that no other process writes to."""
    for path in Path(model_dir).glob(".checkpoint_*.tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Removes a checkpoint so that it is never listed half removed."""
    hidden = path.with_name(f".{path.name}.removed.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden)
