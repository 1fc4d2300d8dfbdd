"""Accuracies of runs side by side: is one better, by how much, and on which examples?

Runs are paired: only tasks and examples that both have are compared, and a resample of the
bootstrap takes the same examples of both. An example under several prompts is one cluster, since it
is not several independent ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from t0repro.errors import UserError
from t0repro.evaluation.rank import RankResult
from t0repro.reports.report import Bootstrap, Interval
from t0repro.reports.summary import PromptInfo, dataset_label, rank_folder

MAX_FLIPS_KEPT = 200


@dataclasses.dataclass(frozen=True)
class DatasetDifference:
    """Two runs on one dataset; accuracies and differences in percent, `b` less `a`.

    Attributes:
      prompts: tasks that both runs have.
      examples: distinct examples that both have.
      accuracy_a: mean over prompts of the first run; accuracy_b of the second.
      interval: of the difference, by the paired bootstrap over examples.
      only_a: (example, prompt) outcomes that only the first run gets right; only_b the second.
      p_value: of McNemar's test. With several prompts the examples are clusters: the statistic is
        (sum of d)**2 / sum of d**2 with d an example's only_b less only_a, chi-squared with one
        degree of freedom; with one prompt that is McNemar's own, (b - c)**2 / (b + c).
      agreement: percent of (example, prompt) that both predict alike.
    """

    dataset: str
    prompts: int
    examples: int
    accuracy_a: float
    accuracy_b: float
    interval: Interval
    only_a: int
    only_b: int
    p_value: float
    agreement: float

    @property
    def difference(self) -> float:
        """Percentage points by which the second run is better."""
        return self.accuracy_b - self.accuracy_a


@dataclasses.dataclass(frozen=True)
class Flip:
    """An example that the runs predict differently."""

    task: str
    example: int
    predicted_a: int
    predicted_b: int
    right_a: bool
    right_b: bool


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """A run against the first one.

    Attributes:
      only_a: tasks that the second run lacks; only_b those that the first lacks.
      flips: the first MAX_FLIPS_KEPT of `flipped` examples that are predicted differently.
    """

    label_a: str
    label_b: str
    datasets: tuple[DatasetDifference, ...]
    flips: tuple[Flip, ...]
    flipped: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def evaluation_of(path: str | os.PathLike[str]) -> Path:
    """The `<split>_eval` folder that a path means: itself, or the only one in it.

    Raises:
      UserError: if there is none, or more than one.
    """
    path = Path(path)
    if any(path.glob("*_targets")):
        return path
    found = sorted(
        folder
        for folder in path.glob("*_eval*")
        if folder.is_dir() and any(folder.glob("*_targets"))
    )
    if len(found) != 1:
        raise UserError(
            f"There are {len(found)} evaluations here.",
            where=str(path),
            fix="Give the <split>_eval folder, or the --out folder of t0repro rank-eval.",
        )
    return found[0]


def compare_runs(
    runs: Sequence[tuple[str, str | os.PathLike[str]]],
    prompts: Mapping[str, PromptInfo],
    bootstrap: Bootstrap,
) -> list[RunComparison]:
    """Every run against the first one.

    Args:
      runs: (label, `<split>_eval` folder), two or more; the latest step of each.
      prompts: task name -> its prompt, to group tasks by dataset.
      bootstrap: how to make the intervals.

    Raises:
      UserError: if two runs have no task in common, or an example has other answers.
    """
    ranked = [(label, rank_folder(folder, prompts)) for label, folder in runs]
    first_label, first = ranked[0]
    return [
        _compare(first_label, first, label, results, prompts, bootstrap)
        for label, results in ranked[1:]
    ]


def _compare(
    label_a: str,
    results_a: Sequence[RankResult],
    label_b: str,
    results_b: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    bootstrap: Bootstrap,
) -> RunComparison:
    a, b = ({result.task: result for result in found} for found in (results_a, results_b))
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise UserError(
            f"{label_a} and {label_b} have no task in common.",
            fix="Evaluate the same mixture on both.",
        )
    paired = {task: _paired(a[task], b[task]) for task in shared}
    by_dataset: dict[str, list[str]] = {}
    for task in shared:
        by_dataset.setdefault(dataset_label(task, prompts), []).append(task)
    flips = [flip for task in shared for flip in _flips(*paired[task])]
    return RunComparison(
        label_a=label_a,
        label_b=label_b,
        datasets=tuple(
            _difference(dataset, [paired[task] for task in tasks], bootstrap)
            for dataset, tasks in sorted(by_dataset.items())
        ),
        flips=tuple(flips[:MAX_FLIPS_KEPT]),
        flipped=len(flips),
        only_a=tuple(sorted(a.keys() - b.keys())),
        only_b=tuple(sorted(b.keys() - a.keys())),
    )


def _paired(a: RankResult, b: RankResult) -> tuple[RankResult, RankResult]:
    """Both results on the examples that both have."""
    shared = np.intersect1d(a.example, b.example)
    at_a, at_b = np.searchsorted(a.example, shared), np.searchsorted(b.example, shared)
    if not shared.size or (a.answer[at_a] != b.answer[at_b]).any():
        raise UserError(
            f"Task {a.task!r}: the runs share no example, or an example has other answers.",
            fix="Compare evaluations of the same rendered data.",
        )
    return _taken(a, at_a), _taken(b, at_b)


def _taken(result: RankResult, at: np.ndarray) -> RankResult:
    names = ("example", "predicted", "correct", "answer")
    return dataclasses.replace(result, **{name: getattr(result, name)[at] for name in names})


def _flips(a: RankResult, b: RankResult) -> list[Flip]:
    return [
        Flip(
            task=a.task,
            example=int(a.example[at]),
            predicted_a=int(a.predicted[at]),
            predicted_b=int(b.predicted[at]),
            right_a=bool(a.correct[at]),
            right_b=bool(b.correct[at]),
        )
        for at in np.flatnonzero(a.predicted != b.predicted)
    ]


def _difference(
    dataset: str, tasks: Sequence[tuple[RankResult, RankResult]], bootstrap: Bootstrap
) -> DatasetDifference:
    examples = np.unique(np.concatenate([a.example for a, _ in tasks]))
    share, count = np.zeros(len(examples)), np.zeros(len(examples))
    same = total = only_a = only_b = 0
    for a, b in tasks:
        gain = b.correct.astype(np.int64) - a.correct
        place = np.searchsorted(examples, a.example)
        share[place] += 100 * gain / len(gain) / len(tasks)
        count[place] += gain
        same += int((a.predicted == b.predicted).sum())
        total += len(gain)
        only_a, only_b = only_a + int((gain < 0).sum()), only_b + int((gain > 0).sum())
    generator = np.random.default_rng([bootstrap.seed, zlib.crc32(dataset.encode())])
    drawn = [
        share[generator.integers(0, len(share), len(share))].sum()
        for _ in range(bootstrap.replicates)
    ]
    tail = 50 * (1 - bootstrap.confidence)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return DatasetDifference(
        dataset=dataset,
        prompts=len(tasks),
        examples=len(examples),
        accuracy_a=float(np.mean([100 * a.correct.mean() for a, _ in tasks])),
        accuracy_b=float(np.mean([100 * b.correct.mean() for _, b in tasks])),
        interval=Interval(float(low), float(high)),
        only_a=only_a,
        only_b=only_b,
        p_value=mcnemar(count),
        agreement=100 * same / total,
    )


def mcnemar(differences: np.ndarray) -> float:
    """p-value of McNemar's test over clusters; see DatasetDifference. 1 where nothing differs."""
    squares = float((differences**2).sum())
    statistic = float(differences.sum()) ** 2 / squares if squares else 0.0
    return math.erfc(math.sqrt(statistic / 2))


def to_json(comparisons: Sequence[RunComparison]) -> str:
    """The comparisons as indented JSON."""
    return json.dumps([dataclasses.asdict(found) for found in comparisons], indent=1) + "\n"
