"""The table of trackers, which help texts, checks and doctor read.

A tracker is a row and the module NAME_tracker, imported when it is used, with the function

    open_run(run: TrackedRun, run_id: str | None) -> Tracker

which begins a run, or continues the one with this identifier. The package is the name of an extra.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Iterable, Mapping

from t0repro.errors import UserError


class TrackerName(enum.StrEnum):
    """The trackers."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"


# The package that a tracker needs; None if it comes with t0repro.
TRACKER_PACKAGES: Mapping[TrackerName, str | None] = {
    TrackerName.WANDB: "wandb",
    TrackerName.MLFLOW: "mlflow",
    TrackerName.TENSORBOARD: None,
}


def check_trackers(names: Iterable[TrackerName] | None) -> None:
    """Raises UserError for a tracker whose package is not installed; imports none."""
    for name in names or ():
        package = TRACKER_PACKAGES[name]
        if package and package not in sys.modules and importlib.util.find_spec(package) is None:
            raise UserError(
                f"--tracker {name} needs the package {package}.",
                where="--tracker",
                fix=f"Install it: EXTRAS={package} bash scripts/setup.sh",
            )
