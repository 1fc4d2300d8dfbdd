"""One run at a time in a folder, on one machine or on several that share a file system."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import filelock

from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.storage.disk import FULL_NUMBERS, find_obstacle, make_folder
from t0repro.words import remove_passwords

LOCK_FILE = ".t0repro.lock"
LEASE_FILE = ".t0repro.lease"
COMMAND_FILE = ".t0repro.holder"
LOCK_FILES = (LOCK_FILE, LEASE_FILE, COMMAND_FILE)

# The holder refreshes its lease every 20 s; another machine may take a lease that it has watched
# for a minute without seeing it refreshed.
_LEASE_SECONDS = 60.0
_SECONDS_TO_WRITE_A_LEASE = 1.0


@contextlib.contextmanager
def lock_folder(folder: Path, purpose: str, *, fix: str) -> Iterator[None]:
    """Locks `folder` for this process, which may change anything in it within the block.

    The system releases a process's lock however it dies, so a killed run never blocks its successor
    on the same machine. A run on another machine is recognized by its lease; watching the lease for
    a minute shows whether that run is still alive.

    If an exception, such as that for a misspelled name, leaves the block and a folder created for
    it is still empty, the folder is removed.

    Args:
      folder: created if it does not exist.
      purpose: what the holder does, such as "training", for the error that a second run gets.
      fix: what a second run can do instead.

    Raises:
      UserError: if another run holds the folder (the message names it), or if the folder cannot be
        created or locked.
    """
    # flock excludes other processes on this machine, even ones that were suspended for hours.
    lock = filelock.FileLock(folder / LOCK_FILE, timeout=0, is_singleton=False)
    # The lease excludes other machines, even if the file system does not share locks.
    lease = filelock.SoftFileLease(
        folder / LEASE_FILE, lease_duration=_LEASE_SECONDS, is_singleton=False
    )
    with contextlib.ExitStack() as stack:
        try:
            made = list(
                itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents))
            )
            make_folder(folder)
            stack.enter_context(lock)
            # Runs before the flock is released: a run that has opened the lock file meanwhile then
            # finds it gone, and makes another.
            stack.push(lambda kind, *_: _remove_if_unused(made) if kind else None)
            # Take the flock first: it is exact on one machine, and the lease is for the others.
            _acquire(lease)
            stack.callback(lease.release)
            # For the message that a refused run prints.
            command = remove_passwords(shlex.join(sys.argv))
            stack.callback((folder / COMMAND_FILE).unlink, missing_ok=True)
            (folder / COMMAND_FILE).write_text(f"{purpose}\n{command}\n")
        except filelock.Timeout as error:
            raise UserError(
                f"Another run holds this folder for {_holder(folder, lease)}.",
                where=str(folder),
                fix=fix,
            ) from error
        except OSError as error:
            raise UserError(
                f"The folder cannot be locked: {find_obstacle(folder) or error.strerror}.",
                where=str(folder),
                fix="Free some space, or choose a folder on another disk."
                if error.errno in FULL_NUMBERS
                else "Choose a folder that can be written to.",
            ) from error
        yield


def _remove_if_unused(made: Sequence[Path]) -> None:
    """Removes folders that hold nothing but our lock file, from the innermost outwards."""
    with contextlib.suppress(OSError):  # another run has begun to use it
        if made and {path.name for path in made[0].iterdir()} <= {LOCK_FILE}:
            (made[0] / LOCK_FILE).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def _acquire(lease: filelock.SoftFileLease) -> None:
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
