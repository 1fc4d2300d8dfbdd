"""Every (example, choice, score) of an evaluation as CSV and Parquet, for analyses of one's own."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.evaluation.outputs import TaskScores, read_task_scores
from t0repro.evaluation.rank import rank_classification
from t0repro.files import write_atomically
from t0repro.reports.prompts import PromptInfo, dataset_label, fixed_classes, template_name

COLUMNS = (
    "task", "dataset", "template", "step", "example", "choice",
    "score", "target_length", "is_correct", "predicted",
)  # fmt: skip


def write_tables(
    eval_dir: str | os.PathLike[str],
    step: int,
    prompts: Mapping[str, PromptInfo],
    out: str | os.PathLike[str],
    tasks: Sequence[str] | None = None,
) -> list[Path]:
    """Writes scores.csv and scores.parquet, a row for each pair of the tasks; returns their paths.

    Scores are natural-logarithm units; `predicted` says whether the choice is its example's
    prediction.
    """
    import pyarrow
    import pyarrow.parquet

    parts = [_columns(scores, prompts) for scores in read_task_scores(eval_dir, step, tasks)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(zip(*(columns[name].tolist() for name in COLUMNS), strict=True))
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer, compression="zstd")
    paths = [Path(out) / "scores.csv", Path(out) / "scores.parquet"]
    write_atomically(paths[0], text.getvalue())
    write_atomically(paths[1], buffer.getvalue())
    return paths


def _columns(scores: TaskScores, prompts: Mapping[str, PromptInfo]) -> dict[str, Any]:
    classes = fixed_classes(prompts).get(scores.task)
    ranked = rank_classification(scores, num_classes=classes)
    predicted = ranked.predicted[np.searchsorted(ranked.example, scores.input_index)]
    constants = {
        "task": scores.task,
        "dataset": dataset_label(scores.task, prompts),
        "template": template_name(scores.task, prompts) if scores.task in prompts else "",
        "step": scores.step,
    }
    return {
        **{name: np.full(len(scores), value) for name, value in constants.items()},
        "example": scores.input_index,
        "choice": scores.choice_index,
        "score": scores.score,
        "target_length": scores.target_length,
        "is_correct": scores.is_correct,
        "predicted": predicted == scores.choice_index,
    }
