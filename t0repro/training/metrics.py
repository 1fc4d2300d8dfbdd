"""Training and evaluation metrics, and the manager that writes them to model_dir.

TensorBoard's event files are written by clu, which imports TensorFlow. The JAX core does without
both: callers that have them pass `t0repro.event_files.event_writer(model_dir)` to the manager.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from t0repro.files import write_atomically
from t0repro.training.writing import writing

METRICS_FILE = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one training step gave.

    Attributes:
      step: the global step after the update.
      loss: of the parameters before the update; a float32, unrounded.
      learning_rate: of the update.
      target_tokens: targets with loss in the batch.
      examples: examples in the batch.
      seconds: from the end of the step before to the end of this one.
    """

    step: int
    loss: float
    learning_rate: float
    target_tokens: int
    examples: int
    seconds: float


class MetricsManager:
    """Writes model_dir/metrics.jsonl, and hands everything to writers such as clu's.

    A line of metrics.jsonl is {"split": "train", "step": 1, "loss": ..., ...} for every training
    step, and {"split": <name>, "step": ..., ...} for every evaluation. Writers get the tags
    `<split>/<metric>`.

    Args:
      model_dir: The directory; created if it does not exist.
      start_step: the step that training starts from. Training lines of later steps are left over
        from an interrupted run and are dropped. None keeps every line.
      writers: clu.metric_writers, or objects with the same methods.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        start_step: int | None = None,
        writers: Sequence[Writer] = (),
    ):
        self._lines = JsonLines(Path(model_dir) / METRICS_FILE, start_step)
        self._writers = tuple(writers)

    def write_step(self, metrics: StepMetrics) -> None:
        """Writes one training step's metrics."""
        values = dataclasses.asdict(metrics)
        self.write("train", values.pop("step"), values)

    def write(
        self, split: str, step: int, values: Mapping[str, float], task: str | None = None
    ) -> None:
        """Writes a line, and an event with the tags `<split>/<metric>`, or Mesh TensorFlow's
        `eval/<task>/<metric>` where the values are a task's.
        """
        named = {"split": split, "step": step} | ({} if task is None else {"task": task})
        self._lines.write({**named, **values})
        tag = split if task is None else f"eval/{task}"
        for writer in self._writers:
            writer.write_scalars(step, {f"{tag}/{name}": x for name, x in values.items()})

    def flush(self) -> None:
        """Puts what was written on the disk, and makes it visible to readers."""
        self._lines.sync()
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Flushes and closes every file."""
        self._lines.close()
        for writer in self._writers:
            writer.close()


class Writer(Protocol):
    """The part of clu.metric_writers.MetricWriter that is used here."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the values of one step."""

    def flush(self) -> None:
        """Makes what was written visible to readers."""

    def close(self) -> None:
        """Flushes and releases the file."""


class JsonLines:
    """Appends one JSON object a line, each whole on disk as soon as it is written.

    Args:
      path: the file.
      start_step: training lines of later steps are dropped: a run that was interrupted after its
        last checkpoint does those steps again. None keeps every line.
    """

    def __init__(self, path: str | os.PathLike[str], start_step: int | None = None):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and start_step is not None:
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if _is_until(line, start_step)]
            if kept != lines:
                write_atomically(path, "".join(kept))
        drop_half_line(path)
        self._path = path
        # Without a buffer: what a full disk refused must not be written when the file is closed.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close())

    def write(self, row: Mapping[str, object]) -> None:
        """Writes one line.

        Raises:
          UserError: if the disk is full; no part of the line is left then.
        """
        line = (json.dumps(row) + "\n").encode()
        with writing(self._path):
            size = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) != len(line):
                self._file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path))

    def sync(self) -> None:
        """Waits until every line is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file, with every line on the disk."""
        self.sync()
        self._file.close()


def drop_half_line(path: Path) -> None:
    """Cuts off a last line that a killed run did not finish: the next line would be glued to it."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _is_until(line: str, step: int) -> bool:
    """Whether a line is whole and belongs to no later step than this."""
    try:
        row = json.loads(line)
        return line.endswith("\n") and (row["split"] != "train" or row["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
