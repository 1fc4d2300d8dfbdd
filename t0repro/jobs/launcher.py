"""What the controller asks of an engine that runs jobs, whichever it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, Protocol

from t0repro.files import make_folder
from t0repro.jobs.worker import Ending, Limits, Work
from t0repro.redaction import is_secret

EngineState = Literal["waiting", "running", "ended", "preempted", "unknown"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One attempt at one point.

    Attributes:
      name: unique to the attempt, the same at each start of the controller; engines find it by it.
      folder: receives the job's file, log and exit file.
      environment: variables; those that look like secrets are not written into the job's file.
      options: what a machine's entry says to the engine, as written there.
    """

    name: str
    folder: Path
    command: tuple[str, ...]
    environment: dict[str, str]
    limits: Limits
    options: tuple[str, ...] = ()

    @property
    def log_file(self) -> Path:
        """Standard output and error of the command."""
        return self.folder / f"{self.name}.log"

    @property
    def lock_file(self) -> Path:
        """Locked while any process of the job lives on this machine."""
        return self.folder / f"{self.name}.lock"

    @property
    def ending(self) -> Ending | None:
        """How the job ended; None if it has not, or was killed with its worker."""
        return Ending.read(self.folder / f"{self.name}.exit.json")

    @property
    def secrets(self) -> dict[str, str]:
        """The variables that an engine hands to the job itself, past the job's file."""
        given = self.environment.items()
        return {name: value for name, value in given if is_secret(name, value)}

    def write(
        self, *, processors: tuple[int, ...] | None = None, dies_with_parent: bool = False
    ) -> Path:
        """Writes the file that the worker is started with and returns its path."""
        make_folder(self.folder)
        path = self.folder / f"{self.name}.json"
        Work(
            command=self.command,
            environment={
                name: value for name, value in self.environment.items() if name not in self.secrets
            },
            log_file=str(self.log_file),
            exit_file=str(self.folder / f"{self.name}.exit.json"),
            lock_file=str(self.lock_file),
            limits=self.limits,
            processors=processors,
            dies_with_parent=dies_with_parent,
        ).write(path)
        return path


class Launcher(Protocol):
    """An engine that runs jobs."""

    def submit(self, job: Job) -> None:
        """Starts a job or queues it.

        Raises:
          UserError: if the engine refuses it.
        """
        ...

    def state(self, job: Job) -> EngineState:
        """Where a job is.

        "preempted" if the engine took its machine away, or the machine failed; "unknown" if the
        engine has never had the job, or has forgotten it.
        """
        ...

    def cancel(self, job: Job) -> None:
        """Ends a job, if it is there, with all its processes."""
        ...

    def close(self) -> None:
        """Called when the controller ends early; jobs on an engine's own machines go on."""
        ...
