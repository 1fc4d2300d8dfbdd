"""Percentile bootstrap over examples, for a report's confidence intervals."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

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

    def interval(self, values: Float[np.ndarray, " replicates"]) -> Interval:
        """The central interval that holds `confidence` of the resampled values."""
        # 50 rather than 100: half of what is left out is on each side.
        tail = 50 * (1 - self.confidence)
        low, high = np.percentile(values, [tail, 100 - tail])
        return Interval(float(low), float(high))

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
    sizes = [len(result.example) for result in results]
    accuracy = np.empty((bootstrap.replicates, len(results)))
    # Groups of prompts that share their examples.
    for size in sorted(set(sizes)):
        columns = [i for i, count in enumerate(sizes) if count == size]
        weight = np.stack([results[i].weight for i in columns], -1)
        right = weight * np.stack([results[i].correct for i in columns], -1)
        # The size is in the seed: the same examples for all prompts of the group.
        generator = bootstrap.generator(dataset, size)
        for replicate in range(bootstrap.replicates):
            # With replacement, as many as there are.
            drawn = generator.integers(0, size, size)
            # [examples] how often each example was drawn; counts @ weight is the resample's total
            counts = np.bincount(drawn, minlength=size)
            accuracy[replicate, columns] = 100 * (counts @ right) / (counts @ weight)
    return accuracy, len(set(sizes)) == 1
