"""Simulates how often each interval of reports and comparisons contains the true value.

It samples suites with known true values and passes them to t0repro.reports.statistics. An outcome
is right if a normal variable is below the quantile of the prompt's true accuracy. `icc` is the
correlation of these variables among an example's prompts (and runs).

    python scripts/bench/coverage.py --suites 2000 > coverage.txt
    python scripts/bench/coverage.py --suites 10000 --resamples 500 --published
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from scipy.special import ndtr, ndtri

from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Interval,
    Outcomes,
    Reweighted,
    difference_over_seeds,
    mean_over_datasets,
    random_prompts_interval,
)

SIZES = (3, 8, 16, 64, 277)
ACCURACIES = (0.02, 0.5, 0.9, 0.98)
CORRELATIONS = (0.0, 0.5, 1.0)
_AT_ONCE = 100  # suites in memory


@dataclasses.dataclass(frozen=True)
class Suite:
    """How a dataset is sampled.

    Attributes:
      examples: rows before templates.
      accuracy: mean of the prompts' true accuracies, 0 to 1.
      icc: correlation of the latent variables of one example's prompts.
      prompts: number of prompts.
      rows: `equal`, or `unequal` where prompts drop rows: half of them at random, and half of them
        most rows of a kind that is harder.
      weighted: whether examples weigh 1, 2 or 4.
      spread: half of the range of the prompts' latent thresholds.
      rare: whether 2% of the examples weigh 50, and are as often wrong as the others are right.
    """

    examples: int
    accuracy: float
    icc: float
    prompts: int = 10
    rows: str = "equal"
    weighted: bool = False
    spread: float = 0.0
    rare: bool = False


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How often an interval contains the true value, in percent, and its mean width."""

    percent: float
    width: float


def latent(rng: np.random.Generator, suite: Suite, count: int, runs: int = 1) -> np.ndarray:
    """Latent variables [runs, count, examples, prompts], correlated within an example."""
    shared = rng.normal(size=(count, suite.examples, 1))
    own = rng.normal(size=(runs, count, suite.examples, suite.prompts))
    return np.sqrt(suite.icc) * shared + np.sqrt(1 - suite.icc) * own


def present(rng: np.random.Generator, suite: Suite, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows each prompt has, and each row's kind: [count, examples, prompts or 1]."""
    shape = (count, suite.examples, suite.prompts)
    hard = rng.random((count, suite.examples, 1)) < 0.4
    if suite.rows == "equal":
        return np.ones(shape, bool), hard
    by_kind = np.arange(suite.prompts) % 2 == 1
    kept = np.where(by_kind, ~hard | (rng.random(shape) < 0.25), rng.random(shape) < 0.7)
    # A prompt without rows would not be a task, so it gets all rows.
    return kept | ~kept.any(-2, keepdims=True), hard


def draw(rng: np.random.Generator, suite: Suite, count: int) -> tuple[Outcomes, np.ndarray]:
    """Outcomes [count, examples, prompts] and the true accuracy of each prompt in percent."""
    offsets = np.linspace(-suite.spread, suite.spread, suite.prompts)
    kept, hard = present(rng, suite, count)
    easy_p = ndtr(ndtri(suite.accuracy) + offsets)
    # Kinds differ only if rows depend on them.
    hard_p = easy_p * 0.8 if suite.rows == "unequal" else easy_p
    share_hard = 0.4
    if suite.rare:
        hard, hard_p = rng.random(hard.shape) < 0.02, 1 - easy_p
        share_hard = 0.02 * 50 / (0.02 * 50 + 0.98)
    right = latent(rng, suite, count)[0] < ndtri(np.where(hard, hard_p, easy_p))
    if suite.rows == "unequal":
        dropped = np.arange(suite.prompts) % 2 == 1
        share_hard = np.where(dropped, 0.4 * 0.25 / (0.6 + 0.4 * 0.25), 0.4)
    truth = 100 * (share_hard * hard_p + (1 - share_hard) * easy_p)
    weight = kept * example_weights(rng, suite, count) * np.where(suite.rare & hard, 50.0, 1.0)
    return Outcomes(right.astype(float), weight), truth


def example_weights(rng: np.random.Generator, suite: Suite, count: int) -> np.ndarray:
    """Weights of the examples, [count, examples, 1]."""
    shape = (count, suite.examples, 1)
    return rng.choice([1.0, 2.0, 4.0], shape) if suite.weighted else np.ones(shape)


class Simulation:
    """Samples suites in parts and evaluates each with the production code."""

    def __init__(self, suites: int, bootstrap: Bootstrap) -> None:
        """Takes the number of suites per line of the table and the settings of the intervals."""
        self.suites, self.bootstrap = suites, bootstrap

    def _weights(self, suite: Suite, name: str = "simulated") -> np.ndarray:
        parts = self.bootstrap.weightings(name, suite.examples)
        return np.concatenate(list(parts))

    def _parts(self, suite: Suite, salt: int = 0) -> Iterator[tuple[np.random.Generator, int]]:
        for first in range(0, self.suites, _AT_ONCE):
            yield np.random.default_rng([salt, first]), min(_AT_ONCE, self.suites - first)

    def _covered(self, found: Reweighted, truth: float) -> np.ndarray:
        low, high = found.ends(self.bootstrap)
        return np.stack([(low <= truth + 1e-9) & (truth - 1e-9 <= high), high - low], -1)

    def dataset(self, suite: Suite) -> dict[str, Coverage]:
        """Intervals of the first prompt's accuracy, and of the mean and the median over prompts."""
        weights, seen = self._weights(suite), {"prompt": [], "mean": [], "median": []}
        for rng, count in self._parts(suite):
            outcomes, truth = draw(rng, suite, count)
            found = outcomes.reweighted(weights)
            for name, figure in (
                ("prompt", lambda values: values[..., -1]),
                ("mean", lambda values: values.mean(-1)),
                ("median", lambda values: np.median(values, -1)),
            ):
                seen[name].append(self._covered(found.each(figure), float(figure(truth))))
        return {name: coverage(parts) for name, parts in seen.items()}

    def group(self, suites: tuple[Suite, ...]) -> Coverage:
        """The interval of the mean over datasets."""
        # Each dataset has its own weightings: in a report they depend on its name.
        weights = [self._weights(suite, f"dataset {at}") for at, suite in enumerate(suites)]
        seen = []
        for first in range(0, self.suites, _AT_ONCE):
            members, truths = [], []
            for at, suite in enumerate(suites):
                rng = np.random.default_rng([at, first])
                outcomes, truth = draw(rng, suite, min(_AT_ONCE, self.suites - first))
                members.append(DatasetMean.of(outcomes, outcomes.reweighted(weights[at])))
                truths.append(truth.mean())
            found = mean_over_datasets(members, self.bootstrap)
            seen.append(self._covered(found, float(np.mean(truths))))
        return coverage(seen)

    def difference(self, suite: Suite, gain: float, unlike: float) -> Coverage:
        """The interval of the difference of two runs' means over prompts.

        Args:
          suite: the first run.
          gain: by how much the second run's true accuracy is higher, -1 to 1.
          unlike: share of outcomes whose latent variable is resampled for the second run.
        """
        weights, seen = self._weights(suite), []
        better = np.clip(suite.accuracy + gain, 0, 1)
        for rng, count in self._parts(suite):
            first, second = latent(rng, suite, count, runs=2)
            # If an example's prompts are one observation, all of them are resampled together.
            whole = rng.random((count, suite.examples, 1))
            each = rng.random(first.shape)
            anew = np.where(rng.random((count, suite.examples, 1)) < suite.icc, whole, each)
            fresh = latent(rng, suite, count)[0]
            second = np.where(anew < unlike, fresh, first)
            kept, _ = present(rng, suite, count)
            weight = kept * example_weights(rng, suite, count)
            both = [
                Outcomes((values < ndtri(p)).astype(float), weight).reweighted(weights)
                for values, p in ((first, suite.accuracy), (second, better))
            ]
            found = both[1].minus(both[0]).each(lambda values: values.mean(-1))
            seen.append(self._covered(found, 100 * (better - suite.accuracy)))
        return coverage(seen)

    def seeds(self, suite: Suite, seeds: tuple[int, int], effects: Effects) -> dict[str, Coverage]:
        """The difference of two models over seeds: our interval, and a crossed bootstrap's.

        Args:
          suite: examples, prompts, accuracy of both models and icc.
          seeds: number of runs of each model.
          effects: of what is random besides examples.
        """
        ours, crossed = [], []
        for rng, count in self._parts(suite):
            for _ in range(count):
                right = effects.draw(rng, suite, seeds)
                outcomes = [[Outcomes(run, np.ones_like(run)) for run in model] for model in right]
                found = difference_over_seeds(*outcomes, self.bootstrap).interval
                ours.append([[found.low <= 0 <= found.high, found.high - found.low]])
                if len(crossed) < self.suites // 10:
                    low, high = crossed_bootstrap(rng, right, self.bootstrap)
                    crossed.append([[low <= 0 <= high, high - low]])
        parts = {"ours": ours, "crossed bootstrap": crossed}
        return {name: coverage([np.array(each) for each in seen]) for name, seen in parts.items()}

    def prompts_as_a_sample(self, suite: Suite, effect: float) -> Coverage:
        """The interval of the mean over all prompts that could have been written.

        Args:
          suite: examples, prompts, mean accuracy, and the share of an outcome's variance that an
            example's prompts have in common (icc).
          effect: standard deviation of a prompt's effect on the latent variable, whose own is 1.
        """
        seen = []
        # The threshold compensates for the prompts' spread, so the mean accuracy is the suite's.
        threshold = ndtri(suite.accuracy) * np.sqrt(1 + effect**2)
        for rng, count in self._parts(suite):
            of_prompts = effect * rng.normal(size=(count, 1, suite.prompts))
            right = (latent(rng, suite, count)[0] < threshold + of_prompts).astype(float)
            for each in right:
                outcomes = Outcomes(each, np.ones_like(each))
                # The interval with fixed prompts is needed only if all outcomes are equal.
                fixed = Interval(0.0, 100.0)
                found = random_prompts_interval(outcomes, fixed, self.bootstrap)
                held = found.low <= 100 * suite.accuracy <= found.high
                seen.append(np.array([[held, found.high - found.low]]))
        return coverage(seen)


@dataclasses.dataclass(frozen=True)
class Effects:
    """Standard deviations of effects on the latent variable, whose own is 1.

    Attributes:
      prompt: of a prompt, the same for both models.
      wording: of a prompt on one model alone.
      seed: of a run.
    """

    prompt: float
    wording: float
    seed: float

    def draw(
        self, rng: np.random.Generator, suite: Suite, seeds: tuple[int, int]
    ) -> list[np.ndarray]:
        """Both models' outcomes, [seeds, examples, prompts] each, of equal true accuracy."""
        scale = np.sqrt(1 + self.prompt**2 + self.wording**2 + self.seed**2)
        of_prompt = self.prompt * rng.normal(size=suite.prompts)
        shared = np.sqrt(suite.icc) * rng.normal(size=(suite.examples, 1))
        found = []
        for count in seeds:
            of_both = of_prompt + self.wording * rng.normal(size=suite.prompts)
            of_seed = self.seed * rng.normal(size=(count, 1, 1))
            own = rng.normal(size=(count, suite.examples, suite.prompts))
            drawn = shared + np.sqrt(1 - suite.icc) * own
            threshold = ndtri(suite.accuracy) * scale + of_both + of_seed
            found.append((drawn < threshold).astype(float))
        return found


def crossed_bootstrap(
    rng: np.random.Generator, right: list[np.ndarray], bootstrap: Bootstrap
) -> tuple[float, float]:
    """Percentiles of the difference over resampled examples, prompts and seeds."""
    _, examples, prompts = right[0].shape

    def weights(count: int) -> np.ndarray:
        return rng.multinomial(count, np.full(count, 1 / count), bootstrap.replicates) / count

    expand_to_examples, of_prompts, means = weights(examples), weights(prompts), []
    for runs in right:
        by_seed = np.einsum("re,sep,rp->rs", expand_to_examples, runs, of_prompts, optimize=True)
        means.append((by_seed * weights(len(runs))).sum(-1))
    low, high = np.percentile(100 * (means[1] - means[0]), [2.5, 97.5])
    return float(low), float(high)


def coverage(parts: list[np.ndarray]) -> Coverage:
    """Share of the intervals that contain the true value, and their mean width."""
    covered, width = np.concatenate(parts).mean(0)
    return Coverage(100 * float(covered), float(width))


def dataset_lines(simulation: Simulation) -> Iterator[str]:
    """Lines of the table of one dataset's intervals."""
    yield "examples accuracy icc rows weights | prompt mean median: coverage (width)"
    variants = [("equal", False, 0.0), ("unequal", False, 0.0), ("equal", True, 0.3)]
    for size, accuracy, icc in itertools.product(SIZES, ACCURACIES, CORRELATIONS):
        for rows, weighted, spread in variants:
            suite = Suite(size, accuracy, icc, 10, rows, weighted, spread)
            cells = (shown(found) for found in simulation.dataset(suite).values())
            kind = f"{rows:7} {'1,2,4' if weighted else 'equal'}"
            yield f"{size:4} {accuracy:5} {icc:4} {kind} | {' '.join(cells)}"


def group_lines(simulation: Simulation) -> Iterator[str]:
    """Lines of the table of means over datasets."""
    yield "datasets examples accuracy icc | coverage (width)"
    for count, size, accuracy, icc in itertools.product((2, 11), SIZES, ACCURACIES, CORRELATIONS):
        found = simulation.group((Suite(size, accuracy, icc, 5),) * count)
        yield f"{count:3} {size:4} {accuracy:5} {icc:4} | {shown(found)}"
    for icc in CORRELATIONS:
        accuracies = np.linspace(0.3, 0.97, len(HELD_OUT))
        suites = zip(HELD_OUT, accuracies, strict=True)
        mixed = tuple(Suite(size, float(p), icc, 5, "unequal") for size, p in suites)
        yield f" 11 56 to 638, 0.3 to 0.97, unequal rows {icc} | {shown(simulation.group(mixed))}"


# Numbers of examples like those of T0's held-out datasets, large ones cut.
HELD_OUT = (56, 56, 100, 104, 104, 277, 277, 277, 638, 638, 638)


def difference_lines(simulation: Simulation) -> Iterator[str]:
    """Lines of the table of differences between two runs."""
    yield "examples accuracy gain unlike icc rows | coverage (width)"
    cases = [
        (0.5, 0.0, 0.0), (0.5, 0.0, 0.1), (0.5, 0.0, 1.0), (0.5, 0.1, 0.2), (0.9, 0.0, 0.1),
        (0.9, 0.05, 0.1), (0.02, 0.96, 0.0), (0.0, 1.0, 0.0),
    ]  # fmt: skip
    variants = [("equal", False, 1), ("equal", False, 10), ("unequal", True, 10)]
    for size, (accuracy, gain, unlike), icc in itertools.product(SIZES, cases, CORRELATIONS):
        for rows, weighted, prompts in variants:
            suite = Suite(size, accuracy, icc, prompts, rows, weighted)
            found = simulation.difference(suite, gain, unlike)
            kind = f"{prompts:2} {rows}"
            yield f"{size:4} {accuracy:5} {gain:5} {unlike:4} {icc:4} {kind:10} | {shown(found)}"


def sample_lines(simulation: Simulation) -> Iterator[str]:
    """Lines of the table of means over random prompts."""
    yield "prompts examples accuracy icc effect | coverage (width)"
    cases = itertools.product((2, 3, 5, 10, 15), (56, 277, 1000), (0.5, 0.8, 0.95), (0.0, 0.2, 0.5))
    for prompts, size, accuracy, effect in cases:
        found = simulation.prompts_as_a_sample(Suite(size, accuracy, 0.8, prompts), effect)
        yield f"{prompts:2} {size:4} {accuracy:5} 0.8 {effect:4} | {shown(found)}"


def seed_lines(simulation: Simulation) -> Iterator[str]:
    """Lines of the table of differences over seeds."""
    yield "seeds prompts examples accuracy icc prompt wording seed | ours, crossed bootstrap"
    sizes = itertools.product(((1, 3), (2, 2), (3, 3), (5, 5), (10, 10)), (5, 10), (56, 277))
    for seeds, prompts, size in sizes:
        for accuracy, effects in (
            (0.5, (0.2, 0.1, 0.0)),
            (0.7, (0.2, 0.1, 0.1)),
            (0.9, (0.2, 0.1, 0.3)),
        ):
            suite = Suite(size, accuracy, 0.8, prompts)
            found = simulation.seeds(suite, seeds, Effects(*effects))
            case = f"{seeds[0]:2} {seeds[1]:2} {prompts:2} {size:4} {accuracy} 0.8 {effects}"
            yield f"{case} | {' '.join(map(shown, found.values()))}"


def published_lines(simulation: Simulation) -> Iterator[str]:
    """The table of docs/evaluation.md: each interval at the settings with its lowest coverage."""
    yield "| interval | suite | coverage | mean width |"
    yield "|---|---|---|---|"
    for suite in (
        Suite(277, 0.5, 1.0, 10, "unequal"),
        Suite(64, 0.5, 0.5, 10, "equal", True, 0.3),
        Suite(16, 0.9, 0.0, 10),
        Suite(56, 0.9, 0.5, 10, rare=True),
    ):
        for name, found in simulation.dataset(suite).items():
            figure = f"{name}'s accuracy" if name == "prompt" else f"{name} over prompts"
            yield line_of(f"a {figure}" if name == "prompt" else figure, suite, found)
    for suite in (Suite(16, 0.5, 0.5, 3, "unequal"), Suite(64, 0.9, 1.0, 5)):
        yield line_of("mean over 11 datasets", suite, simulation.group((suite,) * 11))
    for suite, effect in (
        (Suite(277, 0.5, 0.8, 5), 0.2),
        (Suite(277, 0.8, 0.8, 10), 0.5),
        (Suite(56, 0.95, 0.8, 15), 0.2),
        (Suite(277, 0.5, 0.8, 3), 0.2),
    ):
        found = simulation.prompts_as_a_sample(suite, effect)
        yield line_of(f"prompts as a sample, effect {effect}", suite, found)
    for suite, gain, unlike in (
        (Suite(277, 0.5, 1.0, 10), 0.1, 0.2),
        (Suite(64, 0.5, 1.0, 10, "unequal", True), 0.0, 1.0),
        (Suite(16, 0.9, 0.0, 10), 0.05, 0.1),
    ):
        found = simulation.difference(suite, gain, unlike)
        yield line_of(f"difference of two runs, {100 * gain:.0f} points", suite, found)
    for seeds, effects in (
        ((1, 3), Effects(0.2, 0.1, 0.3)),
        ((3, 3), Effects(0.2, 0.1, 0.1)),
        ((5, 5), Effects(0.2, 0.1, 0.3)),
    ):
        suite = Suite(277, 0.8, 0.8, 10)
        count = f"{seeds[0]} and {seeds[1]} seeds of effect {effects.seed}"
        for name, found in simulation.seeds(suite, seeds, effects).items():
            who = "difference" if name == "ours" else "a crossed bootstrap"
            yield line_of(f"{who}, {count}", suite, found)


def line_of(interval: str, suite: Suite, found: Coverage) -> str:
    """A line of the published table."""
    what = f"{suite.examples} examples, {suite.prompts} prompts, {100 * suite.accuracy:g}% right"
    what += f", icc {suite.icc:g}" + (", rows dropped" if suite.rows == "unequal" else "")
    what += ", weighted" if suite.weighted else ", 2% weigh 50" if suite.rare else ""
    return f"| {interval} | {what} | {found.percent:.1f}% | {found.width:.1f} |"


def shown(found: Coverage) -> str:
    """A cell."""
    mark = "" if 93 <= found.percent <= 98 else "<" if found.percent < 93 else "+"
    return f"{found.percent:5.1f}{mark:1} ({found.width:4.1f})"


EVERY = (seed_lines, sample_lines, group_lines, difference_lines, dataset_lines)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", type=int, default=2000, help="suites of each line")
    parser.add_argument("--resamples", type=int, default=1000, help="weightings of each interval")
    parser.add_argument("--published", action="store_true", help="the documentation's table alone")
    given = parser.parse_args()
    simulation = Simulation(given.suites, Bootstrap(given.resamples))
    every = (published_lines,) if given.published else EVERY
    for lines in every:
        for line in lines(simulation):
            print(line, flush=True)


if __name__ == "__main__":
    main()
