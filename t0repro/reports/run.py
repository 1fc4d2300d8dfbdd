"""A run to report on: how a path resolves to one, its numbers' provenance, and its tasks' prompts.

Only this reporting module uses the task registry, and only if a module or mixture is named.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from t0repro.errors import UserError
from t0repro.evaluation.outputs import refuse_without_scores
from t0repro.storage import input_path
from t0repro.words import some

# Evaluations in folders of runs, and what auxiliary jobs collected.
_BELOW = tuple(f"{each}*_eval*/*_targets" for each in ("*/", "*/results/", "auxiliary/*/results/"))
_FIX = "Give the <split>_eval folder, the --out folder of rank-eval, or a report.json."


@dataclasses.dataclass(frozen=True)
class Run:
    """An evaluation with a label.

    Attributes:
      label: the run's name in the report.
      eval_dir: its `<split>_eval` folder.
      step: the checkpoint's step; None for the latest in the folder.
    """

    label: str
    eval_dir: str | os.PathLike[str]
    step: int | None = None


def split_labeled_path(text: str) -> tuple[str | None, Path]:
    """`split_label`, with the path as commands open it."""
    label, path = split_label(text)
    return label, input_path(path)


def split_label(text: str) -> tuple[str | None, str]:
    """Splits LABEL=PATH; a path without a label may itself contain `=`.

    Raises:
      UserError: If one of the two is empty.
    """
    label, separator, path = text.partition("=")
    # A path may contain `=`; if it exists as written, it has no label.
    if not separator or Path(text).exists():
        return None, text
    if not (label and path):
        raise UserError(
            f"{text!r} lacks a label or a path.",
            where=text,
            fix="Write LABEL=PATH as one word, without spaces around the =.",
        )
    return label, path


def find_evaluation(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Finds the `<split>_eval` folder for a path, and the step if a report names it.

    The folder is the path itself if it has an evaluation's files; else the only evaluation inside
    it; else, if the path is a report or its folder, the report's evaluation at the report's step.

    Raises:
      UserError: if there is no evaluation, or more than one.
    """
    path = Path(path)
    # Check the folder itself before searching inside.
    if any(path.glob("*_targets")):
        return path, None
    evaluations = sorted(
        folder
        for folder in path.glob("*_eval*")
        if folder.is_dir() and any(folder.glob("*_targets"))
    )
    if len(evaluations) == 1:
        return evaluations[0], None
    report = path / "report.json" if path.is_dir() else path
    # rank-eval's --out folder has both; prefer the folder of files.
    if not evaluations and report.is_file():
        return _evaluation_of_report(report)
    refuse_without_scores(path)
    if evaluations:
        names = ", ".join(folder.name for folder in evaluations)
        what, fix = f"There are {len(evaluations)} evaluations here.", f"Name one of them: {names}."
    elif not path.exists():
        what, fix = "There is no such file or folder.", _FIX
    elif below := sorted({str(file.parent) for each in _BELOW for file in path.glob(each)}):
        what, fix = "There is no evaluation here.", f"Name one of those below: {some(below)}."
    elif (losses := path / "metrics.jsonl").is_file():
        what = "There is no evaluation here, only the metrics of a training run."
        fix = (
            f"For accuracies, name the --out folder of `t0repro rank-eval --checkpoint {path}"
            f" --mixture MIXTURE --out DIR`; for losses, `t0repro compare {losses} B`."
        )
    else:
        what, fix = "There is no evaluation here.", _FIX
        if any(path.parent.glob("*_targets")):
            fix = f"Name the folder above: {path.parent}."
        elif any(path.glob("**/samples_*.jsonl")):
            fix = "Read lm-evaluation-harness's results with t0repro report make --from lm-eval."
        if path.name.startswith(("checkpoint_", "model.ckpt-")):
            fix += (
                " Checkpoints' tensors are compared by `t0repro checkpoint diff A B`; two steps of"
                " an evaluation by naming it twice, with --step A --step B."
            )
    raise UserError(what, where=str(path), fix=fix)


def _evaluation_of_report(path: Path) -> tuple[Path, int]:
    try:
        provenance = json.loads(path.read_text(encoding="utf-8"))["provenance"]
        folder, step = input_path(provenance["eval_dir"]), int(provenance["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("This is not a t0repro report.", where=str(path), fix=_FIX) from error
    if not any(folder.glob("*_targets")):
        raise UserError(
            f"The report's evaluation is no longer at {folder}.",
            where=str(path),
            fix="Give the <split>_eval folder; relative paths start where the report was made.",
        )
    return folder, step
