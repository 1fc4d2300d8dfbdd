"""TensorBoard: every run writes its metrics there; this adds the settings and texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from t0repro.cloud.trackers.tracker import Outcome, TrackedRun, Tracker
from t0repro.event_files import event_writer

# Bytes of the largest file that is added as a text.
_LONGEST_TEXT = 100_000
_TEXTS = {".gin", ".json", ".md", ".txt"}


def open_run(run: TrackedRun, run_id: str | None) -> Tracker:
    """Writes the parameters; a resumed run continues in further event files."""
    return _TensorBoardRun(run, continued=run_id is not None)


class _TensorBoardRun:
    """A Tracker that writes texts into the run's folder, beside the metrics there."""

    def __init__(self, run: TrackedRun, *, continued: bool):
        self._writer, self.run_id = event_writer(run.folder), run.name
        if not continued:
            values = json.dumps(run.flat_parameters(), indent=2, default=str)
            self._write("parameters", values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing, because the run itself writes its metrics into event files."""

    def flush(self) -> None:
        """Flushes the event file, so that readers see what was written."""
        self._writer.flush()

    def send_file(self, path: Path, name: str) -> None:
        """Adds a text file as a text; other files are only in the run's folder."""
        if path.suffix in _TEXTS and path.stat().st_size <= _LONGEST_TEXT:
            self._write(name, path.read_text(encoding="utf-8"))

    def close(self, outcome: Outcome) -> None:
        """Writes the run's state and closes the event file."""
        self._write("outcome", outcome)
        self._writer.close()

    def _write(self, name: str, text: str) -> None:
        # Indented by four, which Markdown shows verbatim.
        self._writer.write_texts(0, {name: "\n".join("    " + line for line in text.split("\n"))})
