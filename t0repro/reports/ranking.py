"""Ranks the scores of an evaluation's folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.evaluation.outputs import iterate_task_scores, latest_step
from t0repro.evaluation.rank import RankResult, rank_classification
from t0repro.evaluation.records import read_records
from t0repro.reports.prompts import PromptInfo, fixed_classes


def rank_folder(
    eval_dir: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    *,
    step: int | None = None,
    normalize_by_target_length: bool = False,
    tasks: Sequence[str] | None = None,
    less: Mapping[str, Sequence[float]] | None = None,
) -> list[RankResult]:
    """Rank classification of every task of a folder at one step (the latest when None).

    Args:
      eval_dir: the `<split>_eval` folder.
      prompts: task name -> its prompt.
      step: the checkpoint's step.
      normalize_by_target_length: see rank_classification.
      tasks: names of the tasks to rank; None for all.
      less: task -> what to subtract from each pair's score, in TaskScores' order; tasks not in it
        are omitted.

    Raises:
      UserError: like read_task_scores and rank_classification.
    """
    classes = fixed_classes(prompts)
    step = latest_step(eval_dir) if step is None else step
    records = read_records(eval_dir, step)
    found = iterate_task_scores(eval_dir, step, tasks)
    if less is not None:
        found = (
            # Content-free scores are in the order of TaskScores, as recorded.
            dataclasses.replace(scores, score=scores.score - np.asarray(less[scores.task]))
            for scores in found
            if scores.task in less
        )
    results = (
        rank_classification(
            scores,
            num_classes=classes.get(scores.task),
            normalize_by_target_length=normalize_by_target_length,
        )
        for scores in found
    )
    return [add_rows(result, records.get(result.task)) for result in results]


def add_rows(result: RankResult, record: Mapping[str, Any] | None) -> RankResult:
    """The result with each example's row, if its task's record says which rows gave no example."""
    dropped = None if record is None else record.get("dropped_rows")
    if dropped is None:
        return result
    # The rows before the k-th dropped one gave its number minus k examples.
    before = np.asarray(dropped, np.int64) - np.arange(len(dropped))
    row = result.example + np.searchsorted(before, result.example, side="right")
    return dataclasses.replace(result, row=row)
