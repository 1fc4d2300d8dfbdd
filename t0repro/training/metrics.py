"""Training and evaluation metrics, and the manager that writes them to model_dir."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from t0repro.training.writers import EventFile, JsonLines, Writer

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
    """Writes model_dir/metrics.jsonl and TensorBoard events, and hands all to further writers.

    A line of metrics.jsonl is {"split": "train", "step": 1, "loss": ..., ...} for every training
    step, and {"split": <name>, "step": ..., ...} for every evaluation. Event files have the tags
    `<split>/<metric>`.

    Args:
      model_dir: the directory, created if it is not there.
      start_step: the step that training starts from; training lines of later steps are those of
        an interrupted run and are dropped. None keeps every line.
      writers: further ones, for instance of clu.metric_writers.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        start_step: int | None = None,
        writers: Sequence[Writer] = (),
    ):
        self._lines = JsonLines(Path(model_dir) / METRICS_FILE, start_step)
        self._writers = [EventFile(model_dir), *writers]

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
        """Makes what was written visible to readers."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Flushes and closes every file."""
        self._lines.close()
        for writer in self._writers:
            writer.close()
