"""Rank classification of every task in an evaluation's folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from t0repro.evaluation.outputs import iterate_task_scores
from t0repro.evaluation.rank import RankResult, rank_classification
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
        are left out.

    Raises:
      UserError: as read_task_scores and rank_classification do.
    """
    classes = fixed_classes(prompts)
    found = iterate_task_scores(eval_dir, step, tasks)
    if less is not None:
        found = (
            # Content-free scores are in the order of TaskScores, as the record says.
            dataclasses.replace(scores, score=scores.score - np.asarray(less[scores.task]))
            for scores in found
            if scores.task in less
        )
    return [
        rank_classification(
            scores,
            num_classes=classes.get(scores.task),
            normalize_by_target_length=normalize_by_target_length,
        )
        for scores in found
    ]
