"""Jobs: the interface of engines that run them, the engine for this machine, and the worker.

A job runs in a worker, here or on an engine's machine: `python -m t0repro.jobs.worker JOB_FILE`.
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
from pathlib import Path
from typing import IO, ClassVar, Literal, Protocol

import psutil

from t0repro import buckets, working_copies
from t0repro.files import input_path, make_folder, output_path, write_atomically
from t0repro.words import is_secret

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL: time to save a checkpoint
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """A job's resource limits; None means no limit.

    Attributes:
      cpus: number of processors.
      memory_gb: resident memory of all its processes together, in 10**9 bytes.
      seconds: from start to end.
      log_megabytes: how much of its output to keep; of later output, only the end is kept.
    """

    cpus: int | None = None
    memory_gb: float | None = None
    seconds: float | None = None
    log_megabytes: float = 10.0


# Placeholder for the worker's Python at the start of a command; its path differs between images.
INTERPRETER = "{python}"


@dataclasses.dataclass(frozen=True)
class Work:
    """A command, and the paths of its log, its lock and its exit file.

    Attributes:
      command: may begin with INTERPRETER.
      environment: variables that are added to the worker's own.
      log_file, exit_file: paths or addresses; the second receives an `Ending` as JSON.
      lock_file: locked for as long as any of the job's processes lives; None if nobody asks.
      processors: numbers of the processors that it may use; None means any.
      dies_with_parent: whether the job ends when the process that started the worker does.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    log_file: str
    exit_file: str
    lock_file: str | None
    limits: Limits
    processors: tuple[int, ...] | None = None
    dies_with_parent: bool = False

    def write(self, path: Path) -> None:
        """Writes the file that the worker is started with."""
        # Private, since a command may contain secrets.
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n", private=True)

    @classmethod
    def read(cls, path: Path) -> Work:
        """Reads what `write` wrote."""
        fields = json.loads(path.read_text())
        fields["command"] = tuple(fields["command"])
        return cls(**fields | {"limits": Limits(**fields["limits"])})


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
      reason: Why it failed; empty if it succeeded.
      seconds: From start to end.
      exit_code: The command's, if it ended by itself.
    """

    reason: str
    seconds: float
    exit_code: int | None = None

    @classmethod
    def read(cls, path: Path) -> Ending | None:
        """Reads what a worker wrote; None if it wrote nothing."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None


# ---- Engines -------------------------------------------------------------------------------------

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


# ---- This machine: each job in a process group of its own, which ends with the controller --------


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
                worker.wait(_GRACE_SECONDS * 1.5)
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


# ---- The worker, which runs one job's command within its limits and records how it ended ---------

# The worker leads a process group, in which the command and everything that it starts run.
# Afterwards it kills whatever is left in the group, so that no job outlives its worker. It writes
# the exit file first: only this file proves that a job succeeded.


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
    working_copies.upload(work.log_file)
    if ending is not None:
        write_atomically(work.exit_file, json.dumps(dataclasses.asdict(ending)) + "\n")
    working_copies.close_all()
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
