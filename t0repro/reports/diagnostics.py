"""Diagnostics beyond accuracy: confused classes, calibration, disagreement between prompts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from t0repro.evaluation.outputs import read_inputs_of
from t0repro.evaluation.rank import RankResult

_BINS = 10


MAX_FLIPS = 5


@dataclasses.dataclass(frozen=True)
class Confusion:
    """How often each choice was predicted for each answer, summed over prompts.

    Attributes:
      labels: the choices, as the first prompt words them.
      counts: [answer][prediction].
      prompts: number of prompts with this many fixed choices.
    """

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    prompts: int

    def __post_init__(self) -> None:
        if {len(self.counts), *map(len, self.counts)} != {len(self.labels)}:
            raise ValueError(f"a table of {len(self.labels)} choices has other rows or columns")


@dataclasses.dataclass(frozen=True)
class CalibrationBin:
    """Examples in a range of confidence; mean confidence and accuracy in percent."""

    confidence: float
    accuracy: float
    examples: int


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Calibration: whether predictions made with 80% confidence are right 80% of the time.

    Attributes:
      bins: of equal width, without empty ones; every example counts once per prompt.
      error: expected calibration error in percentage points: the mean of |accuracy - confidence|
        over bins, weighted by their examples.
    """

    bins: tuple[CalibrationBin, ...]
    error: float


@dataclasses.dataclass(frozen=True)
class PromptFlip:
    """An example that some prompts get right and others wrong.

    Attributes:
      example: its row in the split or, where rows were not recorded, its index in the task.
      right: prompts that get it right, of `prompts`.
      first_input: the example under the first prompt, None if inputs were not written.
    """

    example: int
    right: int
    prompts: int
    first_input: str | None


def confusion(
    results: Sequence[RankResult], choices: Mapping[str, tuple[str, ...] | None]
) -> Confusion | None:
    """Counts predictions by answer, over prompts with the most common number of fixed choices.

    Args:
      results: of one dataset's prompts.
      choices: task -> its fixed choices, None where they vary.
    """
    # Choices that vary between examples have no labels in common.
    fixed = [result for result in results if choices.get(result.task)]
    if not fixed:
        return None
    sizes = [len(choices[result.task] or ()) for result in fixed]
    # Prompts with another number of choices would need their own table.
    size = max(set(sizes), key=sizes.count)
    members = [result for result, found in zip(fixed, sizes, strict=True) if found == size]
    counts = np.zeros((size, size), np.int64)
    for result in members:
        known = result.answer >= 0  # -1: the answer is not among the choices
        # Unlike counts[a, p] += 1, this counts repeated pairs of indices.
        np.add.at(counts, (result.answer[known], result.predicted[known]), 1)
    return Confusion(
        labels=choices[members[0].task] or (),
        counts=tuple(tuple(int(n) for n in row) for row in counts),
        prompts=len(members),
    )


def calibration(results: Sequence[RankResult]) -> Calibration:
    """Accuracy by confidence, over all prompts of a dataset."""
    confidence = np.concatenate([result.confidence for result in results])
    correct = np.concatenate([result.correct for result in results])
    # Put a confidence of exactly 1 into the last bin, not into one of its own.
    place = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
    found = [
        CalibrationBin(
            confidence=float(100 * confidence[place == at].mean()),
            accuracy=float(100 * correct[place == at].mean()),
            examples=int((place == at).sum()),
        )
        for at in range(_BINS)
        if (place == at).any()
    ]
    # Absolute gaps, so that over- and underconfidence do not cancel out.
    gaps = [abs(entry.accuracy - entry.confidence) * entry.examples for entry in found]
    return Calibration(tuple(found), float(sum(gaps) / len(confidence)))


def prompt_flips(
    results: Sequence[RankResult], eval_dir: str | os.PathLike[str]
) -> tuple[tuple[PromptFlip, ...], float]:
    """The examples that prompts disagree on most, and the percentage with any disagreement.

    Compares whether predictions are right, not which choices they are, because prompts order and
    word their choices differently. Only examples that all prompts share are compared.
    """
    if len(results) < 2:
        return (), 0.0
    shared = results[0].pairing_key
    for result in results[1:]:
        shared = np.intersect1d(shared, result.pairing_key)
    if not shared.size:
        return (), 0.0
    # For each shared example, the number of prompts that get it right.
    right = sum(result.correct[np.searchsorted(result.pairing_key, shared)] for result in results)
    right = np.asarray(right, np.int64)
    # Count the smaller side: at most half of the prompts can disagree.
    disagreement = np.minimum(right, len(results) - right)
    # Stable, so that two reports of the same scores list the same examples.
    order = np.argsort(-disagreement, kind="stable")[:MAX_FLIPS]
    chosen = [at for at in order if disagreement[at]]
    # Under the first prompt, whose files number its own examples.
    first = results[0].example[np.searchsorted(results[0].pairing_key, shared)]
    texts = read_inputs_of(eval_dir, results[0].task, [int(first[at]) for at in chosen])
    flips = tuple(
        PromptFlip(int(shared[at]), int(right[at]), len(results), texts.get(int(first[at])))
        for at in chosen
    )
    return flips, float(100 * (disagreement > 0).mean())
