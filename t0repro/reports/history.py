"""Accuracy by checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.outputs import find_tasks
from t0repro.reports.prompts import PromptInfo, dataset_label
from t0repro.reports.ranking import rank_folder


@dataclasses.dataclass(frozen=True)
class History:
    """Mean accuracy over prompts in percent, by dataset, at each of the steps.

    Attributes:
      curves: dataset -> one value per step.
      chance: dataset -> its chance level.
      skipped: tasks that lack one of the steps.
    """

    steps: tuple[int, ...]
    curves: dict[str, tuple[float, ...]]
    chance: dict[str, float]
    skipped: tuple[str, ...]


def read_history(
    eval_dir: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    steps: Collection[int] | None = None,
    tasks: Collection[str] | None = None,
) -> History:
    """Ranks, at every step, the tasks with predictions at all of the steps.

    Args:
      eval_dir: a `<split>_eval` folder.
      prompts: task name -> its prompt; may be empty.
      steps: the steps; None for all in the folder.
      tasks: the tasks; None for all in the folder.

    Raises:
      UserError: if there are no predictions, no task has all steps, or files cannot be read.
    """
    found = {
        task: {step for step in there if steps is None or step in steps}
        for task, there in find_tasks(eval_dir).items()
        if tasks is None or task in tasks
    }
    steps = sorted({step for there in found.values() for step in there})
    if not steps:
        raise UserError(
            "The folder holds no predictions.", where=str(eval_dir), fix="Evaluate a checkpoint."
        )
    # A curve needs a value at every step.
    whole = [task for task, there in found.items() if set(there) == set(steps)]
    if not whole:
        raise UserError(
            f"No task has predictions at all of the steps {', '.join(map(str, steps))}.",
            where=str(eval_dir),
            fix="Evaluate the steps that are missing.",
        )
    values: dict[str, dict[int, list[float]]] = {}
    chance: dict[str, list[float]] = {}
    for step in steps:
        # Rank the scores of each step again, so that no step needs a report.
        for result in rank_folder(eval_dir, prompts, step=step, tasks=whole):
            label = dataset_label(result.task, prompts)
            values.setdefault(label, {}).setdefault(step, []).append(result.accuracy)
            chance.setdefault(label, []).append(result.chance)
    return History(
        steps=tuple(steps),
        curves={
            label: tuple(float(np.mean(by_step[step])) for step in steps)
            for label, by_step in sorted(values.items())
        },
        chance={label: float(np.mean(found)) for label, found in sorted(chance.items())},
        skipped=tuple(sorted(found.keys() - set(whole))),
    )
