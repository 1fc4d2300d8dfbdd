"""Checkpoints of the JAX stack: one Orbax directory `checkpoint_<step>/` each, with T5X's tree.

On a disk, a checkpoint is written under a temporary name and renamed once it is complete; how it
becomes complete in a bucket is at the end. The last file written is `integrity.json`, with the
length and CRC-32 of every other file, so that a missing or altered file is reported by name before
any value is used. Orbax directories written by other programs have no such file; for them, every
array and chunk that Orbax's own metadata names must exist.

Saving has two parts: `start_checkpoint` copies the state to the host, so that training may
continue in the same buffers, and a thread writes the copy.

Trees are flat here: "target/encoder/encoder_norm/scale" -> array (t0repro.training.train_state).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import NamedSharding

from t0repro.converters.jax_tree import jax_refs
from t0repro.converters.orbax_dir import OrbaxArrays, is_orbax
from t0repro.converters.tensors import cast_parameters
from t0repro.converters.witnesses import (
    Written,
    check_contents,
    read_integrity,
)
from t0repro.errors import UserError
from t0repro.partitioning.processes import (
    is_alone,
    is_first,
    make_barrier,
    wait_for_all,
)
from t0repro.progress import only_records
from t0repro.storage import (
    absolute_place,
    copy_here,
    explain_errors,
    input_path,
    orbax_writes_to,
    place,
)
from t0repro.storage.names import check_is_no_pattern
from t0repro.training.checkpoint_commit import prepare_commit
from t0repro.training.train_state import TrainState, flat_arrays, to_flat_tree

DATA = "data"  # the checkpoint's folder for the position in the data
# A slow disk may need longer than the ten minutes after which Orbax gives up by default.
_NO_LIMIT_SECONDS = 7 * 24 * 3600
_CHOOSE_ANOTHER = "Copy the checkpoint again from where it came from, or choose another step."

PathLike = str | os.PathLike[str]


def checkpoint_path(model_dir: PathLike, step: int) -> Path:
    """Where the checkpoint of a step is: model_dir/checkpoint_<step>."""
    return place(model_dir) / f"checkpoint_{step}"


def list_checkpoints(model_dir: PathLike) -> list[int]:
    """Steps of a directory's complete checkpoints, ascending; empty if there is no directory."""
    return [ref.step or 0 for ref in jax_refs(os.fspath(model_dir)) if ref.format == "jax"]


def latest_step(model_dir: PathLike) -> int | None:
    """The step of the latest complete checkpoint in a directory, or None."""
    steps = list_checkpoints(model_dir)
    return steps[-1] if steps else None


def save_checkpoint(
    model_dir: PathLike,
    state: TrainState,
) -> Path:
    """Writes a state as model_dir/checkpoint_<step> and returns that path once it is complete.

    Args:
      model_dir: created if it does not exist.
      state: copied from the device, which waits for the step that computes it.

    Raises:
      UserError: see `start_checkpoint`.
    """
    start_checkpoint(model_dir, state).result()
    return checkpoint_path(model_dir, int(jax.device_get(state.step)))


def start_checkpoint(
    model_dir: PathLike,
    state: TrainState,
    *,
    save_data: Callable[[Path], None] | None = None,
    dtype: str | None = None,
    save_notes: Callable[[Path], None] | None = None,
    then: Callable[[], None] | None = None,
) -> concurrent.futures.Future[None]:
    """Copies a state to the host, then writes it as model_dir/checkpoint_<step> in the background.

    Args:
      model_dir: created if it does not exist.
      state: copied from the device, which waits for the step that computes it; its buffers may be
        reused when this returns.
      save_data: writes the position in the data into the folder that it is given, before this
        returns; `data_folder` finds that folder later.
      dtype: type of the parameters in the checkpoint; None for float32. Slots stay float32.
      save_notes: writes further small files into the checkpoint's own folder, before this returns.
      then: called in the background once the checkpoint is complete.

    Returns:
      A future, done when the checkpoint is complete in every process. The next save must wait for
      it.

    Raises:
      UserError: here or from the future, if that step already has a checkpoint, or if the disk is
        full. Either way, nothing of the new checkpoint remains.
    """
    path = checkpoint_path(model_dir, int(jax.device_get(state.step)))
    # With several processes, each writes the shards on its own devices.
    tree = to_flat_tree(state) if is_alone() else flat_arrays(state)
    tree = cast_parameters(tree, dtype) if dtype else tree
    return _start_saving(path, tree, save_data, save_notes, then)


def data_folder(path: PathLike) -> Path | None:
    """The folder with a checkpoint's position in the data, or None if it has none."""
    folder = place(path) / DATA
    return input_path(folder) if folder.is_dir() else None


def save_tree(path: PathLike, tree: Mapping[str, Any]) -> None:
    """Writes a flat tree as an Orbax checkpoint directory, which appears only once it is complete.

    With several processes, all must make this call.

    Args:
      path: the directory.
      tree: its arrays by flat name; in one process they are copied from the devices.

    Raises:
      UserError: if `path` exists already or cannot be written to, or if the disk is full.
    """
    _start_saving(place(path), tree).result()


def _start_saving(
    path: Path,
    tree: Mapping[str, Any],
    save_data: Callable[[Path], None] | None = None,
    save_notes: Callable[[Path], None] | None = None,
    then: Callable[[], None] | None = None,
) -> concurrent.futures.Future[None]:
    """Copies a tree to the host and writes it in the background; see `start_checkpoint`."""
    # Orbax takes a second to import; commands that touch no checkpoint should not wait for it.
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.metadata.checkpoint import metadata_store

    path = absolute_place(path)
    check_is_no_pattern(path, "Checkpoints")
    arrays = {name: np.asarray(value) if is_alone() else value for name, value in tree.items()}
    nested = flax.traverse_util.unflatten_dict(arrays, sep="/")
    # Here and not in `finish`: processes number their meetings in the main thread's order.
    whole = make_barrier()
    with contextlib.ExitStack() as stack:
        stack.enter_context(explain_errors(path))
        commit = stack.enter_context(prepare_commit(path))
        temporary = commit.files
        if is_first():
            # Write these before returning, while they still belong to this step.
            if save_data is not None:
                (temporary / DATA).mkdir()
                save_data(temporary / DATA)
            if save_notes is not None:
                save_notes(temporary)
        stack.enter_context(_quiet_after_failure())
        stack.enter_context(_remove_on_failure(temporary))
        checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(),
            timeout_secs=_NO_LIMIT_SECONDS,
            temporary_path_class=commit.path_class,
            # Orbax's first file is there before the others, not some time later: without it, the
            # others would pass for a complete checkpoint of an older Orbax.
            checkpoint_metadata_store=metadata_store(enable_write=True, blocking_write=True),
        )
        checkpointer.save(commit.arrays, nested)
        unfinished = stack.pop_all()

    def finish() -> None:
        with unfinished:
            checkpointer.close()
            if is_first():
                commit.finish()
        if is_first() and then is not None:
            with explain_errors(path):
                then()
        whole()

    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="save")
    future = pool.submit(finish)
    pool.shutdown(wait=False)  # the thread ends when its work does
    return future


@contextlib.contextmanager
def _remove_on_failure(temporary: Path) -> Iterator[None]:
    """After a failure, removes what Orbax wrote, which takes up a full disk."""
    try:
        yield
    except BaseException:
        # For a second, because writes still under way put files back.
        for _ in range(20):
            shutil.rmtree(temporary, ignore_errors=True)
            time.sleep(0.05)
        raise


@contextlib.contextmanager
def _quiet_after_failure() -> Iterator[None]:
    """Keeps Orbax and TensorStore from printing tracebacks of a failure that is raised anyway."""
    hook = sys.unraisablehook

    def report(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    def is_worth_logging(record: logging.LogRecord) -> bool:
        return not any(
            f"orbax/checkpoint/_src/{part}" in record.pathname
            for part in ("futures", "checkpointers/async")
        )

    # Orbax closes its event loop after a failure. Writes that are still under way then fail
    # where no caller can catch the exception; Python only reports it.
    sys.unraisablehook = report
    # Orbax logs the failure in each of its threads.
    with only_records("absl", is_worth_logging):
        yield
    sys.unraisablehook = hook  # after a failure `report` stays: the writes end later


def load_tree(path: PathLike) -> dict[str, np.ndarray]:
    """Reads an Orbax checkpoint directory as a flat tree of numpy arrays; needs no model.

    Raises:
      UserError: if there is no checkpoint, or one of its files is missing or damaged.
    """
    path = absolute_place(path)
    with _explain_read_errors(path):
        check_contents(path, _read_written(path))
        return _restore(path, {})


def load_sharded_tree(path: PathLike, like: TrainState) -> dict[str, np.ndarray | jax.Array]:
    """Reads a checkpoint for a state that is sharded across devices; all processes make this call.

    Each process reads only its own devices' shards of each array, and checks its share of the
    files.

    Args:
      path: the checkpoint's directory.
      like: the state's shapes. An array that has a sharding there (see
        `Partitioning.shapes_on_devices`) and the same shape in the checkpoint is returned on the
        devices, with that sharding and dtype; any other as numpy, as stored.

    Raises:
      UserError: if there is no checkpoint, or one of its files is missing or damaged.
    """
    path = absolute_place(path)
    places = {
        name: leaf
        for name, leaf in flat_arrays(like).items()
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }
    with _explain_read_errors(path):
        files = sorted(_read_written(path).items())
        check_contents(path, dict(files[jax.process_index() :: jax.process_count()]))
        wait_for_all()  # all processes wait for the checks of all others
        return _restore(path, places)


@contextlib.contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """Reports a checkpoint that is not there, cannot be read, or was removed meanwhile."""
    if not is_orbax(os.fspath(path)):
        raise UserError(
            "There is no complete JAX checkpoint here.",
            where=str(path),
            fix="Name a checkpoint_<step> directory that a training run or a conversion wrote.",
        )
    try:
        yield
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged checkpoint.
        # A removal begins with what makes it complete, so any file may have been missing.
        if not is_orbax(os.fspath(path)):
            raise UserError(
                "The checkpoint was removed while it was being read.",
                where=str(path),
                fix="Choose a later step, or have the training keep more checkpoints.",
            ) from error
        if isinstance(error, UserError):
            raise
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"The checkpoint cannot be read: {message[0]}", where=str(path), fix=_CHOOSE_ANOTHER
        ) from error


def _restore(path: Path, places: Mapping[str, Any]) -> dict[str, Any]:
    """A complete checkpoint's arrays; those in `places` go to the devices if their shapes match."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

    def arguments(names: Any, entry: Any) -> ocp.RestoreArgs:
        like = places.get(jax.tree_util.keystr(names, simple=True, separator="/"))
        if like is None or tuple(entry.shape) != like.shape:
            # As numpy, whichever devices and shardings the writing program used.
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=like.sharding, dtype=like.dtype)

    with (
        _readable(path) as place,
        # By name alone. In a bucket Orbax would ask for its marker, which a copy of a local
        # checkpoint lacks, and one whose writer was killed once all but the marker was there.
        ocp.Checkpointer(
            (handler := ocp.PyTreeCheckpointHandler()),
            temporary_path_class=AtomicRenameTemporaryPath,
        ) as checkpointer,
    ):
        # Of the handler, since the checkpointer answers None to many errors.
        metadata = handler.metadata(cast(Any, place)).tree
        wanted = jax.tree_util.tree_map_with_path(arguments, metadata)
        nested = checkpointer.restore(place, restore_args=wanted)
    flat = flax.traverse_util.flatten_dict(nested, sep="/")
    return {
        name: value if isinstance(value, jax.Array) else np.asarray(value)
        for name, value in flat.items()
        if value is not None
    }


def _read_written(path: PathLike) -> dict[str, Written]:
    """What was written to each of a checkpoint's files, as far as it is recorded."""
    files = read_integrity(os.fspath(path))
    if not files:
        # Orbax does not notice a missing chunk: it may restore zeros in its place.
        OrbaxArrays(os.fspath(path)).check_chunks()
    return files


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """Where Orbax can read a checkpoint: the path itself, or a copy that lasts for the block."""
    copy = None if orbax_writes_to(path) else copy_here(os.fspath(path))
    yield path if copy is None else Path(copy.path)
