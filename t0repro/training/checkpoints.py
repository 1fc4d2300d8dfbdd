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

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import NamedSharding

from t0repro import leases
from t0repro.buckets import (
    absolute,
    exists,
    is_address,
    orbax_writes_to,
    place,
    remove_all,
    upload_tree,
)
from t0repro.config.training_plan import SaveConfig
from t0repro.converters.jax_tree import jax_ref, jax_refs
from t0repro.converters.orbax_dir import COMMITTED, METADATA, OrbaxArrays, is_orbax
from t0repro.converters.storage import LocalCopy, names
from t0repro.converters.tensors import with_parameters_in
from t0repro.converters.witnesses import (
    INTEGRITY,
    Written,
    check_contents,
    describe_files,
    read_integrity,
    write_integrity,
)
from t0repro.errors import UserError
from t0repro.files import atomic_directory, check_is_no_pattern, input_path, output_path, writing
from t0repro.partitioning.processes import (
    from_first,
    is_alone,
    is_first,
    meeting_point,
    wait_for_all,
)
from t0repro.progress import only_records
from t0repro.training.metrics import METRICS_FILE
from t0repro.training.train_state import TrainState, flat_arrays, to_flat_tree
from t0repro.working_copies import Scratch, upload

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
    tree = with_parameters_in(tree, dtype) if dtype else tree
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

    path = absolute(path)
    check_is_no_pattern(path, "Checkpoints")
    arrays = {name: np.asarray(value) if is_alone() else value for name, value in tree.items()}
    nested = flax.traverse_util.unflatten_dict(arrays, sep="/")
    # Here and not in `finish`: processes number their meetings in the main thread's order.
    whole = meeting_point()
    with contextlib.ExitStack() as stack:
        stack.enter_context(writing(path))
        commit = stack.enter_context(_committing(path))
        temporary = commit.files
        if is_first():
            # Write these before returning, while they still belong to this step.
            if save_data is not None:
                (temporary / DATA).mkdir()
                save_data(temporary / DATA)
            if save_notes is not None:
                save_notes(temporary)
        stack.enter_context(_quiet_after_failure())
        stack.enter_context(_without_leftovers(temporary))
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
            with writing(path):
                then()
        whole()

    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="save")
    future = pool.submit(finish)
    pool.shutdown(wait=False)  # the thread ends when its work does
    return future


@contextlib.contextmanager
def _without_leftovers(temporary: Path) -> Iterator[None]:
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
    path = absolute(path)
    with _reading(path):
        check_contents(path, _written(path))
        return _restored(path, {})


def load_sharded_tree(path: PathLike, like: TrainState) -> dict[str, np.ndarray | jax.Array]:
    """Reads a checkpoint for a state that is sharded across devices; all processes make this call.

    Each process reads only its own devices' shards of each array, and checks its share of the
    files.

    Args:
      path: the checkpoint's directory.
      like: the state's shapes. An array that has a sharding there (`Partitioning.placed`) and the
        same shape in the checkpoint is returned on the devices, with that sharding and dtype; any
        other as numpy, as stored.

    Raises:
      UserError: if there is no checkpoint, or one of its files is missing or damaged.
    """
    path = absolute(path)
    places = {
        name: leaf
        for name, leaf in flat_arrays(like).items()
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }
    with _reading(path):
        files = sorted(_written(path).items())
        check_contents(path, dict(files[jax.process_index() :: jax.process_count()]))
        wait_for_all()  # all processes wait for the checks of all others
        return _restored(path, places)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
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


def _restored(path: Path, places: Mapping[str, Any]) -> dict[str, Any]:
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


def _written(path: PathLike) -> dict[str, Written]:
    """What was written to each of a checkpoint's files, as far as it is recorded."""
    files = read_integrity(os.fspath(path))
    if not files:
        # Orbax does not notice a missing chunk: it may restore zeros in its place.
        OrbaxArrays(os.fspath(path)).check_chunks()
    return files


# ---- Removing ------------------------------------------------------------------------------------


PINNED = "PINNED"  # a file of this name in a checkpoint exempts it, as in T5X


def remove_superfluous(
    model_dir: str | os.PathLike[str], save: SaveConfig, values: Mapping[int, float]
) -> None:
    """Removes the checkpoints that a rule does not keep; call it once a new one is complete.

    Args:
      model_dir: the run's folder.
      save: see `superfluous`.
      values: see `superfluous`.
    """
    paths = {step: checkpoint_path(model_dir, step) for step in list_checkpoints(model_dir)}
    # A pinned checkpoint is neither removed nor counted toward the number to keep.
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


# ---- How a checkpoint becomes complete, is read and is removed, on a disk and in buckets ---------
#
# On a disk, it is renamed. In a bucket that Orbax writes to, Orbax marks it. To any other bucket,
# it is uploaded.


@dataclasses.dataclass(frozen=True)
class Commit:
    """How a checkpoint becomes complete where it is written.

    Attributes:
      files: The local folder for what is saved beside the arrays.
      arrays: Where Orbax writes; it must not exist.
      finish: Called once Orbax is done, in the first process.
      path_class: Orbax's way of committing; None for its own choice.
    """

    files: Path
    arrays: Path
    finish: Callable[[], None]
    path_class: Any = None


def _committing(path: Path) -> contextlib.AbstractContextManager[Commit]:
    """Prepares a checkpoint's place for Orbax; nothing is left of it if the block raises.

    Args:
      path: the checkpoint's directory, local or in a bucket.

    Raises:
      UserError: if there is a checkpoint already, or several processes cannot write there.
    """
    if not is_address(path):
        return _renamed(path)
    return _marked(path) if orbax_writes_to(path) else _uploaded(path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """Where Orbax can read a checkpoint: the path itself, or a copy that lasts for the block."""
    copy = None if orbax_writes_to(path) else LocalCopy(os.fspath(path))
    yield path if copy is None else Path(copy.path)


def remove_interrupted_saves(model_dir: str | os.PathLike[str]) -> None:
    """Removes what killed saves left behind; no other run may be writing to model_dir."""
    if not is_first():
        return
    if is_address(model_dir):
        for name in names(str(place(model_dir))):
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
        with leases.removing(str(path)) as is_free:
            if is_free:
                # These mark a checkpoint as complete; either of the last two does so alone.
                remove_all(str(path), (INTEGRITY, COMMITTED, "_CHECKPOINT_METADATA", "_METADATA"))
        return
    hidden = path.with_name(f".{path.name}.removed.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Commit]:
    """On a disk: all is written below another name, and renamed."""
    with _directory_of_all(path) as temporary:
        # Orbax wants a folder that is not there yet, and its processes meet by the folder's name:
        # this one is unlike that of any other save.
        arrays = temporary / temporary.name

        def finish() -> None:
            for part in arrays.iterdir():
                part.rename(temporary / part.name)
            arrays.rmdir()
            write_integrity(temporary, describe_files(temporary))

        yield Commit(temporary, arrays, finish)


@contextlib.contextmanager
def _marked(path: Path) -> Iterator[Commit]:
    """In a bucket that Orbax writes to: what is saved beside the arrays comes before its marker."""
    from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath

    with _new_files(path) as files:
        address = str(path)

        class Committed(CommitFileTemporaryPath):
            """A path whose commit has our files in it; Orbax commits in the first process."""

            async def finalize(self) -> None:
                # The log first: a checkpoint is never ahead of the metrics of its steps.
                await asyncio.to_thread(upload, path.parent)
                await asyncio.to_thread(upload_tree, files, address)
                # Orbax removes it before it writes it. A removal that was sent twice, since its
                # answer was late, may have come after the writing.
                if not await asyncio.to_thread(exists, f"{address}/{METADATA}"):
                    raise OSError(f"{METADATA} was written and is gone")
                await super().finalize()

        yield Commit(files, path, lambda: write_integrity(path, describe_files(path)), Committed)


@contextlib.contextmanager
def _uploaded(path: Path) -> Iterator[Commit]:
    """In another bucket: Orbax writes to this machine's disk, and the files are uploaded."""
    if not is_alone():
        raise UserError(
            "Several processes cannot write one checkpoint there.",
            where=str(path),
            fix="Train in a gs:// address, on a shared disk, or in one process.",
        )
    with _new_files(path) as files:
        arrays = files / "arrays"

        def finish() -> None:
            for part in arrays.iterdir():
                part.rename(files / part.name)
            arrays.rmdir()
            write_integrity(files, describe_files(files))
            upload(path.parent)
            # Orbax's marker is among the files; a checkpoint that has it is taken to be complete.
            last = ("_METADATA", "_CHECKPOINT_METADATA", COMMITTED, INTEGRITY)
            upload_tree(files, str(path), last)

        yield Commit(files, arrays, finish)


@contextlib.contextmanager
def _new_files(path: Path) -> Iterator[Path]:
    """A folder of this machine for the files of a checkpoint that a bucket does not have yet."""
    if is_first() and is_orbax(os.fspath(path)):
        raise _exists(path)
    scratch = Scratch()
    try:
        yield scratch.path
    finally:
        scratch.remove()


def _exists(path: Path) -> UserError:
    return UserError(
        "There is a checkpoint already.",
        where=str(path),
        fix="Remove it or choose another name.",
    )


@contextlib.contextmanager
def _directory_of_all(path: Path) -> Iterator[Path]:
    """The first process's `atomic_directory`, for all processes to write into."""
    if not is_first():
        yield Path(from_first(str))
        return
    try:
        with atomic_directory(path) as temporary:
            # The name has a random part, so it is sent to the others.
            yield Path(from_first(lambda: str(temporary)))
    except FileExistsError as error:
        raise _exists(path) from error
