"""What is tracked, and the interface of every tracker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

Outcome = Literal["finished", "failed", "stopped"]


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
        return dict(_flatten("", self.parameters))

    def list_files(self) -> list[Path]:
        """The files that exist, each once."""
        paths = {path for pattern in self.files for path in self.folder.glob(pattern)}
        return sorted(path for path in paths if path.is_file())


def _flatten(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}{name}.", value)
        elif value is not None:
            yield prefix + name, value


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
