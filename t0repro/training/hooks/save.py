"""Saves checkpoints between steps."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable
from pathlib import Path

from t0repro.config.checkpoints import SaveConfig
from t0repro.partitioning.processes import broadcast_from_first
from t0repro.progress import say
from t0repro.training.checkpoint_retention import metric_by_step, remove_superfluous
from t0repro.training.checkpoints import list_checkpoints, start_checkpoint
from t0repro.training.hooks.run_progress import RunProgress
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.train_state import TrainState

# Seconds from a preemption notice until the machine is gone. Google Cloud's preemptible machines
# get no more; Kubernetes pods get this by default.
NOTICE_SECONDS = 30.0


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
        steps = broadcast_from_first(lambda: list_checkpoints(self._model_dir))
        if self._rules.period and loop.step not in steps:
            self._save(loop)

    def after_step(self, loop: TrainingLoop) -> None:
        """Saves if a checkpoint is due, after writing the metrics of all steps so far."""
        # Raises the error of a save that failed, such as a full disk, now and not at the next save.
        if self._writing is not None and self._writing.done():
            self.wait()
        if self.is_due(loop.step):
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

    def is_due(self, step: int) -> bool:
        """Whether the rules save this step."""
        period = self._rules.period
        due = period and ((step - self._first) % period == 0 or step == self._last)
        return bool(due) or step in self._rules.steps

    def _save(self, loop: TrainingLoop) -> None:
        # Metrics first: a checkpoint on disk then implies the metrics of all its steps.
        loop.flush()
        self.wait()
        self._started_at, self._ended_at = time.monotonic(), None
        self._saved = loop.step
        self._writing = self._start_save(loop.stacked_state)
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

    def _start_save(self, state: TrainState) -> concurrent.futures.Future[None]:
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
