"""What happens between training steps: saving, stopping on a signal, the progress line."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jax.experimental import multihost_utils

from t0repro.config.training_plan import SaveConfig
from t0repro.partitioning.processes import SharedSignal, from_first, is_alone
from t0repro.progress import say, working
from t0repro.training.checkpoints import (
    list_checkpoints,
    metric_by_step,
    remove_superfluous,
    start_checkpoint,
)
from t0repro.training.metrics import StepMetrics, step_line
from t0repro.training.train_state import TrainState

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from t0repro.training.loop import TrainingLoop
    from t0repro.training.planned import RunProgress
    from t0repro.training.trainer import NumpyBatch


# Seconds from a preemption notice until the machine is gone. Google Cloud's preemptible machines
# get no more; Kubernetes pods get this by default.
NOTICE_SECONDS = 30.0


class Hook:
    """Something that a TrainingLoop does between steps; methods do nothing unless overridden."""

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Called when training starts, with the global step at which it will end."""

    def before_first_step(self, loop: TrainingLoop) -> None:
        """Called when the first batch has been read, before its update is compiled."""

    def after_step(self, loop: TrainingLoop) -> None:
        """Called after each update, while the device may still be computing it."""

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Called with each step's metrics once they have been read, one step late."""

    def on_bad_update(self, loop: TrainingLoop, batch: NumpyBatch, metrics: StepMetrics) -> None:
        """Called when an update was held back because its loss or a gradient is NaN or Inf.

        The state is the one before the update.
        """

    def wait(self) -> None:
        """Waits for the hook's background work and raises its error."""

    def finish(self, loop: TrainingLoop) -> None:
        """Called after the last step unless an exception ended training: completes pending work."""

    def end(self, loop: TrainingLoop) -> None:
        """Called when training has ended, even by an exception: undoes what `start` set up."""


class SaveCheckpoints(Hook):
    """Saves the state as often as the rules say, and after the last step.

    A step waits only until the state is copied to the host; a thread writes the copy, one at a
    time. An error of that thread, such as a full disk, ends training: it is raised after the next
    step, before the next save or at the end, whichever comes first.

    Args:
      model_dir: where checkpoint_<step> directories are written.
      save: when to save, in which dtype, and what to keep. (Pinned checkpoints, which have a file
        `PINNED`, are kept whatever this says.)
      save_data: writes the position in the data into a folder of the checkpoint.
      progress: gives the step at which the run first began, and notes for the checkpoint; None if
        periods do not count from there.
      note: writes a further file into a checkpoint's folder.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        save: SaveConfig,
        save_data: Callable[[Path], None] | None = None,
        *,
        progress: RunProgress | None = None,
        note: Callable[[Path], None] | None = None,
    ):
        self._model_dir, self._rules, self._note = model_dir, save, note
        self._progress = progress if save.from_first_step else None
        self._save_data = save_data
        self._is_slow = False
        self._first = self._saved = self._last = 0
        self._writing: concurrent.futures.Future[None] | None = None
        self._started_at = 0.0
        self._ended_at: float | None = None

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Saves the initial state of a new run, if the folder has no checkpoint of it yet."""
        self._first = self._saved = loop.step
        self._last, self._loop = last_step, loop
        if self._progress is None:
            return
        self._first = self._progress.first_step
        steps = from_first(lambda: list_checkpoints(self._model_dir))
        if self._rules.period and loop.step not in steps:
            self._save(loop)

    def after_step(self, loop: TrainingLoop) -> None:
        """Saves if a checkpoint is due, after writing the metrics of all steps so far."""
        # Raises the error of a save that failed, such as a full disk, now and not at the next save.
        if self._writing is not None and self._writing.done():
            self.wait()
        if self._is_due(loop.step):
            self._save(loop)

    def wait(self) -> None:
        """Waits until the checkpoint being written is complete."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()
            seconds = (self._ended_at or time.monotonic()) - self._started_at
            manager = self._loop.trainer.train_metrics_manager
            manager.write_event("timing/checkpoint_seconds", seconds, self._saved)

    def finish(self, loop: TrainingLoop) -> None:
        """Saves if training ended before its last step, and waits until that is done."""
        if loop.step > self._saved:
            self._save(loop)
        self.wait()

    def end(self, loop: TrainingLoop) -> None:
        """Waits after an exception too, so that no save continues while the next run starts."""
        self.wait()

    def _is_due(self, step: int) -> bool:
        period = self._rules.period
        due = period and ((step - self._first) % period == 0 or step == self._last)
        return bool(due) or step in self._rules.steps

    def _save(self, loop: TrainingLoop) -> None:
        # Metrics first: a checkpoint on disk then implies the metrics of all its steps.
        loop.flush()
        self.wait()
        self._started_at, self._ended_at = time.monotonic(), None
        self._saved = loop.step
        self._writing = self._started(loop.held_state)
        self._writing.add_done_callback(lambda _: self._note_end())

    def _note_end(self) -> None:
        """Warns once if a save takes longer than a preempted machine has left."""
        self._ended_at = time.monotonic()
        seconds = self._ended_at - self._started_at
        if seconds > NOTICE_SECONDS and not self._is_slow:
            self._is_slow = True
            say(
                f"warning: a save takes {seconds:.0f} s; a machine that is preempted"
                f" {NOTICE_SECONDS:.0f} s after the notice would lose the steps since the"
                " previous checkpoint"
            )

    def _started(self, state: TrainState) -> concurrent.futures.Future[None]:
        model_dir, rules = self._model_dir, self._rules
        # Read the metrics now: an evaluation may add to them while the checkpoint is written.
        values = metric_by_step(model_dir, rules.best.metric) if rules.best else {}
        return start_checkpoint(
            model_dir,
            state,
            save_data=self._save_data,
            save_notes=self._save_notes,
            dtype=rules.dtype,
            then=lambda: remove_superfluous(model_dir, rules, values),
        )

    def _save_notes(self, folder: Path) -> None:
        if self._progress is not None:
            self._progress.save(folder)
        if self._note is not None:
            self._note(folder)


class StoppedBySignal(SystemExit):
    """A signal ended training early, after a save if the run saves checkpoints.

    The exit code is 130 for Ctrl-C (SIGINT), and PREEMPTED for SIGTERM and for a notice that the
    machine is about to be preempted: nothing is wrong, and the same command continues. Where
    nothing was saved it would start over, and the code is 143 as for any process that SIGTERM ends.
    """

    def __init__(self, number: int, saved: bool = True):
        shell = number == signal.SIGINT or not saved
        super().__init__(128 + number if shell else PREEMPTED)


# sysexits.h's EX_TEMPFAIL, "try again later". A shell reports 143 for a process that SIGTERM ended
# at once, without a save.
PREEMPTED = 75


class StopOnSignal(Hook):
    """Ends training after the step in which SIGTERM or SIGINT arrives, so that it is saved.

    A second signal has its usual effect. With several processes, all end after the same step. So
    they do when jax itself reports that one of their machines is about to be preempted.

    Args:
      saves: whether the run saves checkpoints at all.

    Attributes:
      received: the number of the signal that ended training, or None.
    """

    def __init__(self, saves: bool = True):
        self._saves = saves
        self.received: int | None = None
        self._noted: int | None = None
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}
        self._shared: SharedSignal | None = None

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Installs the signal handlers; Python allows that only in the main thread."""
        del loop, last_step
        self._shared = None if is_alone() else SharedSignal()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # Keep the caller's own handlers, to restore them later.
                self._before[number] = signal.signal(number, self._note)

    def after_step(self, loop: TrainingLoop) -> None:
        """Asks the loop to stop if a signal has come, to any of the processes."""
        if self._shared is not None:
            # Every process must call this at every step; it is true at the one step they agree on.
            if _jax_agreed_to_end(loop.step) and self._noted is None:
                self._noted, self._noted_at = signal.SIGTERM, time.monotonic()
                say("stopping: jax reported that a machine is about to be preempted")
            self.received = self._shared.after_step(self._noted or 0) or None
        else:
            self.received = self._noted
        if self.received is not None:
            loop.stop(f"a signal, {signal.Signals(self.received).name}")

    def end(self, loop: TrainingLoop) -> None:
        """Restores the previous signal handlers."""
        self._restore()
        if self._noted is not None and self._saves and not loop.failed:
            seconds = time.monotonic() - self._noted_at
            late = f", more than the {NOTICE_SECONDS:.0f} s that a preempted machine gets"
            say(f"saved {seconds:.1f} s after the signal{late if seconds > NOTICE_SECONDS else ''}")

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self._noted, self._noted_at = number, time.monotonic()
        # Restore now, so that a second signal interrupts the step.
        self._restore()
        again = " (Ctrl-C again stops at once)" if number == signal.SIGINT else ""
        saved = " and saved" if self._saves else ""
        # A signal may come in the middle of a line, and Python writes no line within another.
        with contextlib.suppress(RuntimeError):
            say(f"stopping: the current step is finished{saved} first{again}")

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


def _jax_agreed_to_end(step: int) -> bool:
    """Whether jax's processes agreed to end at this step; False if jax's service for it is off."""
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # jax's service for it is switched off
        return False


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
            print(self._text(self._seconds_left()), file=self._stream, flush=True)

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

    def _seconds_left(self) -> float:
        per_step = sum(row.seconds for row in self._recent) / len(self._recent)
        return (self._last - self._recent[-1].step) * per_step
