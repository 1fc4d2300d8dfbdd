"""Rank classification: the answer choice with the highest log-likelihood is the prediction.

This follows t5.evaluation.metrics.rank_classification (t5 0.9.4) to give the same numbers. Pairs
are sorted by idx; the first choice wins a tie (np.argmax); if several choices are correct, any of
them counts as right; an example with no correct choice is always wrong. Scores are compared as
float32 if the number of choices is fixed, and in their own type if it varies. T0 sums a choice's
log-likelihood over its tokens and does not normalize by length.

Besides the metric, the result has what a reader needs to check it: the prediction for each example,
ties, margins, examples whose answer is not among the choices, chance and the majority class.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from t0repro.errors import UserError
from t0repro.evaluation.task_scores import ScoredPairs, TaskScores


@dataclasses.dataclass(frozen=True, eq=False)
class RankResult:
    """One task's predictions, example by example, in the order of the examples' index.

    Attributes:
      task: the SeqIO task's name.
      step: the checkpoint's global step.
      example: each example's index in the task.
      predicted: the index of the predicted choice.
      correct: whether that choice is a right answer.
      tie: whether another choice has the same score as the predicted one.
      margin: best score minus the second best, natural log; inf if there is only one choice.
      answerable: whether any choice is a right answer.
      num_choices: number of choices of each example.
      num_correct: right answers among them.
      weight: the example's weight in the metric.
      metrics: t5's metrics in percent: `accuracy`, and with a fixed number of classes `f1`,
        `auc-roc`, `auc-pr` (two) or `mean_<n>class_f1` (more). An undefined metric (all answers
        are of one class) is absent.
      majority: accuracy, in percent, of always picking the choice index that is right most often.
      answer: the index of the first right choice, -1 if there is none.
      confidence: softmax over the choices' scores at the predicted choice, in [0, 1].
      row: each example's row among those of the split, which templates may drop; None if unknown.
    """

    task: str
    step: int
    example: Int[np.ndarray, " examples"]
    predicted: Int[np.ndarray, " examples"]
    correct: Bool[np.ndarray, " examples"]
    tie: Bool[np.ndarray, " examples"]
    margin: Float[np.ndarray, " examples"]
    answerable: Bool[np.ndarray, " examples"]
    num_choices: Int[np.ndarray, " examples"]
    num_correct: Int[np.ndarray, " examples"]
    weight: Float[np.ndarray, " examples"]
    metrics: dict[str, float]
    majority: float
    answer: Int[np.ndarray, " examples"]
    confidence: Float[np.ndarray, " examples"]
    row: Int[np.ndarray, " examples"] | None = None

    @property
    def pairing_key(self) -> Int[np.ndarray, " examples"]:
        """What identifies each example under all prompts: its row or, if unknown, its index."""
        return self.example if self.row is None else self.row

    @property
    def accuracy(self) -> float:
        """Weighted percentage of examples whose predicted choice is right."""
        return self.metrics["accuracy"]

    @property
    def chance(self) -> float:
        """Expected accuracy of choosing at random, in percent: the mean of 1 / number of choices.

        If several choices are right, the numerator is their number. An example with no right answer
        still counts as 1 / number of choices, so that chance is never understated.
        """
        expected = np.maximum(self.num_correct, 1) / self.num_choices
        return float(100 * np.average(expected, weights=self.weight))


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """A task's pairs arranged as [examples, choices]; `real` is false for padding.

    Attributes:
      choice: each choice's index in its example.
      value: the score to compare; -inf for padding.
    """

    example: Int[np.ndarray, " examples"]
    real: Bool[np.ndarray, "examples choices"]
    choice: Int[np.ndarray, "examples choices"]
    is_correct: Bool[np.ndarray, "examples choices"]
    weight: Float[np.ndarray, "examples choices"]
    value: Float[np.ndarray, "examples choices"]


def rank_classification(
    scores: TaskScores, *, num_classes: int | None = None, normalize_by_target_length: bool = False
) -> RankResult:
    """Ranks the answer choices of each example.

    Args:
      scores: the task's pairs, in any order.
      num_classes: the number of choices, if the task fixes it for every example; this adds t5's
        metrics for fixed classes. None if it varies.
      normalize_by_target_length: divide each score by its choice's token count first (T0 does not).

    Raises:
      UserError: if there are no pairs, a score is NaN, an idx occurs twice, the weights sum to
        zero, an example does not have `num_classes` choices, or scores are to be divided by the
        length of a choice without tokens.
    """
    table = _tabulate(scores, num_classes, normalize_by_target_length)
    best = table.value.argmax(-1)
    rows = np.arange(len(best))
    # t5 weights an example by its first choice with fixed classes, else by the predicted choice.
    weight = table.weight[rows, 0 if num_classes else best]
    if not weight.sum() > 0:
        raise UserError(
            f"The weights of {scores.task!r} sum to zero.",
            where=f"step {scores.step}",
            fix="Give the task's examples weights above 0, or leave the task out.",
        )
    correct = table.is_correct[rows, best]
    tie, margin = _ties_and_margins(table, best)
    metrics = {"accuracy": float(100 * np.average(correct, weights=weight))}
    num_correct = table.is_correct.sum(-1)
    if num_classes and num_classes > 1 and (num_correct <= 1).all():
        found = _class_metrics(table, weight)
        metrics |= {name: value for name, value in found.items() if np.isfinite(value)}
    return RankResult(
        task=scores.task,
        step=scores.step,
        example=table.example,
        predicted=table.choice[rows, best],
        correct=correct,
        tie=tie,
        margin=margin,
        answerable=num_correct > 0,
        num_choices=table.real.sum(-1),
        num_correct=num_correct,
        weight=weight,
        metrics=metrics,
        majority=_majority(table, weight),
        answer=np.where(num_correct > 0, table.choice[rows, table.is_correct.argmax(-1)], -1),
        confidence=_confidence(table, best),
    )


def rank_metrics(
    targets: Sequence[Any], scores: Sequence[Any], num_classes: int | None = None
) -> dict[str, float]:
    """What t5.evaluation.metrics.rank_classification returns, to the bit, without TensorFlow.

    Args:
      targets: ((input, choice), is correct, weight, number of tokens) of each pair.
      scores: the pairs' log-likelihoods.
      num_classes: the number of choices, if the task fixes it for every example.

    Raises:
      UserError: as `rank_classification`.
    """
    pairs = ScoredPairs()
    pairs.add(targets, scores)
    table = _tabulate(pairs.scores("", 0), num_classes, normalize=False)
    rows, best = np.arange(len(table.example)), table.value.argmax(-1)
    right = table.is_correct[rows, best]
    if not num_classes:
        # Summed one after the other in the weights' own type, and not averaged in float64.
        weight = table.weight[rows, best]
        hits, total = (np.add.accumulate(each)[-1] for each in (right * weight, weight))
        return {"accuracy": float(100 * hits / total)}
    weight = table.weight[:, 0]
    found = {"accuracy": float(100 * np.average(right, weights=weight))}
    if num_classes > 1 and (table.is_correct.sum(-1) <= 1).all():
        found |= _class_metrics(table, weight)
    return found


def postprocess_rank(
    output: Any, example: Mapping[str, Any] | None = None, is_target: bool = False
) -> Any:
    """What t5.data.postprocessors.rank_classification returns: a score, or a pair's target."""
    if not is_target:
        return output
    assert example is not None
    weight = example.get("weight", 1.0)
    return tuple(example["idx"]), example["is_correct"], weight, len(example["targets"])


def _tabulate(scores: TaskScores, num_classes: int | None, normalize: bool) -> _Table:
    """Sorts the pairs by idx and lays them out as [examples, choices]."""
    # lexsort's last key is the primary one: by input, then by choice.
    order = np.lexsort((scores.choice_index, scores.input_index))
    _check_pairs(scores, order)
    example, start, count = np.unique(
        scores.input_index[order], return_index=True, return_counts=True
    )
    if num_classes and (count != num_classes).any():
        at = int(np.argmax(count != num_classes))
        raise UserError(
            f"Example {example[at]} of {scores.task!r} has {count[at]} choices, not {num_classes}.",
            where=f"step {scores.step}",
            fix="Leave the number of classes open for tasks whose choices vary.",
        )
    place = np.arange(count.max())
    real = place < count[:, None]
    # Padding points at some pair of a later example (or the last pair); `real` masks it below.
    pair = order[np.minimum(start[:, None] + place, len(order) - 1)]
    values = scores.score
    if normalize:
        if not scores.target_length.all():
            at = int(np.argmin(scores.target_length))
            raise empty_choice_error(scores.task, scores.input_index[at], scores.choice_index[at])
        values = values / scores.target_length
    if num_classes:
        # As t5 does: scores that differ only beyond float32 are a tie, which the first choice wins.
        values = values.astype(np.float32)
    return _Table(
        example=example,
        real=real,
        choice=scores.choice_index[pair],
        is_correct=scores.is_correct[pair] & real,
        weight=scores.weight[pair],
        value=np.where(real, values[pair], -np.inf),
    )


def empty_choice_error(task: str, example: int, choice: int) -> UserError:
    """The error for a choice whose score cannot be divided by its number of tokens, which is 0."""
    return UserError(
        f"Task {task!r}: choice {choice} of example {example} has no tokens, so its score cannot be"
        " divided by their number.",
        fix="Rank by the sum of log-likelihoods, as T0 does, or end the targets with EOS.",
    )


def _check_pairs(scores: TaskScores, order: np.ndarray) -> None:
    """Refuses scores that cannot be ranked: no pairs, NaN scores, or a repeated idx."""
    if not len(scores):
        raise UserError(
            f"Task {scores.task!r} has no (input, choice) pairs.",
            where=f"step {scores.step}",
            fix="Check whether the split is empty, or the template drops every example.",
        )
    missing = np.isnan(scores.score)
    if missing.any():
        first = scores.input_index[np.argmax(missing)]
        raise UserError(
            f"Task {scores.task!r}, example {first}, step {scores.step}: the score is NaN"
            f" ({missing.sum()} of {len(scores)} pairs are).",
            fix="Check the checkpoint's loss; if it was scored in bfloat16, compare with float32.",
        )
    inputs, choices = scores.input_index[order], scores.choice_index[order]
    again = (np.diff(inputs) == 0) & (np.diff(choices) == 0)
    if again.any():
        at = int(np.argmax(again))
        raise UserError(
            f"Task {scores.task!r}: the idx ({inputs[at]}, {choices[at]}) occurs more than once.",
            fix="Give each example of the task its own idx, and each choice its position in it.",
        )


def _ties_and_margins(table: _Table, best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether the best score is tied, and its margin over the second best: [examples] each."""
    top = np.take_along_axis(table.value, best[:, None], -1)
    # Padding is -inf, and so is an impossible choice; only `real` tells them apart.
    tie = ((table.value == top) & table.real).sum(-1) > 1
    margin = np.where(tie, 0.0, np.inf)
    if table.value.shape[-1] > 1:
        # After partition the second largest is in its sorted place; the rest need not be
        # sorted.
        second = np.partition(table.value, -2, axis=-1)[:, -2]
        finite = np.isfinite(second)  # inf - inf would be NaN
        margin[finite] = top[finite, 0].astype(np.float64) - second[finite]
    return tie, margin


def _confidence(table: _Table, best: np.ndarray) -> np.ndarray:
    """Softmax over each example's choices, at the best choice: float64 [examples]."""
    top = np.take_along_axis(table.value, best[:, None], -1).astype(np.float64)
    with np.errstate(invalid="ignore"):  # -inf - -inf where no choice is possible at all
        return 1 / np.nansum(np.exp(table.value - top), axis=-1).clip(1)


def _class_metrics(table: _Table, weight: np.ndarray) -> dict[str, float]:
    """t5's additional metrics, in percent, for fixed classes with at most one right answer.

    Computed with scikit-learn from the same arrays, as t5 does. If all answers are of one class,
    a metric may be undefined: scikit-learn warns and returns NaN.
    """
    from sklearn.exceptions import UndefinedMetricWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        warnings.filterwarnings("ignore", message="No positive class found in y_true")
        compute = _binary_metrics if table.value.shape[-1] == 2 else _multiclass_metrics
        found = compute(table, weight)
    return {name: 100 * float(value) for name, value in found.items()}


def _binary_metrics(table: _Table, weight: np.ndarray) -> dict[str, float]:
    import sklearn.metrics

    # A softmax over both choices; subtracting the maximum keeps exp from overflowing.
    odds = np.exp(table.value - table.value.max(-1, keepdims=True))
    positive = odds[:, 1] / odds.sum(-1)
    right = table.is_correct[:, 1]
    answers, predicted = table.is_correct.argmax(-1), table.value.argmax(-1)
    return {
        "f1": sklearn.metrics.f1_score(answers, predicted, sample_weight=weight),
        "auc-roc": sklearn.metrics.roc_auc_score(right, positive, sample_weight=weight),
        "auc-pr": sklearn.metrics.average_precision_score(right, positive, sample_weight=weight),
    }


def _multiclass_metrics(table: _Table, weight: np.ndarray) -> dict[str, float]:
    import sklearn.metrics

    classes = table.value.shape[-1]
    mean_f1 = sklearn.metrics.fbeta_score(
        table.is_correct,
        # The prediction as a one-hot row, as scikit-learn wants it.
        np.eye(classes)[table.value.argmax(-1)],
        beta=1,
        average="macro",
        sample_weight=weight,
    )
    return {f"mean_{classes}class_f1": mean_f1}


def _majority(table: _Table, weight: np.ndarray) -> float:
    """Accuracy, in percent, of always predicting the single best choice index."""
    right = np.bincount(
        table.choice[table.real], weights=(weight[:, None] * table.is_correct)[table.real]
    )
    return float(100 * right.max() / weight.sum())
