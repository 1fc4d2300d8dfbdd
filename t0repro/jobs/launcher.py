"""The interface of engines that run jobs, and the engine for this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from t0repro import buckets, working_copies
from t0repro.files import make_folder
from t0repro.jobs.worker import GRACE_SECONDS, Ending, Limits, Work
from t0repro.words import is_secret

EngineState = Literal["waiting", "running", "ended", "preempted", "unknown"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One attempt at one point.

    Attributes:
      name: unique to the attempt and stable across controller restarts; engines find it by name.
      folder: receives the job's file, log and exit file.
      address: the same folder for an engine that does not share this disk; else None.
      environment: variables; those that look like secrets are kept out of the job's file.
      options: a machine's options for the engine, as written in its entry.
    """

    name: str
    folder: Path
    command: tuple[str, ...]
    environment: dict[str, str]
    limits: Limits
    options: tuple[str, ...] = ()
    address: str | None = None

    @property
    def log_file(self) -> Path:
        """Standard output and error of the command."""
        return self.folder / f"{self.name}.log"

    @property
    def lock_file(self) -> Path:
        """Locked while any of the job's processes lives on this machine."""
        return self.folder / f"{self.name}.lock"

    @property
    def ending(self) -> Ending | None:
        """The job's ending; None if it runs, or was killed with its worker.

        What a worker elsewhere has left is fetched first.
        """
        name = f"{self.name}.exit.json"
        ending = Ending.read(self.folder / name)
        if ending is None and self.address and buckets.exists(f"{self.address}/{name}"):
            working_copies.refetch(self.folder)
            ending = Ending.read(self.folder / name)
        return ending

    @property
    def unlisted_state(self) -> EngineState:
        """The state of a job that its engine does not list: its exit file decides."""
        return "ended" if self.ending is not None else "unknown"

    @property
    def secrets(self) -> dict[str, str]:
        """The variables that an engine passes to the job directly, not in the job's file."""
        given = self.environment.items()
        return {name: value for name, value in given if is_secret(name, value)}

    def write(
        self, *, processors: tuple[int, ...] | None = None, dies_with_parent: bool = False
    ) -> str:
        """Writes the worker's input file and returns its path, or its address."""
        make_folder(self.folder)
        place = self.address or str(self.folder)
        path = self.folder / f"{self.name}.json"
        Work(
            command=self.command,
            environment={
                name: value for name, value in self.environment.items() if name not in self.secrets
            },
            log_file=f"{place}/{self.log_file.name}",
            exit_file=f"{place}/{self.name}.exit.json",
            # Only this machine asks whether a process of a job lives.
            lock_file=None if self.address else str(self.lock_file),
            limits=self.limits,
            processors=processors,
            dies_with_parent=dies_with_parent,
        ).write(path)
        if self.address:
            working_copies.upload(self.address)
        return f"{place}/{path.name}"


class Launcher(Protocol):
    """An engine that runs jobs.

    Attributes:
      on_this_machine: whether jobs see this machine's disk, temporary folders included.
    """

    on_this_machine: ClassVar[bool] = False

    def submit(self, job: Job) -> None:
        """Starts a job or queues it.

        Raises:
          UserError: if the engine refuses it.
        """
        ...

    def state(self, job: Job) -> EngineState:
        """A job's state.

        "preempted" if the engine took its machine away, or the machine failed; "unknown" if the
        engine never had the job, or has forgotten it.
        """
        ...

    def cancel(self, job: Job) -> None:
        """Ends a job and all its processes, if it exists."""
        ...

    def close(self) -> None:
        """Called when the controller ends early.

        Jobs on an engine's own machines continue; the next controller finds them by their names.
        """


# ---- Runs jobs on this machine, each in a process group of its own that ends with the
# controller


class LocalLauncher(Launcher):
    """Starts a worker (t0repro.jobs.worker) for each job."""

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

    def state(self, job: Job) -> EngineState:
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
                worker.wait(GRACE_SECONDS * 1.5)
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
