"""Files of this machine's disks, written atomically: nothing partial looks complete."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from t0repro.errors import UserError

# Disk errors in plain words, each with what to do about it.
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


def disk_error(
    error: BaseException, path: str | os.PathLike[str] | None = None
) -> UserError | None:
    """Turns a disk error into a UserError with a fix; returns None for any other kind of error.

    Args:
      error: Any exception.
      path: Where it happened, for errors that do not name a file.
    """
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
        file = re.search(r"""(?<![\w/])/[^\s"';:,\]]+""", text)
        where = file[0] if file else None
    return UserError(
        what,
        where=where or (None if path is None else os.fspath(path)),
        fix=f"{fix} Then start the same command again: it continues where it stopped.",
    )


@contextlib.contextmanager
def name_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds a file's name to disk errors without one: those of writing to an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _BY_NUMBER:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def explain_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a full, read-only or vanished disk into a UserError.

    Args:
      path: The path being written, for errors that do not name a file.

    Raises:
      UserError: In place of the error of the file system or of a library on top of it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # TensorStore raises ValueErrors with the system's messages
        explained = disk_error(error, path)
        if explained is None:
            raise
        raise explained from error


def find_obstacle(folder: Path) -> str | None:
    """Describes what prevents a folder at a path, in words; None if nothing does."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which is not there"
        if path.exists():
            if not path.is_dir():
                return f"{path} is a file"
            return None if os.access(path, os.W_OK) else f"{path} is read-only"
        if path.name == "~":
            return "only a shell expands a ~, so write the home folder's path"
    return None


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents, unless they exist. Every folder of the product is made here.

    Raises:
      UserError: For a new folder called `gs:`, `s3:` and so on, which only an address can mean, or
        `~`.
      OSError: If it cannot be made.
    """
    for path in (folder, *folder.parents):
        if path.exists():
            break
        if path.name == "~":
            raise UserError(
                f"{folder} would be below a folder called ~, which only a shell expands.",
                fix="Write the home folder's path in place of ~.",
            )
        # The last check: a path made absolute no longer begins with its scheme.
        if re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*:", path.name) and path.name.lower() != "file:":
            raise UserError(
                f"{path.name.lower()}//{folder.relative_to(path)} cannot be written to as a local"
                " folder.",
                fix="Give a local path, or the address by itself.",
            )
    folder.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Writes a file under a temporary name, syncs it and renames it into place.

    Creates the parent directory if needed. A private file is readable only by its owner (0600).

    Raises:
      OSError: With the file's name, if it cannot be written.
    """
    make_folder(path.parent)
    # In the same folder, so that the rename stays within a file system.
    temporary = _temporary_name(path)
    try:
        # Never readable by others, even while it is being written; the umask may restrict it
        # further.
        mode = 0o600 if private else 0o666
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        # The error of a write to an open file does not name the file.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            # After the rename this name no longer exists.
            temporary.unlink(missing_ok=True)


def put_file(source: Path, target: Path) -> None:
    """Copies or links a file to a path, where it appears complete."""
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


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `path` if the block raises nothing.

    Everything in it, including files that libraries wrote, is synced before the rename. After an
    exception it is removed.

    Raises:
      FileExistsError: If `path` already exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already.")
    make_folder(path.parent)
    temporary = _temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        os.rename(temporary, path)
        sync(path.parent)
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
        sync(parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Syncs a file's content to disk, or a folder's entries, after one was made or renamed."""
    # fsync needs no writable descriptor, and a folder can be opened for nothing but reading.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_or_undo(file: BinaryIO, data: bytes, path: str | os.PathLike[str]) -> None:
    """Appends to a file that is open without a buffer: all of the bytes, or none.

    Raises:
      UserError: If the disk is full.
    """
    with explain_errors(path):
        size = os.fstat(file.fileno()).st_size
        if file.write(data) != len(data):
            # Part of it was written: take it back.
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
