"""A job: a command with its limits, the files that its worker reads and writes, and its ending."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from t0repro import storage
from t0repro.storage import make_folder, write_atomically
from t0repro.words import is_secret

LauncherState = Literal["waiting", "running", "ended", "preempted", "unknown"]


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


@dataclasses.dataclass(frozen=True)
class Job:
    """One attempt at one point.

    Attributes:
      name: unique to the attempt and stable across controller restarts; launchers find it by name.
      folder: receives the job's file, log and exit file.
      address: the same folder for a launcher that does not share this disk; else None.
      environment: variables; those that look like secrets are kept out of the job's file.
      options: a machine's options for the launcher, as written in its entry.
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
        if ending is None and self.address and storage.exists(f"{self.address}/{name}"):
            storage.refetch(self.folder)
            ending = Ending.read(self.folder / name)
        return ending

    @property
    def unlisted_state(self) -> LauncherState:
        """The state of a job that its launcher does not list: its exit file decides."""
        return "ended" if self.ending is not None else "unknown"

    @property
    def secrets(self) -> dict[str, str]:
        """The variables that a launcher passes to the job directly, not in the job's file."""
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
            storage.upload(self.address)
        return f"{place}/{path.name}"
