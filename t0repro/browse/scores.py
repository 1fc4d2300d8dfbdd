"""What a model's scores of a row's choices mean: probabilities, a prediction, an accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from t0repro.browse.shown_rows import ShownRow
from t0repro.reports.statistics import Bootstrap, Outcomes, reweighted


@dataclasses.dataclass(frozen=True)
class Scores:
    """A row's scores.

    Attributes:
      probabilities: Softmax over the choices' log-likelihoods, in [0, 1].
      predicted: The index of the choice with the highest.
      right: Whether it is the target.
    """

    probabilities: tuple[float, ...]
    predicted: int
    right: bool


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The accuracy over the rows shown, in percent, with its 95% interval."""

    right: int
    examples: int
    low: float
    high: float

    @property
    def percent(self) -> float:
        """The share that is right, in percent."""
        return 100 * self.right / self.examples


def rank_choices(values: np.ndarray, row: ShownRow) -> Scores:
    """The scores of a row from the log-likelihoods of its choices, [choices]."""
    assert row.example is not None and row.example.choices is not None
    likelihoods = np.exp(values.astype(np.float64) - values.max())
    predicted = int(values.argmax())
    right = row.example.choices[predicted] == row.example.targets
    return Scores(tuple((likelihoods / likelihoods.sum()).tolist()), predicted, right)


def accuracy_of(scores: Sequence[Scores | None]) -> Accuracy | None:
    """The accuracy of the rows with scores; None if there are none. The interval is Gaffke's."""
    right = np.array([[each.right] for each in scores if each is not None], float)
    if not len(right):
        return None
    bootstrap = Bootstrap()
    found = reweighted(Outcomes(right, np.ones_like(right)), "browse", bootstrap)
    interval = found.each(lambda figures: figures.mean(-1)).interval(bootstrap)
    return Accuracy(int(right.sum()), len(right), interval.low, interval.high)


def differ(one: Scores | None, other: Scores | None) -> bool:
    """Whether two sides' predictions on a row differ, or one of them is wrong."""
    if one is None or other is None:
        return one is not other
    return (one.right, one.predicted) != (other.right, other.predicted)
