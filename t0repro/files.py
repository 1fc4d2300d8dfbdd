"""Writes files and directories atomically: a partial one is never mistaken for a complete one."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from t0repro.buckets import checked, is_address, spelled, store_error, upload
from t0repro.errors import UserError
from t0repro.working_copies import read_at, written_at

# Storage errors in plain words, each with what to do about it.
_FULL = ("The disk is full.", "Free some space, or choose a folder on another disk.")
_CLOSED = ("The folder cannot be written to.", "Choose one that can, or change its permissions.")
_GONE = (
    "A file or folder is not there.",
    "If it was there when the command started, it was moved or deleted since.",
)
_BROKEN = ("The disk failed to read or write.", "Check the disk, or choose another.")
_UNMOVED = (
    "A finished file or folder could not be renamed to its final name.",
    "Choose an output folder that is not a mount point and that no other program holds open.",
)
FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system calls a full disk; EFBIG where a limit (ulimit -f) ends a file before that."""
_BY_NUMBER = {
    **dict.fromkeys(FULL_NUMBERS, _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _CLOSED),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE), _GONE),
    errno.EIO: _BROKEN,
    **dict.fromkeys((errno.EXDEV, errno.EBUSY), _UNMOVED),
}
# TensorStore and TensorFlow raise their own exceptions, with the system's message in the text.
_BY_WORDS = (
    (re.compile(r"No space left on device|Disk quota exceeded|File too large"), _FULL),
    (re.compile(r"Read-only file system|Permission denied"), _CLOSED),
    (re.compile(r"No such file or directory|Not a directory|Stale file handle"), _GONE),
    (re.compile(r"Input/output error"), _BROKEN),
)


def storage_error(error: BaseException) -> UserError | None:
    """Turns a disk error into a UserError with a fix; returns None for any other kind of error."""
    if isinstance(error, OSError) and error.errno in _BY_NUMBER:
        what, fix = _BY_NUMBER[error.errno]
        # A rename has two names; users know the second, since the first is temporary.
        name = error.filename2 or error.filename
        where = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    else:
        # Exceptions of TensorFlow and TensorStore carry the system's message as text.
        text = str(error)
        meanings = [meaning for words, meaning in _BY_WORDS if words.search(text)]
        if not meanings:
            return None
        what, fix = meanings[0]
        # The first absolute path in the text is usually the file.
        path = re.search(r"""(?<![\w/])/[^\s"';:,\]]+""", text)
        where = path[0] if path else None
    return UserError(
        what,
        where=where,
        fix=f"{fix} Then start the same command again: it continues where it stopped.",
    )


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds a file's name to disk errors without one: those of writing to an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _BY_NUMBER:
            error.filename = os.fspath(path)
        raise


def output_path(path: str | os.PathLike[str], where: str | None = None) -> Path:
    """The path of an output. Every path that a command writes to is made here.

    Args:
      path: A local path, `file:///...`, or an address, of which this is the working copy: what is
        written there is uploaded (`t0repro.working_copies`).
      where: The option or gin binding that names it, for the message.

    Raises:
      UserError: For an address that cannot be opened.
    """
    if is_address(path):
        return written_at(path, where)
    return _without_file_scheme(path)


def input_path(path: str | os.PathLike[str], where: str | None = None) -> Path:
    """The path of an input that only local files can provide; see `output_path`.

    Raises:
      UserError: For an address that cannot be opened.
    """
    if is_address(path):
        return read_at(path, where)
    return _without_file_scheme(path)


def check_address(path: str | os.PathLike[str], where: str | None = None) -> None:
    """Raises UserError for an address that this machine cannot open; touches no network."""
    if is_address(path):
        checked(path, where)


def _without_file_scheme(path: str | os.PathLike[str]) -> Path:
    return Path(re.sub("^file:/+", "/", os.fspath(path), flags=re.IGNORECASE))


def make_folder(folder: str | os.PathLike[str]) -> None:
    """Makes a folder and its parents, unless they exist. Every folder of the product is made here.

    Raises:
      UserError: For a new folder called `gs:`, `s3:` and so on, which only an address can mean.
      OSError: If it cannot be made.
    """
    folder = output_path(folder)
    for path in (folder, *folder.parents):
        if path.exists():
            break
        # The last check: a path made absolute no longer begins with its scheme.
        if is_address(f"{path.name}/"):
            address = spelled(f"{path.name}//{folder.relative_to(path)}")
            raise UserError(
                f"{address} cannot be written to as a local folder.",
                fix="Give a local path, or the address by itself.",
            )
    folder.mkdir(parents=True, exist_ok=True)


def check_is_no_pattern(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a path below which other libraries do not find the files written.

    Orbax, for the parts of a checkpoint that it joins, and SeqIO, for a cache's files, search by a
    pattern that begins with the path. If a name in it has brackets, they find nothing: Orbax then
    leaves, without an error, a checkpoint that cannot be read.

    Args:
      path: the output's path.
      what: the name of the output, in the plural, for the message.

    Raises:
      UserError: if the path, used as a pattern, does not match itself.
    """
    whole = os.path.abspath(path)
    if not fnmatch.fnmatchcase(whole, whole):
        raise UserError(
            f"{what} cannot be written where a folder's name has brackets.",
            where=whole,
            fix="Choose a folder without [ and ] in its path.",
        )


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes, *, private: bool = False
) -> None:
    """Writes a file under a temporary name, syncs it and renames it into place.

    Creates the parent directory if needed. A private file is readable only by its owner (0600).

    Raises:
      OSError: With the file's name, if it cannot be written.
    """
    path = output_path(path)
    make_folder(path.parent)
    # In the same folder, so that the rename stays within a file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        # Never readable by others, even while it is being written; the umask may restrict it
        # further.
        mode = 0o600 if private else 0o666
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(opened, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        # The error of a write to an open file does not name the file.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            # After the rename this name no longer exists.
            temporary.unlink(missing_ok=True)


def put_file(source: Path, target: Path) -> None:
    """Copies or links a file to a path, or copies it to an address, where it appears complete."""
    if is_address(target):
        upload(source, spelled(target))
        return
    make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.tmp")
    # os.link fails if the name exists, as one that a killed process left does.
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        # The folders may be on two file systems, or on one without hard links.
        shutil.copy2(source, temporary)
    os.replace(temporary, target)
    # Renaming one name of a file to another name of the same file leaves both.
    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `path` if the block raises nothing.

    Everything in it, including files that libraries wrote, is synced before the rename. After an
    exception it is removed.

    Raises:
      FileExistsError: If `path` already exists.
    """
    path = output_path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists already.")
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        os.rename(temporary, path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Syncs every file and directory below a folder to disk.

    A rename can reach the disk before the content of the renamed files: after a power failure, the
    final name could then refer to empty files.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(os.path.join(parent, name))
        sync_directory(parent)


def sync_directory(folder: str | os.PathLike[str]) -> None:
    """Syncs a folder's entries to disk; call it after creating, renaming or removing one."""
    sync(folder)


def sync(path: str | os.PathLike[str]) -> None:
    """Syncs a file's content, or a folder's entries, to disk."""
    # fsync needs no writable descriptor, and a folder can be opened for nothing but reading.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Errors while writing ------------------------------------------------------------------------


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a full, read-only or vanished disk into a UserError, or a store that does not answer.

    Args:
      path: the path being written, for errors that do not name a file.

    Raises:
      UserError: in place of the error of the file system, the store or a library on top of it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # TensorStore raises ValueErrors with the system's messages
        if is_address(path):
            raise store_error(error, path) from error
        refused = storage_error(error)
        if refused is None:
            raise
        where = refused.where or os.fspath(path)
        raise UserError(refused.what, where=where, fix=refused.fix) from error


def append_or_undo(file: BinaryIO, data: bytes, path: str | os.PathLike[str]) -> None:
    """Appends to a file that is open without a buffer: all of the bytes, or none.

    Raises:
      UserError: If the disk is full.
    """
    with writing(path):
        size = os.fstat(file.fileno()).st_size
        if file.write(data) != len(data):
            # Part of it was written: take it back.
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
