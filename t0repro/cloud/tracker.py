"""The interface of every experiment tracker, and the list of trackers.

A tracker follows the run's folder. On either stack, the metrics are lines of metrics.jsonl.
`tracking` sends each line once, even across restarts.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from t0repro.errors import UserError

Outcome = Literal["finished", "failed", "stopped"]


class TrackerName(enum.StrEnum):
    """The trackers; each has a module here."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run's data for a tracker.

    Attributes:
      folder: what the run writes into; a tracker's name for the run is the folder's name.
      parameters: settings of the run; nested mappings are joined by dots.
      files: patterns, relative to the folder, of the files to send when the run ends.
    """

    folder: Path
    parameters: Mapping[str, Any]
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.resolve().name

    def flat_parameters(self) -> dict[str, Any]:
        """Parameters by dotted names; those that are not set are left out."""
        return dict(_flat("", self.parameters))

    def found_files(self) -> list[Path]:
        """The files there are, each once."""
        found = {path for pattern in self.files for path in self.folder.glob(pattern)}
        return sorted(path for path in found if path.is_file())


class Tracker(Protocol):
    """One run in one tracker.

    Attributes:
      run_id: the tracker's own identifier, with which a restarted run continues.
    """

    run_id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step."""

    def flush(self) -> None:
        """Returns once everything that was logged is stored, locally or at the tracker's server."""

    def send_file(self, path: Path, name: str) -> None:
        """Stores a file under a name that may contain slashes."""

    def close(self, outcome: Outcome) -> None:
        """Ends the run."""


def open_tracker(name: TrackerName, run: TrackedRun, run_id: str | None) -> Tracker:
    """Begins the run in a tracker, or continues the one with this identifier.

    Raises:
      UserError: if the tracker's package is not installed, or its server cannot be reached.
    """
    # Imported on demand, because each module imports its library, which takes time.
    try:
        module = importlib.import_module(f"t0repro.cloud.{name}_tracker")
    except ModuleNotFoundError as error:
        raise UserError(
            f"--tracker {name} needs the package {error.name}.",
            where="--tracker",
            fix=f"Install it: EXTRAS={name} bash scripts/setup.sh",
        ) from error
    opened: Callable[[TrackedRun, str | None], Tracker] = module.open_run
    return opened(run, run_id)


def _flat(prefix: str, values: Mapping[str, Any]):
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        elif value is not None:
            yield prefix + name, value
