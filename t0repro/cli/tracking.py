"""`--tracker` of the commands that train or evaluate: what a tracker receives about each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t0repro.cloud.tracker import TrackedRun, TrackerName
from t0repro.redaction import without_passwords

if TYPE_CHECKING:
    from t0repro.config.run_config import RunConfig

HELP = (
    "Send metrics, settings and files to this tracker too; repeatable. Needs the extra of its name."
)
Trackers = Annotated[list[TrackerName] | None, typer.Option("--tracker", help=HELP)]

_OF_TRAINING = (
    "config.gin",
    "operative_config.gin",
    "model-info.txt",
    "commands/command*",
    "run_state.json",
)
_OF_EVALUATION = ("report.*", "*_eval/operative_config.gin", "*_eval/provenance.json")


def tracked_training(
    names: Sequence[TrackerName] | None, model_dir: Path, config: RunConfig | None
) -> contextlib.AbstractContextManager[None]:
    """Tracks what the block writes into model_dir; the settings are the configuration's."""
    settings: dict[str, Any] = json.loads(without_passwords(config.to_json())) if config else {}
    # Where each value comes from is longer than the values, and stands in the gin files.
    settings.pop("provenance", None)
    return _tracked(names, TrackedRun(model_dir, settings, _OF_TRAINING))


def tracked_evaluation(
    names: Sequence[TrackerName] | None, out: Path, checkpoint: str, mixture: str, settings: Any
) -> contextlib.AbstractContextManager[None]:
    """Tracks what the block writes into an evaluation's folder; `settings` is a dataclass."""
    about = {
        "checkpoint": without_passwords(checkpoint),
        "mixture": mixture,
        **dataclasses.asdict(settings),
    }
    return _tracked(names, TrackedRun(out, about, _OF_EVALUATION))


def _tracked(
    names: Sequence[TrackerName] | None, run: TrackedRun
) -> contextlib.AbstractContextManager[None]:
    # Here, because it imports numpy, which no --help needs.
    from t0repro.cloud.tracking import tracked

    return tracked(names or (), run, lambda line: typer.echo(line, err=True))
