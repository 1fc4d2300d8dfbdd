"""A task's scored (input, choice) pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True, eq=False)
class TaskScores:
    """The scored (input, choice) pairs of one task at one step, sorted by input, then choice.

    Attributes:
      task: the SeqIO task's name.
      step: the checkpoint's global step.
      input_index: which example of the task a pair belongs to.
      choice_index: which answer choice of the example.
      is_correct: whether the choice is a right answer; several may be, or none.
      weight: the example's weight.
      target_length: tokens of the choice, EOS included.
      score: log-likelihood of the choice, natural logarithm, summed over its tokens.
      inputs: the rendered input of each pair; None if not requested or not written.
    """

    task: str
    step: int
    input_index: Int[np.ndarray, " pairs"]
    choice_index: Int[np.ndarray, " pairs"]
    is_correct: Bool[np.ndarray, " pairs"]
    weight: Float[np.ndarray, " pairs"]
    target_length: Int[np.ndarray, " pairs"]
    score: Float[np.ndarray, " pairs"]
    inputs: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.score)


class ScoredPairs:
    """Collects a task's pairs in the order of its examples.

    A target is the result of t5.data.postprocessors.rank_classification for an example:
    ((input, choice), is_correct, weight, target length).
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, targets: Sequence[Any], scores: Iterable[Any]) -> None:
        """Adds pairs.

        Args:
          targets: the pairs' targets, as described above.
          scores: the pairs' log-likelihoods, all of one floating-point type.
        """
        if not len(targets):
            return  # an empty array would bring its own dtype into the concatenation
        indices = np.array([target[0] for target in targets], np.int32).reshape(-1, 2)
        self._parts.append(
            {
                "input_index": indices[:, 0],
                "choice_index": indices[:, 1],
                "is_correct": np.array([target[1] for target in targets], np.bool_),
                # Keep the dtype: t5's metrics sum in the dtype of the weights.
                "weight": np.array([target[2] for target in targets]),
                "target_length": np.array([target[3] for target in targets], np.int32),
                "score": np.array(list(scores)),
            }
        )

    def as_metric_arguments(self) -> tuple[list[Any], list[Any]]:
        """Targets and scores in the order of the examples, as t5's metrics expect them."""
        columns = self._columns()
        indices = zip(columns["input_index"], columns["choice_index"], strict=True)
        rest = (columns["is_correct"], columns["weight"], columns["target_length"].tolist())
        return list(zip(indices, *rest, strict=True)), list(columns["score"])

    def scores(self, task: str, step: int) -> TaskScores:
        """The pairs as a task's scores at a step, in the order in which they were added."""
        columns: dict[str, Any] = self._columns()
        return TaskScores(task, step, **columns)

    def _columns(self) -> dict[str, np.ndarray]:
        names = self._parts[0]
        return {name: np.concatenate([part[name] for part in self._parts]) for name in names}
