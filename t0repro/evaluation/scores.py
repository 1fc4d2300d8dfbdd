"""A task's scored (input, choice) pairs as arrays, from which metrics and reports are computed.

They come from memory if this process scored the pairs, and otherwise from an evaluation's files
(`outputs.read_task_scores`). Both give the same numbers, bit for bit.
"""

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

    A target is what t5.data.postprocessors.rank_classification makes of an example:
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

    def task_scores(self, task: str, step: int) -> TaskScores:
        """All pairs, sorted by input, then choice, as `read_task_scores` would read them."""
        columns = self._columns()
        order = np.lexsort((columns["choice_index"], columns["input_index"]))
        sorted_columns = {name: values[order] for name, values in columns.items()}
        return TaskScores(
            task=task,
            step=step,
            input_index=sorted_columns["input_index"].astype(np.int64),
            choice_index=sorted_columns["choice_index"].astype(np.int64),
            is_correct=sorted_columns["is_correct"],
            weight=as_written(sorted_columns["weight"]),
            target_length=sorted_columns["target_length"].astype(np.int64),
            score=as_written(sorted_columns["score"]),
        )

    def for_metrics(self) -> tuple[list[Any], list[Any]]:
        """Targets and scores in the order of the examples, as t5's metrics take them."""
        columns = self._columns()
        indices = zip(columns["input_index"], columns["choice_index"], strict=True)
        rest = (columns["is_correct"], columns["weight"], columns["target_length"].tolist())
        return list(zip(indices, *rest, strict=True)), list(columns["score"])

    def _columns(self) -> dict[str, np.ndarray]:
        names = self._parts[0]
        return {name: np.concatenate([part[name] for part in self._parts]) for name in names}


def as_written(values: np.ndarray) -> Float[np.ndarray, " values"]:
    """Converts values to the float64 that parsing their text gives.

    Files hold the shortest decimal that identifies a float32. A report must not depend on whether
    its numbers came from a file or from memory, so numbers in memory take that decimal value too
    (it differs from the float32 in the eighth digit).
    """
    return np.array([float(str(value)) for value in values], np.float64)
