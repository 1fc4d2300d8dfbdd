"""`run_state.json` in a run's folder: how far a training run is, how fast, and how it ended.

The file is one JSON object with the fields of `RunState`. It is replaced atomically when training
starts and ends and every few seconds in between, so a reader never sees a partial one. Curves are
in metrics.jsonl beside it (t0repro.training.metrics).
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from typing import Literal

from t0repro import storage
from t0repro.errors import UserError
from t0repro.storage.leases import is_alive

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
      loss: the loss of `step` as its dialect defines it; None before the first.
      target_tokens: targets with loss trained on in all steps of the run, earlier starts' too.
      examples: examples trained on, likewise.
      steps_per_second, target_tokens_per_second: over the latest steps; None before the first.
      seconds_left: until `last_step`, at that speed.
      started, updated: UTC times, ISO 8601.
      host, process: the machine, and the process id on it.
      loss_per_target_token: `loss` in that unit; None where a model's own loss has another one.
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
    loss_per_target_token: float | None = None  # records of 0.1.0 lack it


def describe_run(model_dir: str | os.PathLike[str]) -> str:
    """Whether a folder's training run may write more checkpoints, for those that wait for them."""
    state = read_run_state(model_dir)
    if state is None:
        return f"no {RUN_STATE_FILE} there says how far its training run is"
    progress = f"at step {state.step:,} of {state.last_step:,}"
    if state.state == "running":
        return f"its training run is {progress}"
    reason = f" ({state.reason})" if state.reason else ""
    return f"its training run {state.state} {progress}{reason}"


def read_run_state(model_dir: str | os.PathLike[str]) -> RunState | None:
    """What a folder's run_state.json says; None if there is none.

    If the file says "running" but the local process is gone, the run was killed, and its state is
    returned as "failed". For a process on another machine, only `updated` shows whether it lives.

    Raises:
      UserError: if the file is not a run's record.
    """
    path = storage.join(storage.local_path(model_dir), RUN_STATE_FILE)
    try:
        state = RunState(**json.loads(storage.read(path)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"The record of this run cannot be read: {error}.",
            where=path,
            fix="Remove it; the next run writes a new one.",
        ) from error
    # A process id means something only on its own machine.
    if state.state == "running" and state.host == socket.gethostname():
        if not is_alive(state.process):
            reason = "its process is gone: it was killed, or the machine went down"
            return dataclasses.replace(state, state="failed", reason=reason)
    return state
