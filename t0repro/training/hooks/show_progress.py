"""Shows how training goes, on a terminal or in lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

from t0repro.progress import working
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.metrics import StepMetrics, step_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class ShowProgress(Hook):
    """Shows a live line on a terminal, and elsewhere prints a line every few seconds.

    Until the first step's metrics arrive, it shows that the step is being compiled.

    Each line has the step, the loss per target token, examples and target tokens per second over
    the latest steps, and the time left.

    Args:
      interval: seconds between lines when there is no terminal.
      stream: where to write; defaults to standard error.
    """

    def __init__(self, interval: float = 5.0, stream: TextIO | None = None):
        self._interval = interval
        self._stream = stream or sys.stderr
        self._recent: deque[StepMetrics] = deque(maxlen=20)
        self._bar: Bar | None = None
        self._compiling = contextlib.ExitStack()
        self._first = self._last = 0
        self._shown_at = 0.0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Opens the live line if the stream is a terminal."""
        self._first, self._last = loop.step, last_step
        self._shown_at = time.monotonic()
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
            # Without a total the bar moves to and fro.
            self._bar.add_task("compiling the train step", total=None)

    def before_first_step(self, loop: TrainingLoop) -> None:
        """Says, where there is no bar, that the step is being compiled."""
        if self._bar is None:
            self._compiling.enter_context(working("compiling the train step", self._stream))

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Shows the step: always on a terminal, otherwise if the last line is old enough."""
        self._recent.append(metrics)
        self._compiling.close()
        if self._bar is not None:
            done, total = metrics.step - self._first, self._last - self._first
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total, description=self._text())
        elif time.monotonic() - self._shown_at >= self._interval or metrics.step == self._last:
            self._shown_at = time.monotonic()
            per_step = sum(row.seconds for row in self._recent) / len(self._recent)
            seconds_left = (self._last - metrics.step) * per_step
            print(self._text(seconds_left), file=self._stream, flush=True)

    def end(self, loop: TrainingLoop) -> None:
        """Closes the live line and prints its last state."""
        self._compiling.close()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            if self._recent:
                print(self._text(), file=self._stream, flush=True)

    def _text(self, seconds_left: float | None = None) -> str:
        latest = self._recent[-1]
        # If no time was measured, infinity makes the speed 0 and avoids a division by zero.
        seconds = sum(row.seconds for row in self._recent) or float("inf")
        examples = sum(row.examples for row in self._recent) / seconds
        tokens = sum(row.target_tokens for row in self._recent) / seconds
        per_token = latest.loss_per_target_token
        return step_line(
            latest.step, self._last, per_token, latest.loss, (examples, tokens), seconds_left
        )
