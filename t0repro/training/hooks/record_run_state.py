"""Keeps a run's run_state.json up to date."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import time
from collections import deque

from t0repro.storage import explain_errors, output_path, write_atomically
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.metrics import StepMetrics
from t0repro.training.run_state import RUN_STATE_FILE, RunState, State

_SECONDS_BETWEEN_UPDATES = 5.0


class RecordRunState(Hook):
    """Keeps model_dir/run_state.json up to date.

    Args:
      model_dir: the run's folder.
      trained: the target tokens and examples of the steps before this start; the steps are added.
    """

    def __init__(self, model_dir: str | os.PathLike[str], trained: dict[str, int]):
        self._path = output_path(model_dir) / RUN_STATE_FILE
        # A short window, so that the speed is that of the latest steps, however slow the start was.
        self._recent: deque[StepMetrics] = deque(maxlen=20)
        self._trained, self._first, self._last = trained, 0, 0
        self._started, self._written_at = _now(), 0.0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Writes that training has begun."""
        self._first, self._last = loop.step, last_step
        self._write("running")

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Counts the step; writes if the file is old enough."""
        self._recent.append(metrics)
        self._trained["target_tokens"] += metrics.target_tokens
        self._trained["examples"] += metrics.examples
        # Not at every step: each write waits for the disk.
        if time.monotonic() - self._written_at >= _SECONDS_BETWEEN_UPDATES:
            self._write("running")

    def end(self, loop: TrainingLoop) -> None:
        """Writes how training ended."""
        error = loop.error
        if error is not None:
            lines = str(error).strip().splitlines()
            self._write(
                "failed", f"{type(error).__name__}: {lines[0] if lines else ''}".strip(": ")
            )
        # Check this before the stop reason: a signal during the last step leaves nothing undone.
        elif loop.step >= self._last:
            self._write("finished")
        else:
            self._write("stopped", loop.stop_reason or "the batches ended")

    def _write(self, state: State, reason: str | None = None) -> None:
        latest = self._recent[-1] if self._recent else None
        step = latest.step if latest else self._first
        # If no time was measured, infinity makes the speed 0 and avoids a division by zero.
        seconds = sum(row.seconds for row in self._recent) or float("inf")
        speed = len(self._recent) / seconds if latest else None
        tokens = sum(row.target_tokens for row in self._recent) / seconds if latest else None
        values = RunState(
            state=state,
            reason=reason,
            first_step=self._first,
            step=step,
            last_step=self._last,
            loss=latest.loss if latest else None,
            **self._trained,
            steps_per_second=speed,
            target_tokens_per_second=tokens,
            seconds_left=(self._last - step) / speed if speed else None,
            started=self._started,
            updated=_now(),
            host=socket.gethostname(),
            process=os.getpid(),
            loss_per_target_token=latest.loss_per_target_token if latest else None,
        )
        with explain_errors(self._path):
            write_atomically(self._path, json.dumps(dataclasses.asdict(values), indent=1) + "\n")
        self._written_at = time.monotonic()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
