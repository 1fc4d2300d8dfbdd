"""Writes a report's files, and every score as a table: all files of a kind, or none."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.outputs import TaskScores, iterate_task_scores
from t0repro.evaluation.rank import rank_classification
from t0repro.files import make_folder, output_path, sync_directory, sync_tree, write_atomically
from t0repro.reports.page import Page, render_html, render_markdown
from t0repro.reports.prompts import PromptInfo, dataset_label, fixed_classes, template_name
from t0repro.reports.report import Report
from t0repro.reports.report_page import report_page


def write_report(report: Report, out: str | os.PathLike[str]) -> list[Path]:
    """Writes report.json, report.md and report.html into a folder; returns their paths.

    Raises:
      UserError: like write_files.
    """
    return write_page("report", report_page(report), report.to_json(), out)


def write_page(name: str, page: Page, content: str, out: str | os.PathLike[str]) -> list[Path]:
    """Writes <name>.json with the content, and the page as <name>.md and <name>.html.

    Raises:
      UserError: like write_files.
    """
    files = {
        f"{name}.json": content,
        f"{name}.md": render_markdown(page),
        f"{name}.html": render_html(page),
    }
    return write_files(files, out)


def write_files(files: Mapping[str, str | bytes], out: str | os.PathLike[str]) -> list[Path]:
    """Writes files into a folder, all of them or none, and returns their paths.

    Raises:
      UserError: if a file cannot be written; it names the file.
    """
    with all_or_none(out) as staging:
        for name, content in files.items():
            write_atomically(staging / name, content)
    return [Path(out) / name for name in files]


@contextlib.contextmanager
def all_or_none(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder; its files are moved into `out` if the block raises nothing.

    All files are synced before the first is renamed into place, so that a full disk leaves the
    files of an earlier report as they were.

    Raises:
      UserError: if a file cannot be written; it names the file, or else the folder.
    """
    out = output_path(out)
    # A unique name: two reports may be written to one folder at the same time.
    staging = out / f".{uuid.uuid4().hex[:8]}.tmp"
    try:
        make_folder(staging)
        yield staging
        sync_tree(staging)
        # By now everything is on disk, so running out of space is unlikely from here on.
        for path in sorted(staging.iterdir()):
            os.replace(path, out / path.name)
        sync_directory(out)
    except OSError as error:
        # Named as in the user's folder: the temporary one is gone when the message is read.
        at_fault = Path(error.filename or staging)
        path = out / at_fault.name if at_fault.parent == staging else out
        raise UserError(
            f"{path.name} cannot be written: {error.strerror or error}.",
            where=str(path),
            fix="Free some space, or name another folder with --out, and run the command again.",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def as_json(values: Sequence[Any]) -> str:
    """Dataclasses as an indented JSON list."""
    return json.dumps([dataclasses.asdict(value) for value in values], indent=1) + "\n"


# ---- Every (example, choice, score), for analysis ----------------------------------------------

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

    Scores are in natural-log units; `predicted` marks the example's prediction. In the CSV file, a
    name that a spreadsheet would interpret as a formula is prefixed with an apostrophe.

    Raises:
      UserError: if the files cannot be read or written.
    """
    import pyarrow
    import pyarrow.parquet

    csv_name, parquet_name = "scores.csv", "scores.parquet"
    with all_or_none(out) as staging, contextlib.ExitStack() as stack:
        # newline="": the csv module ends lines itself, and a cell may contain line breaks.
        file = stack.enter_context(open(staging / csv_name, "w", encoding="utf-8", newline=""))
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        parquet = None
        # One task at a time: T0's held-out suite has 339,392 pairs.
        for scores in iterate_task_scores(eval_dir, step, tasks):
            columns = _columns(scores, prompts)
            rows.writerows(_cells(columns))
            table = pyarrow.table(columns)
            # The writer needs the columns' types, which the first task shows.
            if parquet is None:
                parquet = stack.enter_context(
                    pyarrow.parquet.ParquetWriter(
                        staging / parquet_name, table.schema, compression="zstd"
                    )
                )
            parquet.write_table(table)
    return [Path(out) / csv_name, Path(out) / parquet_name]


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
