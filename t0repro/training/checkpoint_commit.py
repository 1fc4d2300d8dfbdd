"""How a checkpoint becomes complete.

On a disk, it is renamed. In a bucket that Orbax writes to, Orbax marks it. To any other bucket,
it is uploaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from t0repro.converters.orbax_dir import COMMITTED, METADATA, is_orbax
from t0repro.converters.witnesses import (
    INTEGRITY,
    describe_files,
    write_integrity,
)
from t0repro.errors import UserError
from t0repro.partitioning.processes import (
    broadcast_from_first,
    is_alone,
    is_first,
)
from t0repro.storage import exists, is_address, orbax_writes_to, put_tree, scratch_folder, upload
from t0repro.storage.disk import atomic_directory


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


def prepare_commit(path: Path) -> contextlib.AbstractContextManager[Commit]:
    """Prepares a checkpoint's place for Orbax; nothing is left of it if the block raises.

    Args:
      path: the checkpoint's directory, local or in a bucket.

    Raises:
      UserError: if there is a checkpoint already, or several processes cannot write there.
    """
    if not is_address(path):
        return _commit_by_rename(path)
    return _commit_by_marker(path) if orbax_writes_to(path) else _commit_by_upload(path)


@contextlib.contextmanager
def _commit_by_rename(path: Path) -> Iterator[Commit]:
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
def _commit_by_marker(path: Path) -> Iterator[Commit]:
    """In a bucket that Orbax writes to: what is saved beside the arrays comes before its marker."""
    from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath

    with _new_files(path) as files:
        address = str(path)

        class Committed(CommitFileTemporaryPath):
            """A path whose commit has our files in it; Orbax commits in the first process."""

            async def finalize(self) -> None:
                # The log first: a checkpoint is never ahead of the metrics of its steps.
                await asyncio.to_thread(upload, path.parent)
                await asyncio.to_thread(put_tree, files, address)
                # Orbax removes it before it writes it. A removal that was sent twice, since its
                # answer was late, may have come after the writing.
                if not await asyncio.to_thread(exists, f"{address}/{METADATA}"):
                    raise OSError(f"{METADATA} was written and is gone")
                await super().finalize()

        yield Commit(files, path, lambda: write_integrity(path, describe_files(path)), Committed)


@contextlib.contextmanager
def _commit_by_upload(path: Path) -> Iterator[Commit]:
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
            put_tree(files, str(path), last)

        yield Commit(files, arrays, finish)


@contextlib.contextmanager
def _new_files(path: Path) -> Iterator[Path]:
    """A folder of this machine for the files of a checkpoint that a bucket does not have yet."""
    if is_first() and is_orbax(os.fspath(path)):
        raise _exists(path)
    with scratch_folder() as folder:
        yield folder


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
        yield Path(broadcast_from_first(str))
        return
    try:
        with atomic_directory(path) as temporary:
            # The name has a random part, so it is sent to the others.
            yield Path(broadcast_from_first(lambda: str(temporary)))
    except FileExistsError as error:
        raise _exists(path) from error
