"""Training and evaluation metrics, and what writes them to model_dir.

TensorBoard's event files are written by t0repro.event_files.event_writer, which needs TensorBoard.
The JAX core does not depend on it: callers that have it pass the writer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from t0repro.storage import make_folder, write_atomically
from t0repro.storage.disk import append_or_undo, name_in_errors

METRICS_FILE = "metrics.jsonl"
# The loss in one unit, whatever a model divides its `loss` by; see StepMetrics.
LOSS_PER_TOKEN = "loss_per_target_token"
# Follows a loss whose unit is not that one.
OWN_UNIT = " in its own unit"
OpenWriter = Callable[[str], "Writer"]


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step.

    Attributes:
      step: the global step after the update.
      loss: loss with the parameters before the update; a float32, unrounded.
      learning_rate: learning rate of the update.
      target_tokens: number of targets in the batch that carry loss.
      examples: number of examples in the batch.
      seconds: wall-clock time from the end of the previous step on the device to the end of this
        one, without saves and evaluations between them.
      input_tokens: number of inputs in the batch that are not padding.
      input_wait_seconds: how long the device sat idle waiting for the batch.
      others: the rest by T5X's names, such as accuracy and timing/mfu.
      loss_per_target_token: the summed loss over `target_tokens`, whatever divides `loss`; None
        where a model does not say what divides it.
    """

    step: int
    loss: float
    learning_rate: float
    target_tokens: int
    examples: int
    seconds: float
    input_tokens: int = 0
    input_wait_seconds: float = 0.0
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)
    loss_per_target_token: float | None = None


def step_line(
    step: int,
    last_step: int | None,
    loss_per_target_token: float | None,
    loss: float,
    speed: tuple[float, float] | None = None,
    seconds_left: float | None = None,
) -> str:
    """A step in one line, the same on both stacks and in both dialects.

    Args:
      step: the global step.
      last_step: where training ends, if known.
      loss_per_target_token: what the line shows; without it, `loss` as it is.
      loss: the loss as its dialect defines it.
      speed: examples and target tokens per second, if measured.
      seconds_left: until the last step, if known.
    """
    of = f" of {last_step:,}" if last_step else ""
    shown = loss if loss_per_target_token is None else loss_per_target_token
    unit = OWN_UNIT if loss_per_target_token is None else " per target token"
    line = f"step {step:,}{of}, loss {shown:.4f}{unit}"
    if speed is not None:
        line += f", {speed[0]:,.1f} examples/s, {speed[1]:,.0f} target tokens/s"
    if seconds_left is not None:
        seconds = round(seconds_left)
        line += f", {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
    return line


class MetricLog:
    """Writes model_dir/metrics.jsonl, and hands everything to writers with clu's methods.

    A line of metrics.jsonl is {"split": "train", "step": 1, "loss": ..., ...} for every training
    step, and {"split": <name>, "step": ..., ...} for every evaluation. Writers get the tags
    `<split>/<metric>`.

    Args:
      model_dir: the directory; created if it does not exist.
      start_step: the step that training starts from. Training lines of later steps, left over from
        an interrupted run, are dropped. None keeps every line, and writes no evaluation's line
        again.
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
        step, others = values.pop("step"), values.pop("others")
        if metrics.loss_per_target_token is None:
            del values[LOSS_PER_TOKEN]
        self.write("train", step, {**values, **others})

    def write(
        self, split: str, step: int, values: Mapping[str, float], task: str | None = None
    ) -> None:
        """Writes a line, and an event with one tag per metric.

        Tags are `<split>/<metric>` or, if a task is given, Mesh TensorFlow's
        `eval/<task>/<metric>`.
        """
        named = {"split": split, "step": step} | ({} if task is None else {"task": task})
        self._lines.write({**named, **values})
        tag = split if task is None else f"eval/{task}"
        for writer in self._writers:
            writer.write_scalars(step, {f"{tag}/{name}": x for name, x in values.items()})

    def flush(self) -> None:
        """Syncs what was written to disk and makes it visible to readers."""
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


def kind_of(value: Any) -> str:
    """Describes a value that is not a number: "Text", or "array [3, 2]"."""
    if isinstance(value, np.ndarray):
        return f"array {list(value.shape)}"
    return type(value).__name__


def write_value(writer: Any, step: int, name: str, value: Any) -> None:
    """Writes an array or a value of clu's that is not a number, if the writer can."""
    kind = "Histogram" if isinstance(value, np.ndarray) else type(value).__name__
    method = {
        "Text": "write_texts",
        "Image": "write_images",
        "Audio": "write_audios",
        "Histogram": "write_histograms",
        "Summary": "write_summaries",
    }.get(kind, "")
    options: dict[str, Any] = {}
    if kind == "Audio":
        options = {"sample_rate": value.sample_rate}
    if kind == "Summary":
        options = {"metadata": value.metadata}
    # A writer need not have all of clu's methods; the line lists what it leaves out.
    if hasattr(writer, method):
        getattr(writer, method)(step, {name: getattr(value, "value", value)}, **options)


def open_below(folder: str, open_writer: OpenWriter | None) -> OpenWriter | None:
    """Opens the writer of a split in a folder of its own below another."""
    return None if open_writer is None else lambda split: open_writer(f"{folder}/{split}")


class SplitMetrics:
    """Writes model_dir/metrics.jsonl, and each split's values to a writer of its own.

    Args:
      model_dir: the directory; created if it does not exist.
      start_step: training's lines of later steps, left over from an interrupted run, are dropped;
        None keeps every line.
      open_writer: opens a split's writer, for instance TensorBoard's events in model_dir/<split>;
        None writes lines alone.
      evaluated: see JsonLines.
      loss_per_target_token: computes it from a summary, for its line; T5X has no such tag.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        start_step: int | None,
        open_writer: OpenWriter | None = None,
        evaluated: int | None = None,
        loss_per_target_token: Callable[[Mapping[str, Any]], float | None] | None = None,
    ):
        self.folder = os.fspath(model_dir)
        self._lines = JsonLines(Path(model_dir) / METRICS_FILE, start_step, evaluated)
        self._open_writer, self._writers = open_writer, dict[str, Writer]()
        self._loss_per_target_token = loss_per_target_token or (lambda summary: None)
        self._lock = threading.Lock()  # a trainer's background threads write too

    def writer_of(self, split: str) -> Writer | None:
        """The writer of a split, opened if it is the first time; None if there are only lines."""
        if self._open_writer is not None and split not in self._writers:
            self._writers[split] = self._open_writer(split)
        return self._writers.get(split)

    def write(
        self, split: str, step: int, values: Mapping[str, Any], *, events: bool = True
    ) -> None:
        """Writes a line and, with `events`, the values by their own names to the split's writer.

        Values that are not single numbers go to the writer alone: arrays, which become histograms,
        and clu's texts, images and so on. The line lists their names and kinds under `left_out`.
        """
        numbers = {name: x for name, x in values.items() if isinstance(x, int | float)}
        others = {name: x for name, x in values.items() if name not in numbers}
        left_out = {name: kind_of(x) for name, x in others.items()}
        line = {"split": split, "step": step, **numbers}
        if (per_token := self._loss_per_target_token(numbers)) is not None:
            line[LOSS_PER_TOKEN] = per_token
        with self._lock:
            self._lines.write(line | ({"left_out": left_out} if others else {}))
            writer = self.writer_of(split) if events else None
            if writer is not None:
                writer.write_scalars(step, numbers)
                for name, value in others.items():
                    write_value(writer, step, name, value)

    def write_events(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Writes values to the split's writer alone, if there is one."""
        with self._lock:
            writer = self.writer_of(split)
            if writer is not None:
                writer.write_scalars(step, values)

    def flush(self) -> None:
        """Syncs what was written to disk and makes it visible to readers."""
        self._lines.sync()
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flushes and closes every file."""
        self._lines.close()
        for writer in self._writers.values():
            writer.close()


_OF_TRAINING = '{"split": "train"'


class JsonLines:
    """Appends JSON objects to a file, one whole line per write.

    Args:
      path: the file.
      start_step: training lines of later steps are dropped, since a run that was interrupted after
        its last checkpoint repeats those steps. None keeps every line, and writes no evaluation's
        line again: one that was killed starts over.
      evaluated: the step whose evaluation was the last to be finished, if the run evaluates by a
        plan: lines of evaluations that will be done again are dropped too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        start_step: int | None = None,
        evaluated: int | None = None,
    ):
        path = Path(path)
        make_folder(path.parent)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        self._evaluations: set[str] = set()
        if start_step is None:
            self._evaluations = {line for line in lines if not line.startswith(_OF_TRAINING)}
        else:
            kept = [line for line in lines if _is_until(line, start_step, evaluated)]
            if kept != lines:
                # Replace the file rather than truncate it: readers that follow it then notice.
                write_atomically(path, "".join(kept))
        drop_partial_line(path)
        self._path = path
        # Unbuffered: what a full disk refused must not be written later, when the file is closed.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close())

    def write(self, row: Mapping[str, object]) -> None:
        """Writes one line.

        Raises:
          UserError: if the disk is full; no part of the line is left in the file.
        """
        line = json.dumps(row) + "\n"
        if line not in self._evaluations:
            append_or_undo(self._file, line.encode(), self._path)

    def sync(self) -> None:
        """Waits until every line is on disk."""
        with name_in_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Syncs and closes the file."""
        with self._file:
            self.sync()


def sum_trained(metrics: Path) -> dict[str, int]:
    """The target tokens and examples of a metrics.jsonl with a line for each training step."""
    lines = metrics.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.startswith(_OF_TRAINING)]
    # Lines of the Mesh TensorFlow stack have neither.
    return {name: sum(row.get(name, 0) for row in rows) for name in ("target_tokens", "examples")}


def drop_partial_line(path: Path) -> None:
    """Cuts off the unfinished last line of a killed run, so that the next one does not join it."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _is_until(line: str, step: int, evaluated: int | None) -> bool:
    """Whether a line is complete and is not of a step or evaluation that will be done again."""
    try:
        row = json.loads(line)
        last = step
        if row["split"].startswith(("training_eval/", "inference_eval/")):
            # The evaluation of a step follows its checkpoint, so it may be missing or half done.
            last = step if evaluated is None or evaluated >= step else step - 1
        elif row["split"] != "train":
            # The evaluation modes wrote these; training does not do them again.
            return line.endswith("\n")
        return line.endswith("\n") and row["step"] <= last
    except (ValueError, KeyError, TypeError):
        return False
