"""The statistics of reports and comparisons: intervals, standard errors and tests over examples.

Examples are the random sample; prompts are held fixed, except in `random_prompts_interval` and in
comparisons over seeds. An example under several prompts is one observation, whatever rows each
prompt has: outcomes are paired by the example's row, or by its index where rows are unknown.

Every interval of an accuracy is Gaffke's. Examples get random weights (the Bayesian bootstrap). The
low end adds one further example that is wrong under every prompt, and the high end one that is
right. Resampling alone cannot give an interval: two examples that are both right are right in every
resample. For a single prompt, Gaffke's interval is Clopper and Pearson's exact one. For the
difference of two runs, the further example is one that only the first run gets right (low end) or
only the second (high end). `scripts/bench/coverage.py` simulates how often each interval contains
the truth.

Sources: N. Gaffke, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a
nonnegative variable", Mathematical Methods of Statistics 14 (2005); W. Hoeffding, "On the
distribution of the number of successes in independent trials", Annals of Mathematical Statistics 27
(1956), for means over datasets.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist

import numpy as np
from jaxtyping import Float

from t0repro.errors import UserError
from t0repro.evaluation.rank import RankResult

_EXACT_EXAMPLES = 100  # up to this many differing examples, McNemar's test is exact
_FEW_PROMPTS = 5
_POWER = 0.8  # of a difference that counts as detectable
_WEIGHTS_AT_ONCE = 2_000_000  # weights in memory at once, 16 MB


@dataclasses.dataclass(frozen=True)
class Interval:
    """A confidence interval, in percent."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Options of the intervals: random weightings of the examples, with prompts held fixed.

    The smallest p-value is one over the number of replicates, and Holm's correction multiplies it
    by the number of datasets: 4,000 replicates suffice for 100 datasets.
    """

    replicates: int = 4000
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not (self.replicates >= 1 and self.seed >= 0 and 0 < self.confidence < 1):
            raise UserError(
                f"There are no intervals with {self.replicates} weightings, seed {self.seed} and"
                f" confidence {self.confidence}.",
                fix="Give at least 1 weighting, a seed from 0 on and a confidence between 0 and 1.",
            )

    @property
    def percent(self) -> str:
        """The confidence of the intervals in words, as in `95%`."""
        return f"{100 * self.confidence:g}%"

    def weightings(
        self, dataset: str, examples: int
    ) -> Iterator[Float[np.ndarray, "some examples+1"]]:
        """Random weights of a dataset's examples and of one more, in `replicates` rows.

        After division by its sum, a row is uniform over the simplex. The seed includes a checksum
        of the name, so a dataset's intervals do not depend on the other datasets in the report.
        """
        seed = [self.seed, zlib.crc32(dataset.encode()), examples, 1]
        generator = np.random.default_rng(seed)
        rows = max(1, _WEIGHTS_AT_ONCE // (examples + 1))
        for first in range(0, self.replicates, rows):
            size = (min(rows, self.replicates - first), examples + 1)
            yield generator.standard_exponential(size)


@dataclasses.dataclass(frozen=True)
class Reweighted:
    """Figures in percent, one for each random weighting of the examples.

    Attributes:
      plain: [..., replicates] or [..., replicates, prompts], of the available examples.
      lower: the same with a further example at its worst; low ends are percentiles of these.
      upper: the same with a further example at its best; high ends are percentiles of these.
    """

    plain: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    def each(self, function: Callable[[np.ndarray], np.ndarray]) -> Reweighted:
        """Applies an increasing function to all three, such as a mean over prompts."""
        return Reweighted(function(self.plain), function(self.lower), function(self.upper))

    def minus(self, other: Reweighted) -> Reweighted:
        """The difference between two sets of figures with the same weightings."""
        return Reweighted(
            self.plain - other.plain, self.lower - other.upper, self.upper - other.lower
        )

    def ends(self, bootstrap: Bootstrap) -> tuple[np.ndarray, np.ndarray]:
        """Both ends of the central intervals, which leave out equal parts on either side."""
        tail = 50 * (1 - bootstrap.confidence)
        low = np.percentile(self.lower, tail, axis=-1)
        return low, np.percentile(self.upper, 100 - tail, axis=-1)

    def p_above(self, value: float) -> float:
        """One-sided p-value of the claim that the figure is above a value.

        If the interval begins above the value, the p-value is at most half of 1 - confidence.
        """
        # Plus one, because no number of random weightings shows that a p-value is 0.
        return float((1 + (self.lower <= value).sum()) / (1 + self.lower.size))

    def p_below(self, value: float) -> float:
        """One-sided p-value of the claim that the figure is below a value."""
        return float((1 + (self.upper >= value).sum()) / (1 + self.upper.size))

    def interval(self, bootstrap: Bootstrap) -> Interval:
        """The interval, if there is one figure per replicate."""
        low, high = self.ends(bootstrap)
        return Interval(float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """A dataset's outcomes with its prompts side by side, paired by the examples' rows.

    Attributes:
      right: [..., examples, prompts], 1 where the prediction is right.
      weight: the same shape, the example's weight; 0 where the prompt does not have the example.
    """

    right: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, results: Sequence[RankResult], examples: np.ndarray | None = None) -> Outcomes:
        """The outcomes of a dataset's prompts on its examples, which ascend by row, or index."""
        if examples is None:
            examples = np.unique(np.concatenate([result.pairing_key for result in results]))
        right = np.zeros((len(examples), len(results)))
        weight = np.zeros_like(right)
        for column, result in enumerate(results):
            # Templates drop different rows, so a position does not identify an example.
            rows = np.searchsorted(examples, result.pairing_key)
            right[rows, column], weight[rows, column] = result.correct, result.weight
        return cls(right, weight)

    @property
    def examples(self) -> int:
        """Distinct examples of all prompts."""
        return self.right.shape[-2]

    @property
    def same_rows(self) -> bool:
        """Whether all prompts have the same examples."""
        return bool((self.weight > 0).all())

    @property
    def share(self) -> np.ndarray:
        """Each example's share of each prompt's weight, [..., examples, prompts]."""
        return self.weight / self.weight.sum(-2, keepdims=True)

    @property
    def accuracy(self) -> np.ndarray:
        """Each prompt's accuracy in percent, [..., prompts]."""
        return 100 * (self.weight * self.right).sum(-2) / self.weight.sum(-2)

    @property
    def largest_share(self) -> np.ndarray:
        """The largest share of a single example in the mean over prompts, [...]."""
        return self.share.mean(-1).max(-1)

    def reweighted(self, weights: Float[np.ndarray, "replicates examples+1"]) -> Reweighted:
        """Each prompt's accuracy under each weighting, [..., replicates, prompts]."""
        drawn, one_more = weights[:, :-1], weights[:, -1:]
        right, wrong = (drawn @ (self.weight * at) for at in (self.right, 1 - self.right))
        # The further example weighs as much as the prompt's heaviest. With the average weight,
        # intervals with unequal weights contained the truth too rarely.
        further = one_more * self.weight.max(-2, keepdims=True)
        total = right + wrong
        return Reweighted(
            100 * right / total,
            100 * right / (total + further),
            # Compute it from wrong predictions, so that none gives exactly 100.
            100 - 100 * wrong / (total + further),
        )

    def standard_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Standard error of each prompt's accuracy and of their mean, in percentage points.

        By linearization: an example moves a prompt's accuracy by its share of the weight times its
        distance from the accuracy. For one prompt with equal weights, this gives the square root of
        p * (1 - p) / (examples - 1).
        """
        moves = self.share * (100 * self.right - self.accuracy[..., None, :])
        each = root_of_squares(moves, (self.weight > 0).sum(-2))
        return each, root_of_squares(moves.mean(-1), self.examples, axis=-1)

    def random_prompts_error(self) -> tuple[np.ndarray, np.ndarray]:
        """Standard error of the mean with prompts a random sample too, and degrees of freedom.

        Needs two prompts. The variance is that of the mean with prompts fixed, plus the variance of
        the prompts' accuracies divided by their number. The degrees of freedom are Satterthwaite's.
        With fewer than five prompts, they are the number of prompts minus one, because intervals
        with Satterthwaite's contained the truth too rarely in simulation.
        """
        prompts = self.right.shape[-1]
        _, fixed = self.standard_errors()
        expand_to_examples = fixed**2
        of_prompts = self.accuracy.var(-1, ddof=1) / prompts
        total = expand_to_examples + of_prompts
        terms = expand_to_examples**2 / max(self.examples - 1, 1) + of_prompts**2 / (prompts - 1)
        # If neither examples nor prompts vary, this is zero over zero.
        freedom = total**2 / np.maximum(terms, np.finfo(float).tiny)
        if prompts < _FEW_PROMPTS:
            freedom = np.full_like(freedom, prompts - 1)
        return np.sqrt(total), np.maximum(freedom, prompts - 1)


def root_of_squares(moves: np.ndarray, examples: np.ndarray | int, axis: int = -2) -> np.ndarray:
    """Square root of the sum over examples of squared moves, which have a mean of zero."""
    # One example has no spread: avoid zero over zero.
    return np.sqrt((moves**2).sum(axis) * examples / np.maximum(np.subtract(examples, 1), 1))


def random_prompts_interval(
    outcomes: Outcomes, fixed: Interval, bootstrap: Bootstrap
) -> Interval | None:
    """The interval of the mean over all prompts that could have been written, in percent.

    Computed on the logit scale, where the mean's error is nearly symmetric: a percentage near 100
    has more room below than above. None with a single prompt, which shows nothing about others.

    Args:
      outcomes: One dataset's, [examples, prompts].
      fixed: The interval with prompts held fixed; returned if all outcomes are alike.
      bootstrap: The confidence.
    """
    if outcomes.right.shape[-1] < 2:
        return None
    error, freedom = outcomes.random_prompts_error()
    mean = outcomes.accuracy.mean() / 100
    # The logit of 0 or 1 is infinite.
    if not (error > 0 and 0 < mean < 1):
        return fixed
    reach = t_quantile(float(freedom), bootstrap.confidence) * error / 100
    # The slope of the logit is 1 / (mean * (1 - mean)).
    logit, reach = math.log(mean / (1 - mean)), reach / (mean * (1 - mean))
    low, high = (100 / (1 + math.exp(-(logit + side * reach))) for side in (-1, 1))
    return Interval(float(low), float(high))


def t_quantile(freedom: float, confidence: float) -> float:
    """The bound on a Student's t variable's absolute value that holds with this probability."""
    angles, below = _t_angles(freedom)
    angle = np.interp(confidence, below, angles)
    return math.sqrt(freedom) * math.tan(angle)


def t_p_value(freedom: float, t: float) -> float:
    """The probability that a Student's t variable is at least as far from 0 as `t`."""
    angles, below = _t_angles(freedom)
    return float(1 - np.interp(math.atan(abs(t) / math.sqrt(freedom)), angles, below))


def _t_angles(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Angles with t = sqrt(freedom) * tan(angle), and the probability of |t| below each."""
    # The density of the angle is a power of its cosine.
    angles = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return angles, below / below[-1]


@dataclasses.dataclass(frozen=True)
class SeedsDifference:
    """The difference of two models trained with several seeds, in percentage points.

    Attributes:
      difference: between the means over seeds and prompts.
      interval: if examples, prompts and seeds are random samples.
      p_value: two-sided, for the claim that there is no difference.
    """

    difference: float
    interval: Interval
    p_value: float


def difference_over_seeds(
    first: Sequence[Outcomes], second: Sequence[Outcomes], bootstrap: Bootstrap
) -> SeedsDifference:
    """Compares two models whose runs differ by seed: examples, prompts and seeds are all random.

    Examples and prompts are crossed with the models and with each model's seeds. So the variance is
    the sum of the variances of the means over each factor's levels: the difference over examples,
    the difference over prompts (absent with a single prompt), and the models' accuracies over
    seeds, whose variance is assumed equal since one model may have a single run. The quantile is
    Student's with Satterthwaite's degrees of freedom. A bootstrap that resamples all three factors
    contains the truth too rarely with few seeds (`scripts/bench/coverage.py`).

    Args:
      first: each run's outcomes, [examples, prompts], with the same examples and prompts in all.
      second: the other model's.
      bootstrap: the confidence.

    Raises:
      ValueError: if neither model has two runs.
    """
    runs = {1.0: second, -1.0: first}
    of_example = sum(
        sign * np.mean([(o.share * o.right).mean(-1) for o in found], 0)
        for sign, found in runs.items()
    )
    of_prompt = sum(sign * np.mean([o.accuracy for o in found], 0) for sign, found in runs.items())
    assert isinstance(of_example, np.ndarray) and isinstance(of_prompt, np.ndarray)
    examples, prompts = len(of_example), len(of_prompt)
    moves = 100 * (of_example - of_example.mean())
    # Each entry: a variance and its degrees of freedom.
    terms = [(float((moves**2).sum() * examples / max(examples - 1, 1)), examples - 1)]
    if prompts > 1:
        terms.append((float(of_prompt.var(ddof=1)) / prompts, prompts - 1))
    means = [[float(o.accuracy.mean()) for o in found] for found in (first, second)]
    seeds = sum(len(each) - 1 for each in means)
    if not seeds:
        raise ValueError("Neither model was trained with two seeds.")
    # np.var divides by the number of runs, so this adds up sums of squares.
    pooled = sum(len(each) * float(np.var(each)) for each in means) / seeds
    terms.append((pooled * sum(1 / len(each) for each in means), seeds))
    total = sum(variance for variance, _ in terms)
    difference = float(of_prompt.mean())
    if not total:
        # Nothing varies. Another example may still differ, as in Clopper and Pearson's interval of
        # equal outcomes; the p-value is the sign test's.
        other = 1 - ((1 - bootstrap.confidence) / 2) ** (1 / examples)
        low, high = (difference + other * (end - difference) for end in (-100.0, 100.0))
        return SeedsDifference(
            difference, Interval(low, high), min(1.0, 2 * 0.5**examples) if difference else 1.0
        )
    freedom = total**2 / sum(variance**2 / max(free, 1) for variance, free in terms)
    # As for prompts: few levels estimate their variance too poorly for Satterthwaite's rule.
    few = [free for _, free in terms[1:] if free < _FEW_PROMPTS - 1]
    freedom = min([freedom, *few])
    error = math.sqrt(total)
    reach = t_quantile(freedom, bootstrap.confidence) * error
    interval = Interval(max(difference - reach, -100.0), min(difference + reach, 100.0))
    return SeedsDifference(difference, interval, t_p_value(freedom, difference / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    If every adjusted p-value up to alpha counts as significant, the probability of any false claim
    is at most alpha.
    Source: S. Holm, "A simple sequentially rejective multiple test procedure",
    Scandinavian Journal of Statistics 6 (1979).
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda at: p_values[at])):
        # Never less than the adjusted value of a smaller p-value.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted


def detectable_difference(standard_error: float, bootstrap: Bootstrap) -> float | None:
    """The smallest difference that a comparison finds with a power of 80%.

    None if nothing varies: the sample then does not show how much another would.

    Args:
      standard_error: That of the difference.
      bootstrap: The confidence at which a difference counts as found.
    """
    if not standard_error:
        return None
    quantile = NormalDist().inv_cdf
    return (quantile((1 + bootstrap.confidence) / 2) + quantile(_POWER)) * standard_error


def describe_detectable(points: float | None) -> str:
    """`detectable_difference` for a table's cell; no two accuracies differ by more than 100."""
    if points is None:
        return ""
    return f"{points:.1f}" if points <= 100 else "none"


def reweighted(outcomes: Outcomes, dataset: str, bootstrap: Bootstrap) -> Reweighted:
    """Accuracy of each prompt of a dataset under each weighting, [replicates, prompts]."""
    found = [outcomes.reweighted(w) for w in bootstrap.weightings(dataset, outcomes.examples)]
    return Reweighted(
        np.concatenate([part.plain for part in found]),
        np.concatenate([part.lower for part in found]),
        np.concatenate([part.upper for part in found]),
    )


@dataclasses.dataclass(frozen=True)
class DatasetMean:
    """A dataset's mean over prompts, in the form that the mean over datasets needs; in percent.

    Attributes:
      estimate: [...].
      reweighted: [..., replicates].
      examples: number of examples.
      largest_share: the largest share of a single example in the mean, [...].
    """

    estimate: np.ndarray
    reweighted: Reweighted
    examples: int
    largest_share: np.ndarray

    @classmethod
    def of(cls, outcomes: Outcomes, found: Reweighted) -> DatasetMean:
        """The mean of prompts' outcomes, given `found`, their accuracies under each weighting."""
        return cls(
            outcomes.accuracy.mean(-1),
            found.each(lambda values: values.mean(-1)),
            outcomes.examples,
            outcomes.largest_share,
        )


def mean_over_datasets(datasets: Sequence[DatasetMean], bootstrap: Bootstrap) -> Reweighted:
    """The mean over datasets with equal weights and separate examples.

    There is one further example for all datasets, with the largest share of any example in the
    mean, because not all datasets are at their worst at once. (With equally many examples that are
    all right, this is Clopper and Pearson's interval of all of them together, which holds for any
    accuracies of the datasets, by Hoeffding's theorem.) Weightings spread less than samples of few
    examples, by (n - 1) / (n + 1) in variance. In a dataset's own interval its further example
    makes up for that; here, a factor does.
    """
    if len(datasets) == 1:
        return datasets[0].reweighted
    spread = [
        entry.estimate[..., None]
        + (entry.reweighted.plain - entry.estimate[..., None])
        * math.sqrt((entry.examples + 1) / max(entry.examples - 1, 1))
        for entry in datasets
    ]
    plain = np.mean(spread, axis=0)
    largest = np.max([entry.largest_share for entry in datasets], axis=0) / len(datasets)
    generator = np.random.default_rng([bootstrap.seed, len(datasets)])
    # The share of one exponential weight among n + 1 is distributed as Beta(1, n).
    further = generator.beta(1, 1 / largest[..., None], plain.shape)
    lower = np.clip(plain * (1 - further), 0, 100)
    return Reweighted(plain, lower, np.clip(plain * (1 - further) + 100 * further, 0, 100))


def mcnemar(differences: np.ndarray) -> float:
    """Two-sided p-value of McNemar's test over clusters; 1 if nothing differs.

    Args:
      differences: for each example, the number of prompts under which only the second run is right,
        minus the number under which only the first is.

    The statistic is (sum of d)**2 / sum of d**2, chi-squared with one degree of freedom; with one
    prompt that is McNemar's own, (b - c)**2 / (b + c). If at most 100 examples differ, the test is
    exact: the fraction of all ways to swap the runs on each of them whose sum of d is as large;
    with one prompt that is the binomial test.
    """
    sizes = np.abs(differences[differences != 0]).astype(np.int64)
    total = abs(int(differences.sum()))
    if len(sizes) > _EXACT_EXAMPLES:
        # The upper tail of chi-squared with one degree of freedom.
        return math.erfc(math.sqrt(total**2 / float((sizes**2).sum()) / 2))
    # Under the null hypothesis, either run could be the better one on each of these: compute the
    # distribution of their sum, from -sum(sizes) to sum(sizes).
    probability = np.ones(1)
    for size in sizes:
        either = np.zeros(2 * size + 1)
        either[[0, -1]] = 0.5
        probability = np.convolve(probability, either)
    reach = np.abs(np.arange(len(probability)) - len(probability) // 2)
    return float(min(1.0, probability[reach >= total].sum()))
