"""Several models on the same tasks: which differ significantly, and on which datasets.

Runs with the same label are one model, trained with several seeds. McNemar's test compares two
models with one run each. If one has several, the test treats seeds, prompts and examples as random
samples (statistics.difference_over_seeds). Holm's correction covers all pairs of models on all
datasets, so the probability of any false claim is at most 1 - confidence.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.rank import RankResult
from t0repro.reports.comparison import RunComparison, RunFacts, unlike_tasks
from t0repro.reports.prompts import PromptInfo, tasks_by_dataset
from t0repro.reports.ranking import rank_folder
from t0repro.reports.results import CLEAR
from t0repro.reports.run import Run
from t0repro.reports.statistics import (
    Bootstrap,
    Interval,
    Outcomes,
    difference_over_seeds,
    holm,
    mcnemar,
    reweighted,
)


@dataclasses.dataclass(frozen=True)
class ModelPair:
    """Two models on one dataset.

    Attributes:
      a: the first model's label; b the second's.
      difference: percentage points by which the second is better.
      interval: over examples, prompts and seeds; None if neither has several seeds.
      p_value: two-sided, of no difference.
      p_adjusted: with Holm's correction over all pairs of models on all datasets.
    """

    a: str
    b: str
    difference: float
    p_value: float
    interval: Interval | None = None
    p_adjusted: float = 1.0


@dataclasses.dataclass(frozen=True)
class DatasetModels:
    """All models on one dataset.

    Attributes:
      accuracy: label -> mean over prompts and seeds, in percent, of the examples of all runs.
      over_seeds: label -> standard deviation of its runs' accuracies, for models with several.
      pairs: every pair of models.
      below_chance: models of which every run is clearly below chance, with Holm's correction over
        all runs and datasets.
      alike: the largest sets of models without a significant difference, the best model's first; a
        model that differs from all others forms its own set.
    """

    dataset: str
    accuracy: dict[str, float]
    over_seeds: dict[str, float]
    pairs: tuple[ModelPair, ...]
    below_chance: tuple[str, ...] = ()
    alike: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Models:
    """Several models compared with each other.

    Attributes:
      seeds: label -> number of runs, in the order of the labels.
      datasets: by name.
      never_apart: the largest sets of models in which no two differ significantly on any dataset.
    """

    seeds: dict[str, int]
    datasets: tuple[DatasetModels, ...]
    never_apart: tuple[tuple[str, ...], ...]
    bootstrap: Bootstrap = Bootstrap()


def compare_models(
    runs: Sequence[Run], prompts: Mapping[str, PromptInfo], bootstrap: Bootstrap
) -> Models:
    """Compares every pair of models on the tasks and examples that all runs have.

    Args:
      runs: at least two labels; runs with the same label are a model's seeds.
      prompts: task name -> its prompt, to group tasks by dataset; may be empty.
      bootstrap: the confidence.

    Raises:
      UserError: if all runs have one label, or they share no task.
    """
    labels = list(dict.fromkeys(run.label for run in runs))
    if len(labels) < 2:
        raise UserError(
            f"All runs have the label {labels[0]}: they are one model's seeds.",
            fix="Name the runs of a second model with another label.",
        )
    found = [
        {result.task: result for result in rank_folder(run.eval_dir, prompts, step=run.step)}
        for run in runs
    ]
    shared = sorted(set.intersection(*map(set, found)))
    for run in runs[1:]:
        # `compare_runs` names them.
        unlike = unlike_tasks(runs[0], run, shared)
        shared = [task for task in shared if task not in unlike]
    if not shared:
        raise UserError(
            "No task was evaluated in every run with the same prompt and rows.",
            where=" and ".join(str(run.eval_dir) for run in runs),
            fix="Evaluate the same mixture in all.",
        )
    # All p-values are corrected together, so they are collected first.
    datasets, p_below = [], []
    for dataset, tasks in tasks_by_dataset(shared, prompts).items():
        outcomes = common_outcomes([[each[task] for task in tasks] for each in found])
        of_label = {
            label: [o for run, o in zip(runs, outcomes, strict=True) if run.label == label]
            for label in labels
        }
        datasets.append(_dataset(dataset, of_label, bootstrap))
        for outcome, each in zip(outcomes, found, strict=True):
            mean = reweighted(outcome, dataset, bootstrap).each(lambda values: values.mean(-1))
            p_below.append(mean.p_below(float(np.mean([each[task].chance for task in tasks]))))
    below = iter(holm(p_below))
    for at, entry in enumerate(datasets):
        # One p-value for each run, in the order of the datasets.
        above = {run.label for run in runs if not next(below) <= CLEAR}
        below_chance = tuple(label for label in labels if label not in above)
        datasets[at] = dataclasses.replace(entry, below_chance=below_chance)
    return _separate(datasets, {label: len(of_label[label]) for label in labels}, bootstrap)


def common_outcomes(runs: Sequence[Sequence[RankResult]]) -> list[Outcomes]:
    """Each run's outcomes on a dataset's prompts, for the examples that all runs have.

    Args:
      runs: for each run, the results of the same prompts in the same order.
    """
    examples = np.unique(np.concatenate([r.pairing_key for results in runs for r in results]))
    found = [Outcomes.of(results, examples) for results in runs]
    # An outcome that one run lacks counts for none.
    in_all = np.all([outcomes.weight > 0 for outcomes in found], axis=0)
    kept = in_all.any(-1)
    return [Outcomes(each.right[kept], (each.weight * in_all)[kept]) for each in found]


def _dataset(
    dataset: str, of_label: Mapping[str, Sequence[Outcomes]], bootstrap: Bootstrap
) -> DatasetModels:
    means = {label: [float(o.accuracy.mean()) for o in found] for label, found in of_label.items()}
    return DatasetModels(
        dataset,
        {label: float(np.mean(each)) for label, each in means.items()},
        # The runs are a sample of all seeds, hence n - 1.
        {label: float(np.std(each, ddof=1)) for label, each in means.items() if len(each) > 1},
        tuple(
            _pair(a, b, of_label[a], of_label[b], bootstrap)
            for a, b in itertools.combinations(of_label, 2)
        ),
    )


def _pair(
    a: str, b: str, first: Sequence[Outcomes], second: Sequence[Outcomes], bootstrap: Bootstrap
) -> ModelPair:
    if len(first) == len(second) == 1:
        # McNemar's test reads how many more prompts the second run gets right on an example.
        gain = (second[0].right - first[0].right) * (second[0].weight > 0)
        difference = float(second[0].accuracy.mean() - first[0].accuracy.mean())
        return ModelPair(a, b, difference, mcnemar(gain.astype(np.int64).sum(-1)))
    found = difference_over_seeds(first, second, bootstrap)
    return ModelPair(a, b, found.difference, found.p_value, found.interval)


def _separate(
    datasets: Sequence[DatasetModels], seeds: Mapping[str, int], bootstrap: Bootstrap
) -> Models:
    # In the order in which the loop below takes them back.
    adjusted = iter(holm([pair.p_value for dataset in datasets for pair in dataset.pairs]))
    ever: set[frozenset[str]] = set()
    found = []
    for dataset in datasets:
        pairs = tuple(
            dataclasses.replace(pair, p_adjusted=next(adjusted)) for pair in dataset.pairs
        )
        apart = {frozenset((p.a, p.b)) for p in pairs if p.p_adjusted <= 1 - bootstrap.confidence}
        ever |= apart
        best_first = sorted(seeds, key=lambda label: -dataset.accuracy[label])
        found.append(dataclasses.replace(dataset, pairs=pairs, alike=sets_alike(best_first, apart)))
    never = sets_alike(list(seeds), ever)
    return Models(
        dict(seeds), tuple(found), tuple(each for each in never if len(each) > 1), bootstrap
    )


def sets_alike(labels: Sequence[str], apart: set[frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    """The largest sets of labels in which no two differ, in the order of their labels.

    A label may be in several sets: A and B may be alike, and B and C, but not A and C.
    """
    # Label by label: a set stays as it is, or those of it that are like the label join it.
    sets: list[frozenset[str]] = [frozenset()]
    for label in labels:
        friends = frozenset(other for other in labels if frozenset((label, other)) not in apart)
        sets += [(each & friends) | {label} for each in sets]
        sets = [each for each in dict.fromkeys(sets) if not any(each < other for other in sets)]
    ordered = (tuple(label for label in labels if label in each) for each in sets)
    return tuple(sorted(ordered, key=lambda each: [labels.index(label) for label in each]))


def correct_by_models(models: Models, comparisons: Sequence[RunComparison]) -> list[RunComparison]:
    """The comparisons with the first run, with p-values corrected over all pairs of the models."""
    values = {
        (pair.a, pair.b, dataset.dataset): pair.p_adjusted
        for dataset in models.datasets
        for pair in dataset.pairs
    }
    return _set_p_values(
        comparisons,
        (
            # None for two seeds of one model, which are not a pair of models.
            values.get((compared.label_a, compared.label_b, entry.dataset))
            for compared in comparisons
            for entry in compared.datasets
        ),
    )


def correct_p_values(comparisons: Sequence[RunComparison]) -> list[RunComparison]:
    """The comparisons with p-values after Holm's correction over all of their datasets."""
    values = holm([d.p_value for compared in comparisons for d in compared.datasets])
    return _set_p_values(comparisons, values)


def _set_p_values(
    comparisons: Sequence[RunComparison], p_adjusted: Iterable[float | None]
) -> list[RunComparison]:
    """The comparisons with these p-values, one for each dataset of each comparison in turn."""
    values = iter(p_adjusted)
    return [
        dataclasses.replace(
            compared,
            datasets=tuple(
                dataclasses.replace(entry, p_adjusted=next(values)) for entry in compared.datasets
            ),
        )
        for compared in comparisons
    ]


def to_json(
    comparisons: Sequence[RunComparison],
    models: Models | None = None,
    runs: Sequence[RunFacts] = (),
) -> list[dict[str, Any]]:
    """One object for each comparison; each includes all runs and models."""
    more: dict[str, Any] = {} if models is None else {"models": dataclasses.asdict(models)}
    more |= {"runs": [dataclasses.asdict(run) for run in runs]} if runs else {}
    return [
        {**dataclasses.asdict(entry), "flipped": entry.flipped, **more} for entry in comparisons
    ]
