"""Two runs side by side: what one stack scored or lost against what the other did.

A difference of scores is stated per pair, in natural-logarithm units, and per target token, which
is what the agreement between the stacks is defined by (1e-4 absolute per token in float32). A
difference of losses is relative to the first run's loss.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.outputs import TaskScores, latest_step, read_task_scores
from t0repro.evaluation.rank import rank_classification

MAX_FLIPS_KEPT = 100


@dataclasses.dataclass(frozen=True)
class FlippedExample:
    """An example that two runs predict differently.

    Attributes:
      margin_a: best score less the second best in the first run; None where there is one choice.
      margin_b: the same in the second run.
    """

    task: str
    example: int
    predicted_a: int
    predicted_b: int
    margin_a: float | None
    margin_b: float | None


@dataclasses.dataclass(frozen=True)
class TaskComparison:
    """One task in two runs.

    Attributes:
      pairs: (input, choice) pairs compared.
      max_difference: largest absolute difference of a pair's score.
      max_difference_per_token: largest absolute difference divided by the pair's target tokens.
      at: the (input, choice) with that difference per token.
      flipped: examples whose predicted choice differs.
      metrics_a: the first run's metrics in percent; metrics_b the second's.
    """

    task: str
    pairs: int
    max_difference: float
    max_difference_per_token: float
    at: tuple[int, int]
    flipped: int
    metrics_a: dict[str, float]
    metrics_b: dict[str, float]


@dataclasses.dataclass(frozen=True)
class ScoreComparison:
    """The scores of two runs on the tasks that both have.

    Attributes:
      label_a: what to call the first run; label_b the second.
      step_a: the first run's step; step_b the second's.
      only_a: tasks that the second run lacks; only_b those that the first lacks.
      flips: the examples that are predicted differently, the first MAX_FLIPS_KEPT of them.
    """

    label_a: str
    label_b: str
    step_a: int
    step_b: int
    tasks: tuple[TaskComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    flips: tuple[FlippedExample, ...]

    @property
    def pairs(self) -> int:
        """(input, choice) pairs compared."""
        return sum(task.pairs for task in self.tasks)

    @property
    def flipped(self) -> int:
        """Examples whose predicted choice differs."""
        return sum(task.flipped for task in self.tasks)

    @property
    def max_difference(self) -> float:
        """Largest absolute difference of a pair's score."""
        return max(task.max_difference for task in self.tasks)

    @property
    def worst(self) -> TaskComparison:
        """The task with the largest difference per target token."""
        return max(self.tasks, key=lambda task: task.max_difference_per_token)

    @property
    def max_metric_difference(self) -> float:
        """Largest absolute difference of a metric, in percentage points."""
        return max(
            abs(task.metrics_a[name] - task.metrics_b[name])
            for task in self.tasks
            for name in task.metrics_a.keys() & task.metrics_b.keys()
        )

    def within(self, tolerance: float) -> bool:
        """Whether no score differs by more per token, and nothing is predicted differently."""
        return self.worst.max_difference_per_token <= tolerance and self.flipped == 0


@dataclasses.dataclass(frozen=True)
class LossRow:
    """The losses of two runs after the same update.

    Attributes:
      relative_difference: to the first run's loss; absolute where that is zero.
    """

    step: int
    loss_a: float
    loss_b: float
    relative_difference: float


@dataclasses.dataclass(frozen=True)
class LossComparison:
    """The losses of two runs, step by step.

    Attributes:
      rows: the steps that both runs have, ascending.
      only_a: number of steps that the second run lacks; only_b those that the first lacks.
    """

    label_a: str
    label_b: str
    rows: tuple[LossRow, ...]
    only_a: int
    only_b: int

    @property
    def worst(self) -> LossRow:
        """The row with the largest relative difference."""
        return max(self.rows, key=lambda row: row.relative_difference)

    def within(self, tolerance: float) -> bool:
        """Whether no step's relative difference is larger."""
        return self.worst.relative_difference <= tolerance


def compare_scores(
    eval_dir_a: str | os.PathLike[str],
    eval_dir_b: str | os.PathLike[str],
    *,
    step_a: int | None = None,
    step_b: int | None = None,
    label_a: str = "a",
    label_b: str = "b",
    num_classes: Mapping[str, int] | None = None,
) -> ScoreComparison:
    """Compares two evaluations pair by pair, on the tasks that both folders have.

    Args:
      eval_dir_a: the first run's `<split>_eval` folder.
      eval_dir_b: the second run's.
      step_a: the step to read of the first run, the latest when None.
      step_b: the step to read of the second run, likewise.
      label_a: what to call the first run.
      label_b: what to call the second run.
      num_classes: task name -> number of choices, for the tasks where it is fixed.

    Raises:
      UserError: if the folders share no task, or a task's pairs are not the same in both.
    """
    runs_a = {scores.task: scores for scores in read_task_scores(eval_dir_a, step_a)}
    runs_b = {scores.task: scores for scores in read_task_scores(eval_dir_b, step_b)}
    shared = sorted(runs_a.keys() & runs_b.keys())
    if not shared:
        raise UserError(
            "The two evaluations have no task in common.",
            where=f"{eval_dir_a} and {eval_dir_b}",
            fix="Evaluate the same mixture on both.",
        )
    compared = [
        _compare_task(runs_a[task], runs_b[task], (num_classes or {}).get(task)) for task in shared
    ]
    flips = [flip for _, found in compared for flip in found]
    return ScoreComparison(
        label_a=label_a,
        label_b=label_b,
        step_a=latest_step(eval_dir_a) if step_a is None else step_a,
        step_b=latest_step(eval_dir_b) if step_b is None else step_b,
        tasks=tuple(task for task, _ in compared),
        only_a=tuple(sorted(runs_a.keys() - runs_b.keys())),
        only_b=tuple(sorted(runs_b.keys() - runs_a.keys())),
        flips=tuple(flips[:MAX_FLIPS_KEPT]),
    )


def read_losses(metrics: str | os.PathLike[str], split: str = "train") -> dict[int, float]:
    """The loss of each step of a metrics.jsonl, ascending.

    A step that comes twice, as it does after a restart from an earlier checkpoint, has the loss of
    its last line. Lines of another split, or without a loss, are passed over; so is a last line
    that a killed run left half-written.

    Raises:
      UserError: if the file is missing, or an earlier line of it is not JSON (file and line).
    """
    path = Path(metrics)
    if not path.is_file():
        raise UserError(
            "There is no metrics file here.",
            where=str(path),
            fix="Training writes metrics.jsonl into its model_dir; name that file.",
        )
    losses: dict[int, float] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no line feed after it: the writer was stopped in the middle
                break
            raise UserError(
                f"This line is not JSON ({error.msg}).", where=f"{path}:{number}"
            ) from error
        if record.get("split") == split and record.get("loss") is not None:
            losses[int(record["step"])] = float(record["loss"])
    return dict(sorted(losses.items()))


def compare_losses(
    metrics_a: str | os.PathLike[str],
    metrics_b: str | os.PathLike[str],
    *,
    label_a: str = "a",
    label_b: str = "b",
) -> LossComparison:
    """Compares the training losses of two metrics.jsonl at the steps that both have.

    Raises:
      UserError: if they share no step, or a loss is not finite.
    """
    losses_a, losses_b = read_losses(metrics_a), read_losses(metrics_b)
    shared = losses_a.keys() & losses_b.keys()
    if not shared:
        raise UserError(
            f"The two runs have no training step in common ({_extent(losses_a)} and"
            f" {_extent(losses_b)}).",
            where=f"{metrics_a} and {metrics_b}",
            fix="Start both from the same checkpoint, so that their global steps meet.",
        )
    for path, losses in ((metrics_a, losses_a), (metrics_b, losses_b)):
        for step in sorted(shared):
            if not math.isfinite(losses[step]):
                raise UserError(f"The loss at step {step} is {losses[step]}.", where=str(path))
    rows = (_loss_row(step, losses_a[step], losses_b[step]) for step in sorted(shared))
    return LossComparison(
        label_a=label_a,
        label_b=label_b,
        rows=tuple(rows),
        only_a=len(losses_a.keys() - shared),
        only_b=len(losses_b.keys() - shared),
    )


def _compare_task(
    a: TaskScores, b: TaskScores, num_classes: int | None
) -> tuple[TaskComparison, list[FlippedExample]]:
    _check_same_pairs(a, b)
    ranked_a = rank_classification(a, num_classes=num_classes)
    ranked_b = rank_classification(b, num_classes=num_classes)
    # Equal infinities do not differ; their subtraction would be NaN
    same = a.score == b.score
    difference = np.zeros(len(a))
    difference[~same] = np.abs(a.score[~same] - b.score[~same])
    per_token = difference / np.maximum(a.target_length, 1)
    at = int(per_token.argmax())
    flipped = np.flatnonzero(ranked_a.predicted != ranked_b.predicted)
    flips = [
        FlippedExample(
            task=a.task,
            example=int(ranked_a.example[i]),
            predicted_a=int(ranked_a.predicted[i]),
            predicted_b=int(ranked_b.predicted[i]),
            margin_a=_finite_or_none(ranked_a.margin[i]),
            margin_b=_finite_or_none(ranked_b.margin[i]),
        )
        for i in flipped
    ]
    comparison = TaskComparison(
        task=a.task,
        pairs=len(a),
        max_difference=float(difference.max()),
        max_difference_per_token=float(per_token[at]),
        at=(int(a.input_index[at]), int(a.choice_index[at])),
        flipped=len(flips),
        metrics_a=ranked_a.metrics,
        metrics_b=ranked_b.metrics,
    )
    return comparison, flips


def _check_same_pairs(a: TaskScores, b: TaskScores) -> None:
    """Scores can be subtracted only where both runs scored the same choices of the examples."""
    same = len(a) == len(b) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("input_index", "choice_index", "is_correct", "target_length")
    )
    if not same:
        raise UserError(
            f"Task {a.task!r}: the two evaluations scored different pairs ({len(a)} and {len(b)}"
            " pairs, or other answers or target lengths).",
            fix="Evaluate the same cached task, with the same vocabulary and sequence lengths.",
        )


def _loss_row(step: int, loss_a: float, loss_b: float) -> LossRow:
    difference = abs(loss_a - loss_b)
    return LossRow(step, loss_a, loss_b, difference / abs(loss_a) if loss_a else difference)


def _extent(losses: dict[int, float]) -> str:
    return f"steps {min(losses)} to {max(losses)}" if losses else "no steps"


def _finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
