"""Every (example, choice, score) as tables, for analysis."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.evaluation.outputs import iterate_task_scores
from t0repro.evaluation.rank import rank_classification
from t0repro.evaluation.task_scores import TaskScores
from t0repro.reports.prompts import PromptInfo, dataset_label, fixed_classes, template_name
from t0repro.reports.report_files import stage_files

CSV, PARQUET = "scores.csv", "scores.parquet"
COLUMNS = (
    "task", "dataset", "template", "step", "example", "choice",
    "score", "target_length", "is_correct", "predicted",
)  # fmt: skip


def writable_tables() -> tuple[str, ...]:
    """The tables' file names; without pyarrow there is no Parquet."""
    has_pyarrow = importlib.util.find_spec("pyarrow") is not None
    return (CSV, PARQUET) if has_pyarrow else (CSV,)


def write_tables(
    eval_dir: str | os.PathLike[str],
    step: int,
    prompts: Mapping[str, PromptInfo],
    out: str | os.PathLike[str],
    tasks: Sequence[str] | None = None,
) -> list[Path]:
    """Writes scores.csv, and scores.parquet if pyarrow is installed; returns their paths.

    A row stands for a pair of the tasks. Scores are in natural-log units; `predicted` marks the
    example's prediction. In the CSV file, a name that a spreadsheet would interpret as a formula is
    prefixed with an apostrophe.

    Raises:
      UserError: if the files cannot be read or written.
    """
    names = writable_tables()
    with stage_files(out) as staging, contextlib.ExitStack() as stack:
        # newline="": the csv module ends lines itself, and a cell may contain line breaks.
        file = stack.enter_context(open(staging / CSV, "w", encoding="utf-8", newline=""))
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        parquet = None
        # One task at a time: T0's held-out suite has 339,392 pairs.
        for scores in iterate_task_scores(eval_dir, step, tasks):
            columns = _columns(scores, prompts)
            rows.writerows(_cells(columns))
            if PARQUET not in names:
                continue
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.table(columns)
            # The writer needs the columns' types, which the first task shows.
            if parquet is None:
                parquet = stack.enter_context(
                    pyarrow.parquet.ParquetWriter(
                        staging / PARQUET, table.schema, compression="zstd"
                    )
                )
            parquet.write_table(table)
    if PARQUET not in names:  # an earlier evaluation's would contradict the CSV
        (Path(out) / PARQUET).unlink(missing_ok=True)
    return [Path(out) / name for name in names]


def _cells(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[Any, ...]]:
    """The rows of a CSV file."""
    cells = (
        [_plain(cell) if isinstance(cell, str) else cell for cell in columns[name].tolist()]
        for name in COLUMNS
    )
    return zip(*cells, strict=True)


def _plain(text: str) -> str:
    """Prefixes a name that a spreadsheet would take for a formula with an apostrophe."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def _columns(scores: TaskScores, prompts: Mapping[str, PromptInfo]) -> dict[str, Any]:
    classes = fixed_classes(prompts).get(scores.task)
    ranked = rank_classification(scores, num_classes=classes)
    # Look up a pair's example by index; ranked.example is sorted.
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
