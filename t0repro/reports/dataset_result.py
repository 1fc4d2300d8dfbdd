"""Results of one dataset over its prompts, and of each prompt."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from t0repro.evaluation.outputs import read_first_input, read_inputs_of
from t0repro.evaluation.rank import RankResult
from t0repro.reports.diagnostics import Calibration, Confusion, PromptFlip
from t0repro.reports.prompts import PromptInfo, template_name
from t0repro.reports.statistics import Bootstrap, Interval, Reweighted

UNANSWERABLE_KEPT = 20


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
    """An example whose answer is none of its choices.

    Attributes:
      example: its index in the task.
      first_input: its rendered input, None where inputs were not written.
    """

    example: int
    first_input: str | None


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One prompt's rank classification.

    Attributes:
      prompt: the template's Jinja text, None where the task was not registered.
      first_input: the first rendered input, None where inputs were not written.
      ties: examples where another choice scores as high as the predicted one.
      unanswerable: examples whose answer is none of the choices; they count as wrong.
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
      examples: Number of examples of the prompt that has the most.
      paired: whether all prompts have the same examples.
      standard_error: Standard error of the mean over prompts.
      majority: accuracy of always choosing the position that is right most often.
      above_chance: whether the interval of the mean over prompts begins above chance.
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

    @property
    def below_chance(self) -> bool:
        """Whether the interval of the mean ends below chance."""
        return self.mean_interval.high < self.chance

    @property
    def above_majority(self) -> bool:
        """Whether the interval of the mean begins above the majority class."""
        return self.mean_interval.low > self.majority


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
    """The first examples whose answer is none of their choices."""
    # Counted in full; only the first are looked up and listed.
    found = [int(example) for example in result.example[~result.answerable][:UNANSWERABLE_KEPT]]
    texts = read_inputs_of(eval_dir, result.task, found)
    return tuple(Unanswerable(example, texts.get(example)) for example in found)


def dataset_result(
    label: str,
    group: str,
    prompts: Sequence[PromptResult],
    reweighted: Reweighted,
    standard_error: float,
    paired: bool,
    bootstrap: Bootstrap,
) -> DatasetResult:
    """A dataset's result, without diagnostics.

    Args:
      label: the dataset's label.
      group: a key of GROUP_TITLES.
      prompts: the results of its prompts.
      reweighted: their accuracies under the same weightings, [replicates, prompts].
      standard_error: that of the mean over prompts.
      paired: see DatasetResult.
      bootstrap: how to make the intervals.
    """
    accuracy = np.array([prompt.accuracy for prompt in prompts])
    spread = np.percentile(accuracy, [25, 50, 75])
    chance = float(np.mean([prompt.chance for prompt in prompts]))
    # Over prompts first: they share their examples, so their errors are correlated, and an average
    # of the prompts' own intervals would be too wide.
    mean_interval = reweighted.each(lambda values: values.mean(-1)).interval(bootstrap)
    return DatasetResult(
        dataset=label,
        group=group,
        # A template may drop rows, so the largest number is the nearest to the split's own.
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
        median_interval=reweighted.each(lambda values: np.median(values, -1)).interval(bootstrap),
        standard_error=standard_error,
        chance=chance,
        majority=float(np.mean([prompt.majority for prompt in prompts])),
        above_chance=mean_interval.low > chance,
        prompts=tuple(prompts),
    )
