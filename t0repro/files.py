"""How runs write: one at a time in a folder, and atomically, so nothing partial looks complete."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import os
import re
import shlex
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from t0repro.buckets import checked, is_address, spelled, store_error, upload
from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.words import without_passwords
from t0repro.working_copies import copy_with, read_at, written_at

if TYPE_CHECKING:
    import filelock

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


def check_folder(path: str | os.PathLike[str], where: str | None = None) -> None:
    """Raises UserError if no folder can be written at a path or an address; writes nothing."""
    check_address(path, where)
    folder = _without_file_scheme(path)
    if is_address(path):
        return
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    why = _obstacle(folder) or (not os.access(nearest, os.W_OK) and f"{nearest} is read-only")
    if why:
        raise UserError(
            f"No folder can be made or written at {path}: {why}.",
            where=where,
            fix="Choose a folder that can be written to.",
        )


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


def check_is_name(name: str, what: str, where: str | None = None) -> None:
    """Refuses a name from a file of somebody else's that is more than one component of a path.

    Args:
      name: The name, before it becomes part of a path.
      what: What it names, for the message.
      where: The file that it stands in.

    Raises:
      UserError: If the name has a slash, or is that of a folder's parent.
    """
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise UserError(
            f"The {what} {name!r} is not a name: it would be a path outside its folder.",
            where=where,
            fix="Do not use this file unless you know where it comes from.",
        )


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


# ---- One run at a time in a folder, on one machine or on several that share a file system --------

LOCK_FILE = ".t0repro.lock"
LEASE_FILE = ".t0repro.lease"
COMMAND_FILE = ".t0repro.holder"
LOCK_FILES = (LOCK_FILE, LEASE_FILE, COMMAND_FILE)

# The holder refreshes its lease every 20 s; another machine may take a lease that it has watched
# for a minute without seeing it refreshed.
_LEASE_SECONDS = 60.0
_SECONDS_TO_WRITE_A_LEASE = 1.0


@contextlib.contextmanager
def folder_lock(
    folder: Path,
    purpose: str,
    *,
    fix: str = "Wait for it to end, or choose another folder.",
) -> Iterator[None]:
    """Locks `folder` for this process, which may change anything in it within the block.

    The system releases a process's lock however it dies, so a killed run never blocks its successor
    on the same machine. A run on another machine is recognized by its lease; watching the lease for
    a minute shows whether that run is still alive.

    If an exception, such as that for a misspelt name, leaves the block and a folder created for it
    is still empty, the folder is removed.

    Args:
      folder: created if it does not exist.
      purpose: what the holder does, such as "training", for the error that a second run gets.
      fix: what a second run can do instead.

    Raises:
      UserError: if another run holds the folder (the message names it), or if the folder cannot be
        created or locked.
    """
    if copy := copy_with(folder):
        with copy.held(folder, purpose, fix=fix):
            yield
        return
    # Here, because every command imports this module, and few of them lock a folder.
    import filelock

    # flock excludes other processes on this machine, even ones that were suspended for hours.
    lock = filelock.FileLock(folder / LOCK_FILE, timeout=0, is_singleton=False)
    # The lease excludes other machines, even if the file system does not share locks.
    lease = filelock.SoftFileLease(
        folder / LEASE_FILE, lease_duration=_LEASE_SECONDS, is_singleton=False
    )
    with contextlib.ExitStack() as held:
        try:
            made = _make(folder)
            held.enter_context(lock)
            # Runs before the flock is released: a run that has opened the lock file meanwhile then
            # finds it gone, and makes another.
            held.push(lambda kind, *_: _remove_if_unused(made) if kind else None)
            # Take the flock first: it is exact on one machine, and the lease is for the others.
            _acquire(lease)
            held.callback(lease.release)
            # For the message that a refused run prints.
            command = without_passwords(shlex.join(sys.argv))
            held.callback((folder / COMMAND_FILE).unlink, missing_ok=True)
            (folder / COMMAND_FILE).write_text(f"{purpose}\n{command}\n")
        except filelock.Timeout as error:
            raise UserError(
                f"Another run holds this folder for {_holder(folder, lease)}.",
                where=str(folder),
                fix=fix,
            ) from error
        except OSError as error:
            raise UserError(
                f"The folder cannot be locked: {_obstacle(folder) or error.strerror}.",
                where=str(folder),
                fix="Free some space, or choose a folder on another disk."
                if error.errno in FULL_NUMBERS
                else "Choose a folder that can be written to.",
            ) from error
        yield


def _make(folder: Path) -> list[Path]:
    """Makes a folder; returns those that were not there before, the outermost last."""
    made = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    make_folder(folder)
    return made


def _remove_if_unused(made: Sequence[Path]) -> None:
    """Removes folders that hold nothing but our lock file, from the innermost outwards."""
    with contextlib.suppress(OSError):  # another run has begun to use it
        if made and {path.name for path in made[0].iterdir()} <= {LOCK_FILE}:
            (made[0] / LOCK_FILE).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def _obstacle(folder: Path) -> str | None:
    """Describes what blocks a folder's place, in words; None if nothing does."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which is not there"
        if path.exists():
            return None if path.is_dir() else f"{path} is a file"
    return None


def _acquire(lease: filelock.SoftFileLease) -> None:
    import filelock

    try:
        lease.acquire(timeout=0)
    except filelock.Timeout:
        owner = lease.owner
        if owner is None:  # another machine is just writing it, or a power failure emptied it
            time.sleep(_SECONDS_TO_WRITE_A_LEASE)
            owner = lease.owner
        # We hold the flock, so no live process on this machine holds the lease.
        if owner is None or owner.hostname == socket.gethostname():
            Path(lease.lock_file).unlink(missing_ok=True)
            lease.acquire(timeout=0)
            return
        elsewhere = f"process {owner.pid} on {owner.hostname}"
        say(f"waiting up to {_LEASE_SECONDS:.0f} s to see whether {elsewhere} is still alive")
        # Wait longer than the lease, so that a dead holder's has expired by then.
        lease.acquire(timeout=_LEASE_SECONDS * 1.25)


def _holder(folder: Path, lease: filelock.SoftFileLease) -> str:
    """Describes the holder: what it does, its process, its machine and its command."""
    try:
        purpose, command = (folder / COMMAND_FILE).read_text().splitlines()[:2]
    except (OSError, ValueError):  # it has only just started, and the file is not written yet
        purpose, command = "a run that has just started", ""
    owner = lease.owner
    place = f" (process {owner.pid} on {owner.hostname})" if owner else ""
    return f"{purpose}{place}{': ' + command if command else ''}"
