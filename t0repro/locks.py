"""One run at a time in a folder, on one machine and across machines that share a file system."""

from __future__ import annotations

import contextlib
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from t0repro.errors import UserError

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
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Iterator[None]:
    """Holds `folder` for this process; whatever the folder holds may be changed within the block.

    The system releases the lock of a process that dies, however it dies, so a killed run never
    blocks its successor. A run on another machine is recognised by its lease; whether it is still
    alive is found out by watching the lease for a minute.

    Args:
      folder: made if it is not there.
      purpose: what the holder does, as in "training", for the error that a second run gets.
      fix: what a second run can do instead.
      say: receives a line when this run has to wait for another machine's lease to run out.

    Raises:
      UserError: if another run holds the folder (the run is named), or the folder cannot be made.
    """
    # flock excludes other processes of this machine, even ones that were suspended for hours.
    lock = filelock.FileLock(folder / LOCK_FILE, timeout=0, is_singleton=False)
    # The lease excludes other machines, also where the file system does not share locks.
    lease = filelock.SoftFileLease(
        folder / LEASE_FILE, lease_duration=_LEASE_SECONDS, is_singleton=False
    )
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock)
            _acquire(lease, say)
            held.callback(lease.release)
            (folder / COMMAND_FILE).write_text(f"{purpose}\n{shlex.join(sys.argv)}\n")
            held.callback((folder / COMMAND_FILE).unlink, missing_ok=True)
        except filelock.Timeout as error:
            raise UserError(
                f"Another run holds this folder for {_holder(folder, lease)}.",
                where=str(folder),
                fix=fix,
            ) from error
        except OSError as error:
            raise UserError(
                f"The folder cannot be locked: {error.strerror}.",
                where=str(folder),
                fix="Choose a folder that can be written to.",
            ) from error
        yield


def _acquire(lease: filelock.SoftFileLease, say: Callable[[str], None]) -> None:
    try:
        lease.acquire(timeout=0)
    except filelock.Timeout:
        owner = lease.owner
        if owner is None:  # another machine is just writing it, or a power failure emptied it
            time.sleep(_SECONDS_TO_WRITE_A_LEASE)
            owner = lease.owner
        # flock is ours, so no live process of this machine holds the lease.
        if owner is None or owner.hostname == socket.gethostname():
            Path(lease.lock_file).unlink(missing_ok=True)
            lease.acquire(timeout=0)
            return
        elsewhere = f"process {owner.pid} on {owner.hostname}"
        say(f"waiting up to {_LEASE_SECONDS:.0f} s to see whether {elsewhere} is still alive")
        lease.acquire(timeout=_LEASE_SECONDS * 1.25)


def _holder(folder: Path, lease: filelock.SoftFileLease) -> str:
    """The holder in words: what it does, its process, its machine and its command."""
    try:
        purpose, command = (folder / COMMAND_FILE).read_text().splitlines()[:2]
    except (OSError, ValueError):  # it has only just begun
        purpose, command = "a run that has just started", ""
    owner = lease.owner
    place = f" (process {owner.pid} on {owner.hostname})" if owner else ""
    return f"{purpose}{place}{': ' + command if command else ''}"
