"""The worker, which runs one job's command within its limits and records how it ended.

It is started here or on a launcher's machine: `python -m t0repro.jobs.worker JOB_FILE`. It leads a
process group, in which the command and everything that it starts run. Afterward it kills whatever
is left in the group, so that no job outlives its worker. It writes the exit file first: only this
file proves that a job succeeded.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO

import psutil

from t0repro import storage
from t0repro.jobs.job import INTERPRETER, Ending, Limits, Work
from t0repro.storage import input_path, output_path, write_atomically

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL: time to save a checkpoint
_PR_SET_PDEATHSIG = 1


def main(job_file: str) -> None:
    """Runs the job described by a file of `Work.write`, then ends with everything it started."""
    work = Work.read(input_path(job_file))
    # Not a threading.Event: setting one in a signal handler while this thread checks it deadlocks
    # on its lock.
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    # A launcher may have made it the leader already.
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    if work.dies_with_parent:
        _signal_when_parent_dies()
    # All of the job's processes inherit the lock, so it is held while any of them lives.
    lock = os.open(work.lock_file or os.devnull, os.O_RDWR | os.O_CREAT, 0o666)
    if work.lock_file:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    ending = _run(work, lock, asked_to_end)
    # The log first: the controller fetches both once there is an exit file.
    storage.upload(work.log_file)
    if ending is not None:
        write_atomically(work.exit_file, json.dumps(dataclasses.asdict(ending)) + "\n")
    storage.close_copies()
    # This also ends the worker; the exit file is on disk by now.
    os.killpg(0, signal.SIGKILL)


def _run(work: Work, lock: int, asked_to_end: list[int]) -> Ending | None:
    """Runs the command; None if the worker was asked to end it, by a signal in `asked_to_end`."""
    started = time.monotonic()
    # The command and what it starts inherit it.
    if work.processors:
        os.sched_setaffinity(0, work.processors)
    with open(output_path(work.log_file), "wb") as log:
        try:
            process = subprocess.Popen(
                [sys.executable if word == INTERPRETER else word for word in work.command],
                env=os.environ | work.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            return Ending(f"{work.command[0]} cannot be started: {error.strerror}", 0.0)
        assert process.stdout is not None
        pump = threading.Thread(
            target=_keep, args=(process.stdout, log, int(work.limits.log_megabytes * 1e6))
        )
        pump.start()
        reason = _watch(process, work.limits, started, asked_to_end)
        # A process left behind by the command keeps the pipe open, and may continue to write.
        pump.join(timeout=1.0)
        log.flush()
        os.fsync(log.fileno())
    if reason is None:
        return None
    # A command ended for exceeding its limits has its own reason.
    code = process.returncode if reason == f"exit code {process.returncode}" else None
    return Ending(reason, round(time.monotonic() - started, 3), code)


def _watch(
    process: subprocess.Popen[bytes], limits: Limits, started: float, asked: list[int]
) -> str | None:
    """Waits for the command and returns why it failed, "" for success; None if asked to end."""
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        if asked:
            _end(process)
            return None
        if limits.seconds is not None and time.monotonic() - started > limits.seconds:
            _end(process)
            return f"it took longer than {limits.seconds:g} s"
        if limits.memory_gb is not None and _resident() > limits.memory_gb * 1e9:
            _end(process)
            return f"it used more than {limits.memory_gb:g} GB of memory"
    code = process.returncode
    # A negative code is a signal's number.
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the whole group to end; the worker has a handler and continues."""
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)


def _resident() -> int:
    total = 0
    for process in psutil.Process().children(recursive=True):
        # A process may end while it is being examined.
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def _keep(output: IO[bytes], log: IO[bytes], most: int) -> None:
    """Copies output to the log: its first `most` bytes at once, and at the end its last ones."""
    written, dropped = 0, 0
    tail: collections.deque[bytes] = collections.deque()
    while chunk := os.read(output.fileno(), 1 << 16):
        head = chunk[: max(0, most - written)]
        log.write(head)
        log.flush()
        written += len(head)
        if rest := chunk[len(head) :]:
            tail.append(rest)
            dropped += len(rest)
            # The end of a log often shows why a job failed, so reserve a tenth of the limit for it.
            while sum(map(len, tail)) - len(tail[0]) > most // 10:
                tail.popleft()
    last = b"".join(tail)
    if dropped > len(last):
        log.write(f"\n[... {dropped - len(last):,} bytes left out ...]\n".encode())
    log.write(last)


def _signal_when_parent_dies() -> None:
    """Makes the kernel send SIGTERM when this process's parent dies (Linux only)."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
