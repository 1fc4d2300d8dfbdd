"""Where a report's numbers come from."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

from t0repro.errors import UserError
from t0repro.evaluation.evaluation_facts import EVALUATION_FACTS, package_versions
from t0repro.evaluation.outputs import find_tasks, latest_step
from t0repro.evaluation.records import claim_path
from t0repro.reports.run import Run
from t0repro.storage import address_of, input_path
from t0repro.words import counted, remove_passwords, rename_for_reader

_AGAIN = "Evaluate again, or remove the file: the report then lacks what it records."


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The origin of a report's numbers; None for what is unknown."""

    created: str
    label: str
    eval_dir: str
    checkpoint: str | None
    step: int
    device: str | None
    duration_seconds: float | None
    versions: dict[str, str]
    git_commit: str | None
    operative_config: str | None
    checkpoint_hash: str | None = None
    templates_hash: str | None = None
    data_revision: str | None = None
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    scores_sha256: str | None = None


def collect_provenance(run: Run, step: int) -> Provenance:
    """An evaluation's provenance, as provenance.json in its folder records it.

    The operative configuration is operative_config.gin in the folder, or in the model_dir above it.

    Raises:
      UserError: if provenance.json exists but is not a JSON object.
    """
    folder = Path(run.eval_dir)
    facts = recorded_facts(folder, step)
    recorded = (
        *("checkpoint", "checkpoint_hash", "device", "duration_seconds", "templates_hash"),
        *("data_revision", "scores_sha256"),
    )
    return Provenance(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        label=run.label,
        # A bucket's address, if the folder is a working copy of it.
        eval_dir=rename_for_reader(str(run.eval_dir)),
        step=step,
        # If the evaluation recorded no versions, give those of the report's writer.
        versions=facts.get("versions") or package_versions(),
        git_commit=git_commit(),
        operative_config=_operative_config(folder),
        data=facts.get("data") or {},
        **{name: facts.get(name) for name in recorded},
    )


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` if it has changes."""
    try:
        found = subprocess.run(
            # --exclude=* matches no tag, so that only the commit is printed.
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None
    return found.stdout.strip() or None


def default_label(
    eval_dir: str | os.PathLike[str], step: int | None = None, checkpoint: str | None = None
) -> str:
    """A run's name in its report: its checkpoint's, or else that of the folder above."""
    step = latest_step(eval_dir) if step is None else step
    checkpoint = checkpoint or recorded_facts(eval_dir, step).get("checkpoint")
    return checkpoint_name(checkpoint) if checkpoint else Path(eval_dir).resolve().parent.name


def checkpoint_name(checkpoint: str) -> str:
    """A checkpoint's folder or released name, without the address before it and the step."""
    path = PurePosixPath(remove_passwords(checkpoint).partition("?")[0])
    is_step = re.fullmatch(r"(model\.ckpt-|checkpoint_)\d+", path.name)
    return (path.parent if is_step else path).name or "model"


def recorded_facts(folder: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """An evaluation's record in provenance.json; empty if it is for another step.

    Raises:
      UserError: if the file exists but is not a JSON object.
    """
    path = Path(folder) / EVALUATION_FACTS
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"This is not JSON: {error}", where=str(path), fix=_AGAIN) from error
    if not isinstance(facts, dict):
        raise UserError("This is not a JSON object.", where=str(path), fix=_AGAIN)
    # A folder may have several steps; the file describes the one evaluated last.
    return facts if facts.get("step", step) == step else {}


def describe_unfinished(eval_dir: Path, step: int) -> str | None:
    """A sentence about an evaluation of a step that has not ended; None if it has."""
    # rank-eval claims a step when it starts, writes the last step's facts when it ends, and then,
    # unless Python called it, the report.
    out = eval_dir.parent
    has_ended = (out / "report.json").exists() or recorded_facts(eval_dir, step)
    if has_ended or not claim_path(out, step).exists():
        return None
    tasks = sum(step in steps for steps in find_tasks(eval_dir).values())
    return (
        f"The evaluation has not ended: only {counted(tasks, 'task')} had scores. Started again"
        f" with --out {rename_for_reader(str(out))}, rank-eval continues it."
    )


def _operative_config(folder: Path) -> str | None:
    # rank_eval writes it into the folder, training into the model_dir above, which is not in the
    # working copy of an address below it.
    above: str | Path = folder.resolve().parent
    if address := address_of(folder):
        above = address.rpartition("/")[0]
    for place in (folder, above):
        path = input_path(f"{place}/operative_config.gin")
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
