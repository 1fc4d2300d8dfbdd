"""An evaluation's results: ranked tasks; figures of a prompt, a dataset, a group; diagnostics."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from t0repro.evaluation.outputs import read_first_input, read_inputs_of
from t0repro.evaluation.rank import RankResult
from t0repro.reports.diagnostics import (
    Calibration,
    Confusion,
    PromptFlip,
    calibration,
    confusion,
    prompt_flips,
)
from t0repro.reports.prompts import PromptInfo, choice_text, template_name
from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Interval,
    Outcomes,
    Reweighted,
    detectable_difference,
    holm,
    mean_over_datasets,
    random_prompts_interval,
    reweighted,
)
from t0repro.words import shortened

MAX_UNANSWERABLE = 20
MAX_WRONG, WRONG_INPUT_SHOWN = 10, 600  # of a prompt; characters
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
class WrongExample:
    """An example whose predicted choice is wrong.

    Attributes:
      example: its index in the task.
      input: its rendered input, shortened; None if inputs were not written.
      predicted: the predicted choice, as its text where the prompt's choices are fixed.
      right: the first right choice, likewise.
    """

    example: int
    input: str | None
    predicted: str
    right: str


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One prompt's rank classification.

    Attributes:
      prompt: the template's Jinja text, None if the task was not registered.
      first_input: the first rendered input, None if inputs were not written.
      ties: examples where another choice scores as high as the predicted one.
      unanswerable: examples whose answer is not among the choices; they count as wrong.
      unanswerable_examples: the first of them.
      wrong_examples: the first of the others whose predicted choice is wrong.
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
    extras: dict[str, float]
    unanswerable_examples: tuple[Unanswerable, ...]
    wrong_examples: tuple[WrongExample, ...]


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """A dataset's results over its prompts.

    Attributes:
      group: a key of GROUP_TITLES.
      examples: Number of examples of the prompt with the most.
      paired: whether all prompts have the same examples.
      standard_error: Standard error of the mean over prompts.
      majority: accuracy of always choosing the position that is right most often.
      p_above_chance: one-sided p-value of the mean over prompts, with Holm's correction over the
        report's datasets; p_below_chance and p_above_majority likewise.
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
    p_above_chance: float
    p_below_chance: float
    p_above_majority: float
    random_prompts_interval: Interval | None
    detectable: float | None
    confusion: Confusion | None
    calibration: Calibration
    flips: tuple[PromptFlip, ...]
    flipped: float
    prompts: tuple[PromptResult, ...]

    @property
    def above_chance(self) -> bool:
        """Whether the mean over prompts is clearly above chance."""
        return self.p_above_chance <= CLEAR

    @property
    def below_chance(self) -> bool:
        """Whether it is clearly below chance."""
        return self.p_below_chance <= CLEAR

    @property
    def above_majority(self) -> bool:
        """Whether it is clearly above the majority class."""
        return self.p_above_majority <= CLEAR


@dataclasses.dataclass(frozen=True)
class DatasetOutcomes:
    """A dataset's ranked prompts, from which its result is computed.

    Attributes:
      dataset: the dataset's label.
      group: a key of GROUP_TITLES.
      results: one for each prompt.
      outcomes: theirs side by side.
      weighted: their accuracies under the same weightings, [replicates, prompts].
      mean: the mean over prompts. Prompts share their examples, so their errors are correlated:
        averaging the prompts' own intervals would give one that is too wide.
    """

    dataset: str
    group: str
    results: Sequence[RankResult]
    outcomes: Outcomes
    weighted: Reweighted
    mean: DatasetMean

    @classmethod
    def of(
        cls, dataset: str, group: str, results: Sequence[RankResult], bootstrap: Bootstrap
    ) -> DatasetOutcomes:
        """The outcomes of a dataset's prompts, under the bootstrap's weightings."""
        outcomes = Outcomes.of(results)
        weighted = reweighted(outcomes, dataset, bootstrap)
        return cls(dataset, group, results, outcomes, weighted, DatasetMean.of(outcomes, weighted))

    @property
    def chance(self) -> float:
        """Mean over prompts of the expected accuracy of a random choice, in percent."""
        return float(np.mean([result.chance for result in self.results]))

    @property
    def majority(self) -> float:
        """Mean over prompts of the accuracy of the majority class, in percent."""
        return float(np.mean([result.majority for result in self.results]))

    @property
    def p_values(self) -> tuple[float, float, float]:
        """One-sided p-values: above chance, below chance, above the majority class."""
        mean = self.mean.reweighted
        return (
            mean.p_above(self.chance), mean.p_below(self.chance), mean.p_above(self.majority)
        )  # fmt: skip


def prompt_result(
    result: RankResult,
    prompts: Mapping[str, PromptInfo],
    eval_dir: str | os.PathLike[str],
    interval: Interval,
    standard_error: float,
    extras: Mapping[str, float],
) -> PromptResult:
    """One prompt's result, given its accuracy's interval, standard error and other definitions."""
    info = prompts.get(result.task)
    # All are counted, but only the first are looked up and listed.
    unanswerable = result.example[~result.answerable][:MAX_UNANSWERABLE].tolist()
    wrong = np.flatnonzero(result.answerable & ~result.correct)[:MAX_WRONG]
    listed = [*unanswerable, *result.example[wrong].tolist()]
    inputs = read_inputs_of(eval_dir, result.task, listed)
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
        extras=dict(extras),
        unanswerable_examples=tuple(
            Unanswerable(example, inputs.get(example)) for example in unanswerable
        ),
        wrong_examples=tuple(
            WrongExample(
                example=int(result.example[at]),
                input=None
                if (text := inputs.get(int(result.example[at]))) is None
                else shortened(text, WRONG_INPUT_SHOWN),
                predicted=choice_text(info, int(result.predicted[at])),
                right=choice_text(info, int(result.answer[at])),
            )
            for at in wrong
        ),
    )


def dataset_results(
    datasets: Sequence[DatasetOutcomes],
    prompts: Mapping[str, PromptInfo],
    eval_dir: str | os.PathLike[str],
    bootstrap: Bootstrap,
    extras: Mapping[str, Mapping[str, float]],
) -> tuple[DatasetResult, ...]:
    """The results of a report's datasets, whose p-values Holm's method corrects together.

    Args:
      datasets: the ranked prompts of each.
      prompts: task name -> its prompt.
      eval_dir: the `<split>_eval` folder, with the inputs to show.
      bootstrap: the options of the intervals.
      extras: task -> name of another definition of accuracy -> accuracy under it, in percent.
    """
    by_claim = zip(*(dataset.p_values for dataset in datasets), strict=True)
    corrected = zip(*map(holm, by_claim), strict=True)
    return tuple(
        _dataset_result(dataset, p_values, prompts, eval_dir, bootstrap, extras)
        for dataset, p_values in zip(datasets, corrected, strict=True)
    )


def _dataset_result(
    dataset: DatasetOutcomes,
    p_values: tuple[float, float, float],
    prompts: Mapping[str, PromptInfo],
    eval_dir: str | os.PathLike[str],
    bootstrap: Bootstrap,
    extras: Mapping[str, Mapping[str, float]],
) -> DatasetResult:
    results, weighted, outcomes = dataset.results, dataset.weighted, dataset.outcomes
    errors, error_of_mean = outcomes.standard_errors()
    accuracy = np.array([result.accuracy for result in results])
    lower_quartile, median, upper_quartile = np.percentile(accuracy, [25, 50, 75]).tolist()
    mean_interval = dataset.mean.reweighted.interval(bootstrap)
    flips, flipped = prompt_flips(results, eval_dir)
    return DatasetResult(
        dataset=dataset.dataset,
        group=dataset.group,
        # A template may drop rows, so the largest number is the closest to the split's size.
        examples=max(len(result.example) for result in results),
        paired=outcomes.same_rows,
        accuracy=Spread(
            mean=float(accuracy.mean()),
            median=median,
            lower_quartile=lower_quartile,
            upper_quartile=upper_quartile,
            minimum=float(accuracy.min()),
            maximum=float(accuracy.max()),
        ),
        mean_interval=mean_interval,
        median_interval=weighted.each(lambda values: np.median(values, -1)).interval(bootstrap),
        standard_error=float(error_of_mean),
        chance=dataset.chance,
        majority=dataset.majority,
        p_above_chance=p_values[0],
        p_below_chance=p_values[1],
        p_above_majority=p_values[2],
        random_prompts_interval=random_prompts_interval(outcomes, mean_interval, bootstrap),
        # Two models on the same examples: if their errors are unrelated, the variances add up.
        detectable=detectable_difference(math.sqrt(2) * float(error_of_mean), bootstrap),
        confusion=confusion(results, {task: info.fixed_choices for task, info in prompts.items()}),
        calibration=calibration(results),
        flips=flips,
        flipped=flipped,
        prompts=tuple(
            prompt_result(
                result,
                prompts,
                eval_dir,
                weighted.each(lambda values, at=at: values[:, at]).interval(bootstrap),
                float(errors[at]),
                extras.get(result.task, {}),
            )
            for at, result in enumerate(results)
        ),
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

    @property
    def above_chance(self) -> bool:
        """Whether the interval of the mean begins above chance."""
        return self.interval.low > self.chance

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
    means: Sequence[DatasetMean],
    bootstrap: Bootstrap,
) -> GroupResult:
    """A group's aggregate, in which each dataset has the same weight, however many its prompts.

    Args:
      group: a key of GROUP_TITLES.
      datasets: the group's datasets, at least one.
      means: their means over prompts.
      bootstrap: the options of the interval.
    """
    return GroupResult(
        group=group,
        datasets=len(datasets),
        prompts=sum(len(dataset.prompts) for dataset in datasets),
        mean=float(np.mean([dataset.accuracy.mean for dataset in datasets])),
        interval=mean_over_datasets(means, bootstrap).interval(bootstrap),
        # Datasets share no examples, so their errors are independent.
        standard_error=math.hypot(*(d.standard_error for d in datasets)) / len(datasets),
        chance=float(np.mean([dataset.chance for dataset in datasets])),
        majority=float(np.mean([dataset.majority for dataset in datasets])),
    )
