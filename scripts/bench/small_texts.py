"""Evaluates the models of scripts/small_texts.sh: tables, a picture, the figures as JSON.

    .venv/bin/python -P scripts/bench/small_texts.py runs/small_texts docs/images/learning.png

Prints accuracy on held-out prompts, a held-out dataset and held-out kinds of task, by step and at
the end by dataset, with confidence intervals, chance and the majority class; writes curves.json
into the run's folder and draws the curves into the file given as the second argument. The exit code
is 1 unless both intervals of the mean over held-out prompts begin above chance and above the
majority class.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.stats import t as student_t

from t0repro.evaluation.rank import RankResult, rank_classification
from t0repro.evaluation.task_scores import TaskScores
from t0repro.reports.page_markdown import markdown_table
from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Interval,
    Outcomes,
    mean_over_datasets,
    reweighted,
)
from t0repro.storage import write_atomically
from t0repro.tasks.catalog import label
from t0repro.tasks.registration import describing
from t0repro.tasks.t0_mixtures import PromptedDataset
from t0repro.tasks.templates import task_name

with describing():  # registers its tasks without SeqIO and TensorFlow
    from t0repro.tasks.examples.learning import HELD_OUT_DATASETS, HELD_OUT_KINDS, TRAINED

GROUPS = {
    "held-out prompts": TRAINED,
    "held-out dataset": HELD_OUT_DATASETS,
    "held-out kinds of task": HELD_OUT_KINDS,
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluations of one fine-tuning run, in the folder that `t0repro eval` wrote."""

    folder: Path

    @cached_property
    def steps(self) -> list[int]:
        """Evaluated steps, ascending; the first is the tuning's start."""
        return sorted(self._accuracies(next(iter(tasks(TRAINED[0])))))

    @cached_property
    def metrics(self) -> dict[str, dict[int, float]]:
        """Task -> step -> accuracy in percent."""
        return {
            task: self._accuracies(task)
            for members in GROUPS.values()
            for entry in members
            for task in tasks(entry)
        }

    def accuracy(self, entry: PromptedDataset, step: int) -> float:
        """Mean over a dataset's prompts, in percent."""
        return statistics.fmean(self.metrics[task][step] for task in tasks(entry))

    def group_accuracy(self, group: str, step: int) -> float:
        """Mean over a group's datasets, each of which counts the same, in percent."""
        return statistics.fmean(self.accuracy(entry, step) for entry in GROUPS[group])

    def ranked(self, entry: PromptedDataset) -> list[RankResult]:
        """Each prompt's predictions at the last step."""
        return [self._ranked(task, self.steps[-1]) for task in tasks(entry)]

    def _accuracies(self, task: str) -> dict[int, float]:
        lines = (self.folder / f"{task}-metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["accuracy"] for row in map(json.loads, lines)}

    def _ranked(self, task: str, step: int) -> RankResult:
        with (self.folder / f"{task}-{step:06}.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        index = np.array([row["input"]["idx"] for row in rows])
        return rank_classification(
            TaskScores(
                task=task,
                step=step,
                input_index=index[:, 0],
                choice_index=index[:, 1],
                is_correct=np.array([row["input"]["is_correct"] for row in rows]),
                weight=np.ones(len(rows)),
                target_length=np.ones(len(rows), int),  # nothing is divided by it
                score=np.array([row["score"] for row in rows]),
            )
        )


@dataclasses.dataclass(frozen=True)
class Final:
    """A dataset, or a group of them, at the end of the tuning, in percent.

    Attributes:
      seeds: Accuracy of each seed's model.
      means: The dataset, or the group's datasets, each as a mean over seeds and prompts.
      examples: Number of examples of each prompt; of a group, of its datasets in all.
      prompts: Number of prompts.
      chance: What guessing would reach.
      majority: What the most frequent right answer would reach.
    """

    seeds: tuple[float, ...]
    means: tuple[DatasetMean, ...]
    examples: int
    prompts: int
    chance: float
    majority: float

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.seeds)

    @property
    def over_examples(self) -> Interval:
        """95% interval over resampled examples, with the models fixed."""
        return mean_over_datasets(self.means, Bootstrap()).interval(Bootstrap())

    @property
    def over_seeds(self) -> Interval | None:
        """95% interval over seeds, with the examples fixed; None for a single seed."""
        if len(self.seeds) < 2:
            return None
        error = statistics.stdev(self.seeds) / math.sqrt(len(self.seeds))
        half = error * float(student_t.ppf(0.975, len(self.seeds) - 1))
        return Interval(self.mean - half, self.mean + half)

    @property
    def verdict(self) -> str:
        """Which baselines both intervals begin above."""
        lows = [of.low for of in (self.over_examples, self.over_seeds) if of is not None]
        if min(lows) > max(self.chance, self.majority):
            return "both"
        return "chance" if min(lows) > self.chance else "neither"


def main() -> None:
    """Prints the tables, writes the figures and draws the curves."""
    run = Path(sys.argv[1])
    evaluations = {
        path.name: Evaluation(path / "eval/inference_eval") for path in sorted(run.glob("seed_*"))
    }
    datasets = {
        group: {name_of(entry): final(list(evaluations.values()), entry) for entry in members}
        for group, members in GROUPS.items()
    }
    groups = {group: mean_of(list(members.values())) for group, members in datasets.items()}
    curves = {
        group: {name: curve(evaluation, group) for name, evaluation in evaluations.items()}
        for group in GROUPS
    }
    print(curves_table(curves, groups), end="\n\n")
    print(final_table(datasets, groups))
    write_atomically(run / "curves.json", json.dumps(summary(curves, datasets, groups), indent=1))
    if len(sys.argv) > 2:
        draw(curves, groups, Path(sys.argv[2]))
    if groups["held-out prompts"].verdict != "both":
        sys.exit("held-out prompts: not clearly above chance and the majority class")


def tasks(entry: PromptedDataset) -> list[str]:
    """Names of a dataset's evaluated tasks."""
    names = (task_name(entry.dataset, entry.subset, name) for name in entry.evaluate)
    return [f"learning_{name}{entry.suffix}_score_eval" for name in names]


def name_of(entry: PromptedDataset) -> str:
    """The dataset's name in tables."""
    return label(entry.dataset, entry.subset) + entry.suffix.replace("_", "/")


def curve(evaluation: Evaluation, group: str) -> dict[int, float]:
    """Steps since the tuning began -> accuracy of a group, in percent."""
    first = evaluation.steps[0]
    return {step - first: evaluation.group_accuracy(group, step) for step in evaluation.steps}


def final(evaluations: Sequence[Evaluation], entry: PromptedDataset) -> Final:
    """A dataset at the end of the tuning."""
    ranked = [evaluation.ranked(entry) for evaluation in evaluations]
    # Every seed's prompts see the same examples, and all seeds have as many prompts.
    outcomes = Outcomes.of([prompt for of in ranked for prompt in of])
    found = reweighted(outcomes, name_of(entry), Bootstrap())
    return Final(
        seeds=tuple(statistics.fmean(prompt.accuracy for prompt in of) for of in ranked),
        means=(DatasetMean.of(outcomes, found),),
        examples=max(len(prompt.example) for prompt in ranked[0]),
        prompts=len(ranked[0]),
        chance=statistics.fmean(prompt.chance for prompt in ranked[0]),
        majority=statistics.fmean(prompt.majority for prompt in ranked[0]),
    )


def mean_of(members: Sequence[Final]) -> Final:
    """The mean over datasets."""
    return Final(
        seeds=tuple(map(statistics.fmean, zip(*(of.seeds for of in members), strict=True))),
        means=tuple(mean for of in members for mean in of.means),
        examples=sum(of.examples for of in members),
        prompts=sum(of.prompts for of in members),
        chance=statistics.fmean(of.chance for of in members),
        majority=statistics.fmean(of.majority for of in members),
    )


def curves_table(curves: dict[str, dict[str, dict[int, float]]], groups: dict[str, Final]) -> str:
    """Accuracy by step: the mean over seeds, and the lowest and highest of them."""
    steps = list(next(iter(curves["held-out prompts"].values())))
    rows = []
    for group, of_seeds in curves.items():
        values = [[curve[step] for curve in of_seeds.values()] for step in steps]
        cells = [f"{statistics.fmean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in values]
        rows.append([group, *cells, f"{groups[group].chance:.1f}", f"{groups[group].majority:.1f}"])
    return markdown_table(["steps of the tuning", *map(str, steps), "chance", "majority"], rows)


def final_table(datasets: dict[str, dict[str, Final]], groups: dict[str, Final]) -> str:
    """The end of the tuning, by dataset and by group."""
    rows = []
    for group, members in datasets.items():
        for name, of in (*members.items(), (group, groups[group])):
            seeds = ", ".join(f"{value:.1f}" for value in of.seeds)
            intervals = (shown(of.over_examples), shown(of.over_seeds))
            counts = (str(of.prompts), str(of.examples))
            baselines = (f"{of.chance:.1f}", f"{of.majority:.1f}")
            rows.append(
                [name, *counts, f"{of.mean:.1f}", seeds, *intervals, *baselines, of.verdict]
            )
    header = [
        "dataset",
        "prompts",
        "examples",
        "mean",
        "of each seed",
        "95%, examples",
        "95%, seeds",
    ]
    return markdown_table([*header, "chance", "majority", "clearly above"], rows)


def shown(interval: Interval | None) -> str:
    """An interval in a table."""
    return "" if interval is None else f"{interval.low:.1f} to {interval.high:.1f}"


def summary(
    curves: dict[str, dict[str, dict[int, float]]],
    datasets: dict[str, dict[str, Final]],
    groups: dict[str, Final],
) -> dict[str, object]:
    """What the tables show, as JSON values."""

    def values(of: Final) -> dict[str, object]:
        fields = {**vars(of), "over_examples": vars(of.over_examples), "verdict": of.verdict}
        del fields["means"]
        return fields

    return {
        "curves": curves,
        "groups": {group: values(of) for group, of in groups.items()},
        "datasets": {name: values(of) for each in datasets.values() for name, of in each.items()},
    }


def draw(
    curves: dict[str, dict[str, dict[int, float]]], groups: dict[str, Final], path: Path
) -> None:
    """Draws each group's accuracy by step: thin lines are seeds, the thick one is their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.7), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True)
    for axes, (group, of_seeds) in zip(panels, curves.items(), strict=True):
        steps = list(next(iter(of_seeds.values())))
        for number, of_seed in enumerate(of_seeds.values()):
            once = None if number else "each seed"
            axes.plot(steps, [*of_seed.values()], "#0f766e", alpha=0.5, linewidth=1.2, label=once)
        means = [statistics.fmean(of_seed[step] for of_seed in of_seeds.values()) for step in steps]
        axes.plot(steps, means, color="#0f766e", linewidth=3, label="mean of the seeds")
        axes.axhline(
            groups[group].majority, color="#b45309", linestyle="--", label="majority class"
        )
        axes.axhline(groups[group].chance, color="#6b7280", linestyle=":", label="chance")
        axes.set_title(group, fontsize=12)
        axes.set_xlabel("steps of the tuning", fontsize=11)
        axes.tick_params(labelsize=11)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy, %", fontsize=12)
    # Below all panels, where it hides no curve.
    handles, labels = panels[0].get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": 4, "columnspacing": 1.2}
    figure.legend(handles, labels, **place, handlelength=1.8, frameon=False, fontsize=11)
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    main()
