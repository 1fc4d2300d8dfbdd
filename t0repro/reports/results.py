"""An evaluation's results: ranked tasks; figures of a prompt, a dataset, a group; diagnostics."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from t0repro.evaluation.outputs import (
    read_first_input,
    read_inputs_of,
)
from t0repro.evaluation.rank import RankResult
from t0repro.reports.diagnostics import Calibration, Confusion, PromptFlip
from t0repro.reports.prompts import PromptInfo, template_name
from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Interval,
    Reweighted,
    detectable_difference,
    holm,
    mean_over_datasets,
)

MAX_UNANSWERABLE = 20
CLEAR = 0.025
"""One-sided p-value up to which a dataset counts as clearly above or below a value."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Accuracy over the prompts of a dataset, in percent."""

    mean: float
    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    maximum: float


@dataclasses.dataclass(frozen=True)
class Unanswerable:
    """An example whose answer is not among its choices.

    Attributes:
      example: its index in the task.
      first_input: its rendered input, None if inputs were not written.
    """

    example: int
    first_input: str | None


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One prompt's rank classification.

    Attributes:
      prompt: the template's Jinja text, None if the task was not registered.
      first_input: the first rendered input, None if inputs were not written.
      ties: examples where another choice scores as high as the predicted one.
      unanswerable: examples whose answer is not among the choices; they count as wrong.
      unanswerable_examples: the first of them.
    """

    task: str
    template_name: str
    prompt: str | None
    first_input: str | None
    examples: int
    accuracy: float
    interval: Interval
    standard_error: float
    chance: float
    majority: float
    ties: int
    unanswerable: int
    metrics: dict[str, float]
    extras: dict[str, float] = dataclasses.field(default_factory=dict)
    unanswerable_examples: tuple[Unanswerable, ...] = ()


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """A dataset's results over its prompts.

    Attributes:
      group: a key of GROUP_TITLES.
      examples: Number of examples of the prompt with the most.
      paired: whether all prompts have the same examples.
      standard_error: Standard error of the mean over prompts.
      majority: accuracy of always choosing the position that is right most often.
      above_chance: whether the mean over prompts is clearly above chance.
      p_above_chance: its one-sided p-value, with Holm's correction over the report's datasets;
        p_below_chance and p_above_majority likewise. None in reports before schema 5, in which
        intervals alone decided.
      random_prompts_interval: the mean's interval if prompts are a random sample too; None with a
        single prompt.
      detectable: the smallest difference, in points, that is found with a power of 80% between two
        models with unrelated errors; it is smaller if they err on the same examples.
    """

    dataset: str
    group: str
    examples: int
    paired: bool
    accuracy: Spread
    mean_interval: Interval
    median_interval: Interval
    standard_error: float
    chance: float
    majority: float
    above_chance: bool
    prompts: tuple[PromptResult, ...]
    confusion: Confusion | None = None
    calibration: Calibration | None = None
    flips: tuple[PromptFlip, ...] = ()
    flipped: float = 0.0
    p_above_chance: float | None = None
    p_below_chance: float | None = None
    p_above_majority: float | None = None
    random_prompts_interval: Interval | None = None
    detectable: float | None = None

    @property
    def below_chance(self) -> bool:
        """Whether the mean is clearly below chance."""
        if self.p_below_chance is None:
            return self.mean_interval.high < self.chance
        return self.p_below_chance <= CLEAR

    @property
    def above_majority(self) -> bool:
        """Whether the mean is clearly above the majority class."""
        if self.p_above_majority is None:
            return self.mean_interval.low > self.majority
        return self.p_above_majority <= CLEAR


def corrected(datasets: Sequence[DatasetResult]) -> tuple[DatasetResult, ...]:
    """The datasets with p-values after Holm's correction over all of them, and new verdicts."""
    names = ("p_above_chance", "p_below_chance", "p_above_majority")
    columns = [holm([getattr(dataset, name) for dataset in datasets]) for name in names]
    return tuple(
        dataclasses.replace(
            dataset, **dict(zip(names, values, strict=True)), above_chance=values[0] <= CLEAR
        )
        for dataset, values in zip(datasets, zip(*columns, strict=True), strict=True)
    )


def prompt_result(
    result: RankResult,
    prompts: Mapping[str, PromptInfo],
    eval_dir: str | os.PathLike[str],
    interval: Interval,
    standard_error: float,
) -> PromptResult:
    """One prompt's result, given its accuracy's interval and standard error."""
    info = prompts.get(result.task)
    return PromptResult(
        task=result.task,
        template_name=template_name(result.task, prompts),
        prompt=info.prompt if info else None,
        first_input=read_first_input(eval_dir, result.task),
        examples=len(result.example),
        accuracy=result.accuracy,
        interval=interval,
        standard_error=standard_error,
        chance=result.chance,
        majority=result.majority,
        ties=int(result.tie.sum()),
        unanswerable=int((~result.answerable).sum()),
        metrics=result.metrics,
        unanswerable_examples=_unanswerable(result, eval_dir),
    )


def _unanswerable(result: RankResult, eval_dir: str | os.PathLike[str]) -> tuple[Unanswerable, ...]:
    """The first examples whose answer is not among their choices."""
    # All are counted, but only the first are looked up and listed.
    found = [int(example) for example in result.example[~result.answerable][:MAX_UNANSWERABLE]]
    texts = read_inputs_of(eval_dir, result.task, found)
    return tuple(Unanswerable(example, texts.get(example)) for example in found)


def dataset_result(
    label: str,
    group: str,
    prompts: Sequence[PromptResult],
    weighted: Reweighted,
    standard_error: float,
    paired: bool,
    bootstrap: Bootstrap,
) -> DatasetResult:
    """A dataset's result, without diagnostics.

    Args:
      label: the dataset's label.
      group: a key of GROUP_TITLES.
      prompts: the results of its prompts.
      weighted: their accuracies under the same weightings, [replicates, prompts].
      standard_error: that of the mean over prompts.
      paired: see DatasetResult.
      bootstrap: the options of the intervals.
    """
    accuracy = np.array([prompt.accuracy for prompt in prompts])
    spread = np.percentile(accuracy, [25, 50, 75])
    chance = float(np.mean([prompt.chance for prompt in prompts]))
    # Average over prompts first: they share their examples, so their errors are correlated, and
    # averaging the prompts' own intervals would give one that is too wide.
    mean = weighted.each(lambda values: values.mean(-1))
    mean_interval = mean.interval(bootstrap)
    majority = float(np.mean([prompt.majority for prompt in prompts]))
    return DatasetResult(
        dataset=label,
        group=group,
        # A template may drop rows, so the largest number is the closest to the split's size.
        examples=max(prompt.examples for prompt in prompts),
        paired=paired,
        accuracy=Spread(
            mean=float(accuracy.mean()),
            median=float(spread[1]),
            lower_quartile=float(spread[0]),
            upper_quartile=float(spread[2]),
            minimum=float(accuracy.min()),
            maximum=float(accuracy.max()),
        ),
        mean_interval=mean_interval,
        median_interval=weighted.each(lambda values: np.median(values, -1)).interval(bootstrap),
        standard_error=standard_error,
        chance=chance,
        majority=majority,
        # Provisional: `corrected` decides by the p-values of all datasets.
        above_chance=mean_interval.low > chance,
        prompts=tuple(prompts),
        p_above_chance=mean.p_above(chance),
        p_below_chance=mean.p_below(chance),
        p_above_majority=mean.p_above(majority),
        # Two models on the same examples: if their errors are unrelated, the variances add up.
        detectable=detectable_difference(math.sqrt(2) * standard_error, bootstrap),
    )


# In a report's order. The last is for runs whose training data is unknown.
GROUP_TITLES = {
    "trained_prompts": "Prompts trained on",
    "held_out_prompts": "Held-out prompts of training datasets",
    "held_out_datasets": "Held-out datasets",
    "datasets": "Datasets",
}


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """The mean over a group's datasets of each dataset's mean over prompts."""

    group: str
    datasets: int
    prompts: int
    mean: float
    interval: Interval
    standard_error: float
    chance: float
    majority: float
    above_chance: bool

    @property
    def below_chance(self) -> bool:
        """Whether the interval of the mean ends below chance."""
        return self.interval.high < self.chance

    @property
    def above_majority(self) -> bool:
        """Whether the interval of the mean begins above the majority class."""
        return self.interval.low > self.majority

    @property
    def title(self) -> str:
        """The group's heading."""
        return GROUP_TITLES[self.group]


def group_name(group: str) -> str:
    """A group's short name, for a table's cell: `held-out prompts`."""
    return group.replace("held_out", "held-out").replace("_", " ")


def group_of(
    task: str,
    label: str,
    training_datasets: Collection[str] | None,
    training_tasks: Collection[str],
) -> str:
    """A key of GROUP_TITLES: whether the training run saw the task's dataset and prompt."""
    # SeqIO's name of the training task, without the twin's suffix.
    if task.removesuffix("_score_eval") in training_tasks:
        return "trained_prompts"
    if training_datasets is None:
        return "datasets"
    return "held_out_prompts" if label in training_datasets else "held_out_datasets"


def group_result(
    group: str,
    datasets: Sequence[DatasetResult],
    means: Mapping[tuple[str, str], DatasetMean],
    bootstrap: Bootstrap,
) -> GroupResult | None:
    """A group's aggregate, None if it has no datasets.

    Args:
      group: a key of GROUP_TITLES.
      datasets: the report's datasets.
      means: (label, group) of a dataset -> its mean over prompts.
      bootstrap: the options of the interval.
    """
    members = [dataset for dataset in datasets if dataset.group == group]
    if not members:
        return None
    # Each dataset has the same weight, however many prompts it has.
    found = [means[dataset.dataset, group] for dataset in members]
    interval = mean_over_datasets(found, bootstrap).interval(bootstrap)
    chance = float(np.mean([dataset.chance for dataset in members]))
    return GroupResult(
        group=group,
        datasets=len(members),
        prompts=sum(len(dataset.prompts) for dataset in members),
        mean=float(np.mean([dataset.accuracy.mean for dataset in members])),
        interval=interval,
        # Datasets share no examples, so their errors are independent.
        standard_error=math.hypot(*(dataset.standard_error for dataset in members)) / len(members),
        chance=chance,
        majority=float(np.mean([dataset.majority for dataset in members])),
        above_chance=interval.low > chance,
    )
