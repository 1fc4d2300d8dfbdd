"""What runs jobs: the interface of every launcher."""

from __future__ import annotations

from typing import ClassVar, Protocol

from t0repro.jobs.job import Job, LauncherState


class Launcher(Protocol):
    """Runs jobs.

    Attributes:
      on_this_machine: whether jobs see this machine's disk, temporary folders included.
    """

    on_this_machine: ClassVar[bool] = False

    def submit(self, job: Job) -> None:
        """Starts a job or queues it.

        Raises:
          UserError: if the launcher refuses it.
        """
        ...

    def state(self, job: Job) -> LauncherState:
        """A job's state.

        "preempted" if the launcher took its machine away, or the machine failed; "unknown" if the
        launcher never had the job, or has forgotten it.
        """
        ...

    def cancel(self, job: Job) -> None:
        """Ends a job and all its processes, if it exists."""
        ...

    def close(self) -> None:
        """Called when the controller ends early.

        Jobs on a launcher's own machines continue; the next controller finds them by their names.
        """
