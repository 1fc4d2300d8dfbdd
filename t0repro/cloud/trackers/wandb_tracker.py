"""Weights & Biases: in the project WANDB_PROJECT, by default `t0repro`.

The library's own settings decide the rest. With WANDB_MODE=offline it writes into the run's folder;
`wandb sync` sends that later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from t0repro.cloud.trackers.tracker import Outcome, TrackedRun, Tracker
from t0repro.errors import UserError

_STEP = "global_step"


def open_run(run: TrackedRun, run_id: str | None) -> Tracker:
    """Begins a run, or continues one.

    Raises:
      UserError: if the server cannot be reached or rejects the user.
    """
    try:
        # Saving files ignores the run's `silent` and warns about each file that it links.
        wandb.setup(wandb.Settings(silent=True))
        opened = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "t0repro"),
            name=run.name,
            id=run_id,
            resume="allow",
            dir=os.fspath(run.folder),
            config=run.flat_parameters(),
            # Training uses the terminal, and the user's own repository has the code.
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
    except (wandb.errors.Error, OSError) as error:
        raise UserError(
            f"Weights & Biases did not begin a run: {error}",
            where="--tracker wandb",
            fix="Log in with `wandb login`, or set WANDB_MODE=offline.",
        ) from error
    # wandb drops values of a step below its own latest one. With a metric as the axis, evaluations
    # of earlier checkpoints are kept as well.
    opened.define_metric(_STEP, hidden=True)
    opened.define_metric("*", step_metric=_STEP)
    return _WandbRun(opened)


class _WandbRun:
    """A Tracker that writes one run of Weights & Biases."""

    def __init__(self, run: Any):
        self._run, self.run_id = run, run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step."""
        self._run.log({**values, _STEP: step})

    def flush(self) -> None:
        """Does nothing, because the library keeps what was logged on disk until it is sent."""

    def send_file(self, path: Path, name: str) -> None:
        """Adds a file to the run's files."""
        base = str(path)[: -len(name)] if str(path).endswith(name) else os.fspath(path.parent)
        self._run.save(os.fspath(path), base_path=base, policy="now")

    def close(self, outcome: Outcome) -> None:
        """Ends the run with its state."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
