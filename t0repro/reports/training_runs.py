"""The training runs below a folder: each one's run_state.json, and their metrics by step."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.event_files import MARK
from t0repro.reports.losses import LOSS
from t0repro.training.metrics import METRICS_FILE, OWN_UNIT
from t0repro.training.run_state import RUN_STATE_FILE, RunState, read_run_state
from t0repro.words import counted, rename_for_reader

HEADER = ("run", "state", "step", LOSS, "tokens", "tokens/s", "left")
# Far longer than a step: each step rewrites the record once it is 5 seconds old.
_SILENT = datetime.timedelta(minutes=10)
_MESH_CHECKPOINT = re.compile(r"model\.ckpt-\d+\.index")
# Unfinished checkpoints too, which Orbax and T5X name checkpoint_N.<something>.
_NO_RUNS_INSIDE = re.compile(r"checkpoint_\d+.*|\..*")


def find_runs(folder: str | os.PathLike[str]) -> dict[Path, RunState]:
    """Every training run at or below a folder, by path.

    Raises:
      UserError: if there is none, or one's record cannot be read.
    """
    states = {path: read_run_state(path) for path in folders_with(RUN_STATE_FILE, folder)}
    found = {path: state for path, state in states.items() if state is not None}
    if not found:
        raise UserError(
            f"There are no training runs here. {describe_left_out(folder)}".rstrip()
            if os.path.isdir(folder)
            else "This is a file, not a folder."
            if os.path.exists(folder)
            else "There is no such folder.",
            where=str(folder),
            fix=f"Give a folder below which training runs wrote their {RUN_STATE_FILE}.",
        )
    return found


def describe_left_out(folder: str | os.PathLike[str]) -> str:
    """The Mesh TensorFlow runs that `find_runs` omits, since only runs on JAX record a state."""
    left_out = {
        str(parent): METRICS_FILE in names or any(MARK in name for name in names)
        for parent, names in _folders(folder)
        if RUN_STATE_FILE not in names and any(map(_MESH_CHECKPOINT.fullmatch, names))
    }
    if not left_out:
        return ""
    drawn = [parent for parent, has_curves in left_out.items() if has_curves]
    plot = f"`t0repro plot {' '.join(map(shlex.quote, drawn))}` draws curves"
    if len(drawn) < len(left_out):
        plot += f" of the {len(drawn)} that recorded metrics"
    plot = f"; {plot}" if drawn else ""
    return (
        f"Not listed: {counted(len(left_out), 'folder')} with Mesh TensorFlow checkpoints and no"
        f" {RUN_STATE_FILE} ({', '.join(left_out)}){plot}."
    )


def folders_with(file: str, folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The folders at or below a folder with a file of this name; skips checkpoints."""
    return (parent for parent, names in _folders(folder) if file in names)


def _folders(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, list[str]]]:
    """Each folder at or below a folder, with the names of its files; skips checkpoints."""
    for parent, folders, names in os.walk(folder):
        # Change the list in place, which makes os.walk skip folders; checkpoints have many files.
        folders[:] = sorted(name for name in folders if not _NO_RUNS_INSIDE.fullmatch(name))
        yield Path(parent), names


def run_rows(runs: Mapping[Path, RunState]) -> list[tuple[str, ...]]:
    """The cells of a table with the columns of HEADER."""
    return [
        (
            rename_for_reader(str(path)),
            _state(run),
            f"{run.step:,} of {run.last_step:,}",
            _loss(run),
            f"{run.target_tokens:,}",
            "" if run.target_tokens_per_second is None else f"{run.target_tokens_per_second:,.0f}",
            _format_time_left(run),
        )
        for path, run in runs.items()
    ]


def _state(run: RunState) -> str:
    """The state with its reason; for a silent run that counts as running, for how long."""
    if run.reason:
        return f"{run.state}: {run.reason}"
    now = datetime.datetime.now(datetime.UTC)
    silent = now - datetime.datetime.fromisoformat(run.updated)
    # For a process on another machine, silence is the only sign that it is gone.
    if run.state == "running" and silent > _SILENT:
        return f"running, silent for {datetime.timedelta(seconds=round(silent.total_seconds()))}"
    return run.state


def _loss(run: RunState) -> str:
    """The loss per target token; where it is not known, the loss with that said."""
    if run.loss_per_target_token is not None:
        return f"{run.loss_per_target_token:.4f}"
    return "" if run.loss is None else f"{run.loss:.4f}{OWN_UNIT}"


def _format_time_left(run: RunState) -> str:
    """The time left of a run in progress, in hours, minutes and seconds."""
    if run.state != "running" or run.seconds_left is None:
        return ""
    return str(datetime.timedelta(seconds=round(run.seconds_left)))


def to_json(runs: Mapping[Path, RunState]) -> list[dict[str, Any]]:
    """One object for each run: its folder, and the fields of its record."""
    return [
        {"folder": rename_for_reader(str(path))} | dataclasses.asdict(run)
        for path, run in runs.items()
    ]
