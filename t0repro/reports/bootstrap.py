"""Resamples of the examples, for a report's standard errors and confidence intervals.

Resampling alone cannot make an interval: two examples that are both right are right in every
resample. So the interval of an accuracy is Gaffke's. Examples get random weights (the Bayesian
bootstrap), its low end is taken with one further example that is wrong under every prompt, and its
high end with one that is right. For a single prompt this is Clopper and Pearson's exact interval.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from t0repro.evaluation.rank import RankResult


@dataclasses.dataclass(frozen=True)
class Interval:
    """A confidence interval, in percent."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """How intervals are computed: percentiles over resamples of examples, prompts held fixed."""

    replicates: int = 1000
    seed: int = 0
    confidence: float = 0.95

    @property
    def percent(self) -> str:
        """The intervals' confidence in words, as in `95%`."""
        return f"{100 * self.confidence:g}%"

    def interval(
        self,
        values: Float[np.ndarray, " replicates"],
        upper: Float[np.ndarray, " replicates"] | None = None,
    ) -> Interval:
        """The central interval that holds `confidence` of the resampled values.

        Args:
          values: what the low end is a percentile of.
          upper: what the high end is a percentile of, if not the same.
        """
        # 50 rather than 100: half of what is left out is on each side.
        tail = 50 * (1 - self.confidence)
        high = np.percentile(values if upper is None else upper, 100 - tail)
        return Interval(float(np.percentile(values, tail)), float(high))

    def generator(self, name: str, *more: int) -> np.random.Generator:
        """Random numbers for one dataset.

        The seed includes a checksum of the name, so a dataset's intervals do not depend on which
        other datasets are in the report.
        """
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), *more])


def resampled_accuracy(
    results: Sequence[RankResult], dataset: str, bootstrap: Bootstrap
) -> tuple[Float[np.ndarray, "replicates prompts"], bool]:
    """Accuracy in percent of each prompt in each resample, and whether all share one resample.

    Prompts with the same number of examples are assumed to have the same examples in the same order
    and are resampled together, because an example that is hard under one prompt tends to be hard
    under another. A template that drops examples is resampled separately.
    """
    accuracy = np.empty((bootstrap.replicates, len(results)))
    for columns, weight, right in _by_size(results):
        size = len(weight)
        # The size is in the seed: the same examples for all prompts of the group.
        generator = bootstrap.generator(dataset, size)
        for replicate in range(bootstrap.replicates):
            # With replacement, as many as there are.
            drawn = generator.integers(0, size, size)
            # [examples] how often each example was drawn; counts @ weight is the resample's total
            counts = np.bincount(drawn, minlength=size)
            accuracy[replicate, columns] = 100 * (counts @ right) / (counts @ weight)
    return accuracy, len({len(result.example) for result in results}) == 1


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Accuracies in percent whose low and high percentiles are the ends of an interval.

    Attributes:
      lower: [replicates, ...] with one further example, which is wrong.
      upper: [replicates, ...] with one further example, which is right.
    """

    lower: np.ndarray
    upper: np.ndarray

    def each(self, function: Callable[[np.ndarray], np.ndarray]) -> Bounds:
        """Applies a function to both, such as a mean over prompts."""
        return Bounds(function(self.lower), function(self.upper))

    def interval(self, bootstrap: Bootstrap) -> Interval:
        """The interval, where there is one accuracy in each replicate."""
        return bootstrap.interval(self.lower, self.upper)


def accuracy_bounds(results: Sequence[RankResult], dataset: str, bootstrap: Bootstrap) -> Bounds:
    """Bounds of the accuracy of each prompt, [replicates, prompts].

    Prompts with the same number of examples share their weights, as in `resampled_accuracy`.
    """
    lower = np.empty((bootstrap.replicates, len(results)))
    upper = np.empty_like(lower)
    for columns, weight, right in _by_size(results):
        size = len(weight)
        generator = bootstrap.generator(dataset, size, 1)
        # The further example counts as much as one does on average.
        further = weight.mean(0)
        for replicate in range(bootstrap.replicates):
            # Uniform over the simplex once they are divided by their sum.
            drawn = generator.standard_exponential(size + 1)
            total = drawn[:-1] @ weight + drawn[-1] * further
            lower[replicate, columns] = 100 * (drawn[:-1] @ right) / total
            upper[replicate, columns] = 100 - 100 * (drawn[:-1] @ (weight - right)) / total
    return Bounds(lower, upper)


def _by_size(
    results: Sequence[RankResult],
) -> Iterator[
    tuple[list[int], Float[np.ndarray, "examples group"], Float[np.ndarray, "examples group"]]
]:
    """Groups of prompts with equally many examples: columns, weights, and weights where right."""
    sizes = [len(result.example) for result in results]
    for size in sorted(set(sizes)):
        columns = [i for i, count in enumerate(sizes) if count == size]
        weight = np.stack([results[i].weight for i in columns], -1)
        yield columns, weight, weight * np.stack([results[i].correct for i in columns], -1)
