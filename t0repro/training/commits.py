"""How a checkpoint becomes complete, is read and is removed, on a disk and in each kind of bucket.

On a disk, it is renamed. In a bucket that Orbax writes to, Orbax marks it. To any other bucket, it
is uploaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from t0repro import leases
from t0repro.buckets import exists, is_address, orbax_writes_to, place, remove_all, upload_tree
from t0repro.converters.jax_tree import jax_ref
from t0repro.converters.orbax_dir import COMMITTED, METADATA, is_orbax
from t0repro.converters.storage import LocalCopy, names
from t0repro.converters.witnesses import INTEGRITY, describe_files, write_integrity
from t0repro.errors import UserError
from t0repro.files import atomic_directory
from t0repro.partitioning.processes import from_first, is_alone, is_first
from t0repro.working_copies import Scratch, upload


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


def committing(path: Path) -> contextlib.AbstractContextManager[Commit]:
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
def readable(path: Path) -> Iterator[Path]:
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
