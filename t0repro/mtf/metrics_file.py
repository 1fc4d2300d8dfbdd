"""metrics.jsonl of a Mesh TensorFlow run's model_dir: one JSON object per line.

    {"split": "train", "step": 1, "loss": 10.373483657836914}
    {"split": "validation", "step": 4, "task": "rte_GPT_3_style_score_eval", "accuracy": 52.7}

A line's step is the global step after the update; its loss uses the parameters before the update
and has float32's full precision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t0repro.storage import make_folder, scheme_of, write_atomically
from t0repro.storage.disk import name_in_errors
from t0repro.training.metrics import drop_partial_line


def is_on_this_disk(folder: str) -> bool:
    """Whether this project can lock a folder and write there beside TensorFlow.

    At an address such as gs://, TensorFlow alone writes, through its own client.
    """
    return scheme_of(folder) is None


class MetricsFile:
    """Appends lines to model_dir/metrics.jsonl; a resumed run drops lines that it will repeat."""

    def __init__(self, path: str):
        self._path = Path(path)
        self._appended = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one record as a line; the file is closed again after each."""
        make_folder(self._path.parent)
        if not self._appended:
            # A killed run can leave a partial line, which would corrupt the next one.
            drop_partial_line(self._path)
            self._appended = True
        with name_in_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def drop_training_after(self, step: int) -> None:
        """Removes training lines after a step: a run that resumes there writes them again."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        # Keep evaluations' lines: a resumed run does not repeat those evaluations.
        kept = [line for line in lines if not _is_training_after(line, step)]
        if len(kept) < len(lines):
            write_atomically(self._path, "".join(f"{line}\n" for line in kept))


def _is_training_after(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:  # the line that an interrupted run was writing
        return True
    return record.get("split") == "train" and record.get("step", 0) > step
