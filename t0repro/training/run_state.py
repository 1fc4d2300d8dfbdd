"""`run_state.json` in a run's folder: how far a training run is, how fast, and how it ended.

The file is one JSON object with the fields of `RunState`. It is replaced atomically when training
starts and ends and every few seconds in between, so a reader never sees a partial one. Curves are
in metrics.jsonl beside it (t0repro.training.metrics).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from t0repro.errors import UserError
from t0repro.files import input_path, output_path, write_atomically, writing
from t0repro.leases import is_alive
from t0repro.training.hooks import Hook
from t0repro.training.metrics import StepMetrics

if TYPE_CHECKING:
    from t0repro.training.loop import TrainingLoop

RUN_STATE_FILE = "run_state.json"
State = Literal["running", "finished", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class RunState:
    """The contents of run_state.json.

    Attributes:
      state: "running"; "finished" at the last step; "stopped" before it, by a signal, an action or
        the end of the batches, with the state saved; "failed" by an error.
      reason: why it stopped or failed, in one line; None while it runs and once it has finished.
      first_step: the global step that this start began at.
      step: the latest global step whose loss is known.
      last_step: the global step at which training ends.
      loss: the loss of `step`; None before the first.
      target_tokens: targets with loss trained on since `first_step`.
      examples: examples trained on since `first_step`.
      steps_per_second, target_tokens_per_second: over the latest steps; None before the first.
      seconds_left: until `last_step`, at that speed.
      started, updated: UTC times, ISO 8601.
      host, process: the machine, and the process id on it.
    """

    state: State
    reason: str | None
    first_step: int
    step: int
    last_step: int
    loss: float | None
    target_tokens: int
    examples: int
    steps_per_second: float | None
    target_tokens_per_second: float | None
    seconds_left: float | None
    started: str
    updated: str
    host: str
    process: int


def read_run_state(model_dir: str | os.PathLike[str]) -> RunState | None:
    """What a folder's run_state.json says; None if there is none.

    If the file says "running" but the local process is gone, the run was killed, and its state is
    returned as "failed". For a process on another machine, only `updated` shows whether it lives.

    Raises:
      UserError: if the file is not a run's record.
    """
    path = input_path(model_dir) / RUN_STATE_FILE
    try:
        state = RunState(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"The record of this run cannot be read: {error}.",
            where=str(path),
            fix="Remove it; the next run writes a new one.",
        ) from error
    # A process id means something only on its own machine.
    if state.state == "running" and state.host == socket.gethostname():
        if not is_alive(state.process):
            reason = "its process is gone: it was killed, or the machine went down"
            return dataclasses.replace(state, state="failed", reason=reason)
    return state


class RecordRunState(Hook):
    """Keeps model_dir/run_state.json up to date.

    Args:
      model_dir: the run's folder.
      interval: seconds between updates.
    """

    def __init__(self, model_dir: str | os.PathLike[str], interval: float = 5.0):
        self._path, self._interval = output_path(model_dir) / RUN_STATE_FILE, interval
        # A short window, so that the speed is that of the latest steps, however slow the start was.
        self._recent: deque[StepMetrics] = deque(maxlen=20)
        self._tokens = self._examples = self._first = self._last = 0
        self._started, self._written_at = _now(), 0.0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Writes that training has begun."""
        self._first, self._last = loop.step, last_step
        self._write("running")

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Counts the step; writes if the file is old enough."""
        self._recent.append(metrics)
        self._tokens += metrics.target_tokens
        self._examples += metrics.examples
        # Not at every step: each write waits for the disk.
        if time.monotonic() - self._written_at >= self._interval:
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
            target_tokens=self._tokens,
            examples=self._examples,
            steps_per_second=speed,
            target_tokens_per_second=tokens,
            seconds_left=(self._last - step) / speed if speed else None,
            started=self._started,
            updated=_now(),
            host=socket.gethostname(),
            process=os.getpid(),
        )
        with writing(self._path):
            write_atomically(self._path, json.dumps(dataclasses.asdict(values), indent=1) + "\n")
        self._written_at = time.monotonic()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
