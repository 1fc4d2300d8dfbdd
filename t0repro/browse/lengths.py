"""The bird's-eye view: how long a prompt's texts are, and how many of them are cut."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from t0repro.browse.shown_rows import show_rows
from t0repro.errors import UserError
from t0repro.tasks.rows import choose_rows
from t0repro.tasks.task import TaskDescription

SAMPLE = 12
"""Rows of each prompt that are measured."""
_BLOCKS = 3  # of consecutive rows, spread over the split


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths of a prompt's examples, from a sample of rows.

    Attributes:
      task: The task's name.
      rows: Number of rows measured.
      examples: Number of examples that they gave.
      inputs: Median and maximum tokens of an input; None without a vocabulary or an example.
      targets: The same of a target.
      cut: Share of examples of which an input or a target is cut, from 0 to 1.
      error: Why nothing could be measured; "" if something was.
    """

    task: str
    rows: int
    examples: int
    inputs: tuple[int, int] | None
    targets: tuple[int, int] | None
    cut: float | None
    error: str = ""


def measure(task: TaskDescription) -> Lengths:
    """Measures a prompt on rows spread over its first split that is here."""
    name = task.prompt.name
    splits = task.rows.available_splits()
    if not splits:
        return Lengths(name, 0, 0, None, None, None, "its rows are not on this machine")
    split = "train" if "train" in splits else splits[0]
    try:
        count = task.rows.row_count(split)
        size = max(SAMPLE // _BLOCKS, 1)
        starts = sorted(choose_rows(max(count - size + 1, 1), _BLOCKS))
        rows = [row for start in starts for row in show_rows(task, split, start, size)]
    except UserError as error:
        return Lengths(name, 0, 0, None, None, None, error.what)
    examples = [row.example for row in rows if row.example is not None]
    counted = [each for each in examples if each.input_tokens is not None]
    return Lengths(
        name,
        len(rows),
        len(examples),
        _middle_and_most([each.input_tokens or 0 for each in counted]),
        _middle_and_most([each.target_tokens or 0 for each in counted]),
        statistics.fmean(any(each.lost_tokens) for each in counted) if counted else None,
    )


def _middle_and_most(lengths: Sequence[int]) -> tuple[int, int] | None:
    return (round(statistics.median(lengths)), max(lengths)) if lengths else None
