"""This machine: each job in a process group of its own, which ends with the controller."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from typing import ClassVar

from t0repro.jobs.job import Job, LauncherState
from t0repro.jobs.launcher import Launcher

_GRACE_SECONDS = 15.0  # after SIGTERM: the worker itself kills its job after 10


def make_launcher(machine: object) -> Launcher:
    """The launcher of auxiliary jobs; this machine has no settings."""
    return LocalLauncher()


class LocalLauncher(Launcher):
    """Starts a worker for each job."""

    on_this_machine: ClassVar[bool] = True

    def __init__(self) -> None:
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._jobs: dict[str, Job] = {}
        self._processors: dict[str, tuple[int, ...] | None] = {}

    def submit(self, job: Job) -> None:
        """Starts a job at once."""
        self._jobs[job.name] = job
        self._processors[job.name] = processors = self._free_processors(job.limits.cpus)
        path = job.write(processors=processors, dies_with_parent=True)
        self._workers[job.name] = subprocess.Popen(
            [sys.executable, "-m", "t0repro.jobs.worker", path],
            env={**os.environ, **job.secrets},
            stdin=subprocess.DEVNULL,
            # Ctrl-C at the terminal goes to the controller only, which then ends its jobs in order.
            start_new_session=True,
        )

    def _free_processors(self, count: int | None) -> tuple[int, ...] | None:
        """The requested number of processors, those used by the fewest running jobs first."""
        if count is None:
            return None
        busy = [
            number
            for name, worker in self._workers.items()
            if worker.poll() is None
            for number in self._processors[name] or ()
        ]
        return tuple(
            sorted(os.sched_getaffinity(0), key=lambda one: (busy.count(one), one))[:count]
        )

    def state(self, job: Job) -> LauncherState:
        """A job's state; one left by a dead controller runs while any of its processes lives."""
        worker = self._workers.get(job.name)
        if worker is not None and worker.poll() is None:
            return "running"
        # The worker may be gone or belong to a dead controller, while the job's processes live on.
        if _is_alive(job):
            return "running"
        return "ended" if worker is not None else job.unlisted_state

    def cancel(self, job: Job) -> None:
        """Asks a job to end, and after a while kills it with everything it started."""
        worker = self._workers.get(job.name)
        if worker is not None and worker.poll() is None:
            worker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_GRACE_SECONDS)
        while _is_alive(job):
            with contextlib.suppress(ProcessLookupError, ValueError):
                # While the lock is held the group exists, so its number cannot belong to another.
                os.killpg(int(job.lock_file.read_text()), signal.SIGKILL)
            time.sleep(0.05)

    def close(self) -> None:
        """Ends every job that this launcher started."""
        for job in list(self._jobs.values()):
            self.cancel(job)


def _is_alive(job: Job) -> bool:
    """Whether any process of a job lives: each holds its lock."""
    try:
        lock = os.open(job.lock_file, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
