"""What happens between training steps: saving, stopping on a signal, the progress line."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from t0repro.config.training_plan import SaveConfig
from t0repro.partitioning.processes import SharedSignal, is_alone
from t0repro.training.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    remove_checkpoint,
    save_checkpoint,
)
from t0repro.training.keeping import PINNED, metric_by_step, superfluous
from t0repro.training.metrics import StepMetrics

if TYPE_CHECKING:
    from rich.progress import Progress

    from t0repro.training.trainer import Trainer


class Action:
    """Something that a Trainer does between steps; methods do nothing unless overridden."""

    def start(self, trainer: Trainer, last_step: int) -> None:
        """Called when training starts, with the global step at which it will end."""

    def after_step(self, trainer: Trainer) -> None:
        """Called after each update, while the device may still be computing it."""

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Called with each step's metrics once they have been read, one step late."""

    def on_values(self, step: int, values: Mapping[str, Any], seconds: float) -> None:
        """Called before `on_metrics` with all that the step computed, copied to the host."""

    def end(self, trainer: Trainer) -> None:
        """Called when training has ended, also if by an exception."""


class SaveCheckpoints(Action):
    """Saves the state every `every` steps from the start, and after the last step.

    Args:
      model_dir: where checkpoint_<step> directories are written.
      every: steps between checkpoints.
      keep: how many of the latest checkpoints to keep; None or 0 keeps all.
      save_data: writes the position in the data into a folder of the checkpoint.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        every: int,
        keep: int | None = None,
        save_data: Callable[[Path], None] | None = None,
    ):
        self._model_dir, self._every, self._keep = model_dir, every, keep
        self._save_data = save_data
        self._saved = self._last = 0

    def start(self, trainer: Trainer, last_step: int) -> None:
        """Counts from the step that training starts at, as Mesh TensorFlow does."""
        self._saved, self._last = trainer.step, last_step

    def after_step(self, trainer: Trainer) -> None:
        """Saves if a checkpoint is due, after writing the metrics of all steps so far."""
        if trainer.step - self._saved >= self._every or trainer.step == self._last:
            self._save(trainer)

    def end(self, trainer: Trainer) -> None:
        """Saves if training ended before its last step, unless an exception ended it."""
        if trainer.step > self._saved and not trainer.failed:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        # Metrics first: a checkpoint on disk then implies the metrics of all its steps.
        trainer.flush()
        save_checkpoint(self._model_dir, trainer.train_state, self._keep, self._save_data)
        self._saved = trainer.step


class SaveByPlan(SaveCheckpoints):
    """Saves as T5X does: before the first step, each period from there, and at chosen steps.

    Args:
      model_dir: where checkpoint_<step> directories are written.
      plan: when to save, in which type, and what to keep.
      save_data: writes the position in the data into a folder of the checkpoint.
      only_finite: whether a state is not saved if its latest loss was not finite.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        plan: SaveConfig,
        save_data: Callable[[Path], None] | None = None,
        *,
        only_finite: bool = False,
    ):
        super().__init__(model_dir, plan.period or 0, save_data=save_data)
        self._plan, self._first = plan, 0
        self._only_finite, self._loss = only_finite, 0.0

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Notes the latest loss."""
        self._loss = metrics.loss

    def start(self, trainer: Trainer, last_step: int) -> None:
        """Saves the state that training starts from, if it has no checkpoint here."""
        super().start(trainer, last_step)
        self._first = trainer.step
        if self._plan.period and trainer.step not in list_checkpoints(self._model_dir):
            self._save(trainer)

    def after_step(self, trainer: Trainer) -> None:
        """Saves if a checkpoint is due."""
        step, period = trainer.step, self._plan.period
        due = period and ((step - self._first) % period == 0 or step == self._last)
        if due or step in self._plan.steps:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.flush()
        if self._only_finite and not math.isfinite(self._loss):
            return
        model_dir, plan = self._model_dir, self._plan
        save_checkpoint(model_dir, trainer.train_state, save_data=self._save_data, dtype=plan.dtype)
        self._saved = trainer.step
        values = metric_by_step(model_dir, plan.best.metric) if plan.best else {}
        # A pinned checkpoint is neither removed nor counted among those that are kept.
        steps = [
            step
            for step in list_checkpoints(model_dir)
            if not (checkpoint_path(model_dir, step) / PINNED).exists()
        ]
        for step in superfluous(steps, plan, values):
            remove_checkpoint(checkpoint_path(model_dir, step))


class StopOnSignal(Action):
    """Ends training after the step in which SIGTERM or SIGINT arrives, so that it is saved.

    A second signal has its usual effect, as without this action.

    Args:
      say: receives a line when the signal arrives.

    Of several processes, all end after the same step.

    Attributes:
      received: the number of the signal that ended training, or None.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self.received: int | None = None
        self._noted: int | None = None
        self._shared: SharedSignal | None = None
        self._before: dict[int, Any] = {}

    def start(self, trainer: Trainer, last_step: int) -> None:
        """Installs the signal handlers; Python allows that only in the main thread."""
        del trainer, last_step
        self._shared = None if is_alone() else SharedSignal()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)

    def after_step(self, trainer: Trainer) -> None:
        """Asks the trainer to stop if a signal has come, to any of the processes."""
        if self._shared is not None:
            self.received = self._shared.after_step(self._noted or 0) or None
        else:
            self.received = self._noted
        if self.received is not None:
            trainer.stop(f"a signal, {signal.Signals(self.received).name}")

    def end(self, trainer: Trainer) -> None:
        """Restores the previous signal handlers."""
        del trainer
        self._restore()

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self._noted = number
        # Right away, so that a second signal interrupts the step.
        self._restore()
        again = " (Ctrl-C again stops at once)" if number == signal.SIGINT else ""
        self._say(f"stopping: the current step is finished and saved first{again}")

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


class ShowProgress(Action):
    """Shows a live line on a terminal, and elsewhere prints a line every few seconds.

    Each line has the step, the loss, examples and target tokens per second over the latest steps,
    and the time left.

    Args:
      interval: seconds between lines when there is no terminal.
      stream: where to write; defaults to standard error.
    """

    def __init__(self, interval: float = 5.0, stream: TextIO | None = None):
        self._interval = interval
        self._stream = stream or sys.stderr
        self._recent: deque[StepMetrics] = deque(maxlen=20)
        self._bar: Progress | None = None
        self._first = self._last = 0
        self._shown_at = 0.0

    def start(self, trainer: Trainer, last_step: int) -> None:
        """Opens the live line if the stream is a terminal."""
        self._first, self._last = trainer.step, last_step
        self._shown_at = time.monotonic()
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
            # Until the first loss arrives, the step is being compiled.
            self._bar.add_task("compiling", total=last_step - self._first)

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Shows the step: always on a terminal, otherwise if the last line is old enough."""
        self._recent.append(metrics)
        if self._bar is not None:
            done = metrics.step - self._first
            self._bar.update(self._bar.task_ids[0], completed=done, description=self._text())
        elif time.monotonic() - self._shown_at >= self._interval or metrics.step == self._last:
            self._shown_at = time.monotonic()
            print(self._text() + ", " + self._time_left() + " left", file=self._stream, flush=True)

    def end(self, trainer: Trainer) -> None:
        """Closes the live line and prints its last state."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            if self._recent:
                print(self._text(), file=self._stream, flush=True)

    def _text(self) -> str:
        latest = self._recent[-1]
        # Infinity, so that a speed is 0 rather than a division by zero.
        seconds = sum(row.seconds for row in self._recent) or float("inf")
        examples = sum(row.examples for row in self._recent) / seconds
        tokens = sum(row.target_tokens for row in self._recent) / seconds
        return (
            f"step {latest.step:,} of {self._last:,}, loss {latest.loss:.4f},"
            f" {examples:,.1f} examples/s, {tokens:,.0f} target tokens/s"
        )

    def _time_left(self) -> str:
        per_step = sum(row.seconds for row in self._recent) / len(self._recent)
        seconds = round((self._last - self._recent[-1].step) * per_step)
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}:{minutes:02}:{seconds % 60:02}"
