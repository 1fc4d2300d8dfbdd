"""An evaluation's results: ranked tasks; figures of a prompt, a dataset, a group; diagnostics."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.evaluation.outputs import (
    iterate_task_scores,
    latest_step,
    read_first_input,
    read_inputs_of,
    read_line_of,
    read_records,
)
from t0repro.evaluation.rank import RankResult, rank_classification
from t0repro.reports.run import PromptInfo, dataset_label, fixed_classes, template_name
from t0repro.reports.statistics import (
    Bootstrap,
    DatasetMean,
    Interval,
    Reweighted,
    detectable_difference,
    holm,
    mean_over_datasets,
)


def rank_folder(
    eval_dir: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    *,
    step: int | None = None,
    normalize_by_target_length: bool = False,
    tasks: Sequence[str] | None = None,
    less: Mapping[str, Sequence[float]] | None = None,
) -> list[RankResult]:
    """Rank classification of every task of a folder at one step (the latest when None).

    Args:
      eval_dir: the `<split>_eval` folder.
      prompts: task name -> its prompt.
      step: the checkpoint's step.
      normalize_by_target_length: see rank_classification.
      tasks: names of the tasks to rank; None for all.
      less: task -> what to subtract from each pair's score, in TaskScores' order; tasks not in it
        are omitted.

    Raises:
      UserError: like read_task_scores and rank_classification.
    """
    classes = fixed_classes(prompts)
    step = latest_step(eval_dir) if step is None else step
    records = read_records(eval_dir, step)
    found = iterate_task_scores(eval_dir, step, tasks)
    if less is not None:
        found = (
            # Content-free scores are in the order of TaskScores, as recorded.
            dataclasses.replace(scores, score=scores.score - np.asarray(less[scores.task]))
            for scores in found
            if scores.task in less
        )
    results = (
        rank_classification(
            scores,
            num_classes=classes.get(scores.task),
            normalize_by_target_length=normalize_by_target_length,
        )
        for scores in found
    )
    return [with_rows(result, records.get(result.task)) for result in results]


def with_rows(result: RankResult, record: Mapping[str, Any] | None) -> RankResult:
    """The result with each example's row, if its task's record says which rows gave no example."""
    dropped = None if record is None else record.get("dropped_rows")
    if dropped is None:
        return result
    # The rows before the k-th dropped one gave its number minus k examples.
    before = np.asarray(dropped, np.int64) - np.arange(len(dropped))
    row = result.example + np.searchsorted(before, result.example, side="right")
    return dataclasses.replace(result, row=row)


# ---- A prompt and a dataset ----------------------------------------------------------------------


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


# ---- A group of datasets -------------------------------------------------------------------------


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


# ---- Tasks that were decoded rather than ranked --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One prompt without answer choices, decoded.

    Attributes:
      group: a key of GROUP_TITLES.
      metrics: the template's metrics, most in percent; each over all examples.
      first_target: the first example's target; first_output is its decoded output.
    """

    task: str
    dataset: str
    group: str
    template_name: str
    prompt: str | None
    examples: int
    metrics: dict[str, float]
    first_input: str | None
    first_target: str | None
    first_output: str | None
    seconds: float


def generation_results(
    eval_dir: str | os.PathLike[str],
    records: Sequence[Mapping[str, Any]],
    prompts: Mapping[str, PromptInfo],
    training_datasets: Collection[str] | None,
    training_tasks: Collection[str],
) -> tuple[GenerationResult, ...]:
    """The metrics of each decoded task, with its first example, by dataset and task.

    Args:
      eval_dir: the `<split>_eval` folder.
      records: of the decoded tasks.
      prompts: task name -> its prompt.
      training_datasets: labels of the datasets trained on; None if unknown.
      training_tasks: names of the tasks trained on.
    """
    found = []
    for record in records:
        task, step = record["key"]["task"], record["key"]["step"]
        # A task has no prompt if its module was not named; then its own name is its label.
        label, info = dataset_label(task, prompts), prompts.get(task)
        found.append(
            GenerationResult(
                task=task,
                dataset=label,
                group=group_of(task, label, training_datasets, training_tasks),
                template_name=template_name(task, prompts),
                prompt=info.prompt if info else None,
                examples=record["examples"],
                metrics=dict(record["metrics"]),
                first_input=read_first_input(eval_dir, task),
                first_target=read_line_of(os.path.join(eval_dir, f"{task}_targets"), 0),
                first_output=read_line_of(os.path.join(eval_dir, f"{task}_{step}_predictions"), 0),
                seconds=record["seconds"],
            )
        )
    return tuple(sorted(found, key=lambda result: (result.dataset, result.task)))


# ---- Diagnostics beyond accuracy: confused classes, calibration, disagreement between prompts ----

_BINS = 10
MAX_FLIPS = 5


@dataclasses.dataclass(frozen=True)
class Confusion:
    """How often each choice was predicted for each answer, summed over prompts.

    Attributes:
      labels: the choices, as the first prompt words them.
      counts: [answer][prediction].
      prompts: number of prompts with this many fixed choices.
    """

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    prompts: int

    def __post_init__(self) -> None:
        if {len(self.counts), *map(len, self.counts)} != {len(self.labels)}:
            raise ValueError(f"a table of {len(self.labels)} choices has other rows or columns")


@dataclasses.dataclass(frozen=True)
class CalibrationBin:
    """Examples in a range of confidence; mean confidence and accuracy in percent."""

    confidence: float
    accuracy: float
    examples: int


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Calibration: whether predictions made with 80% confidence are right 80% of the time.

    Attributes:
      bins: of equal width, without empty ones; every example counts once per prompt.
      error: expected calibration error in percentage points: the mean of |accuracy - confidence|
        over bins, weighted by their examples.
    """

    bins: tuple[CalibrationBin, ...]
    error: float


@dataclasses.dataclass(frozen=True)
class PromptFlip:
    """An example that some prompts get right and others wrong.

    Attributes:
      example: its row in the split or, where rows were not recorded, its index in the task.
      right: prompts that get it right, of `prompts`.
      first_input: the example under the first prompt, None if inputs were not written.
    """

    example: int
    right: int
    prompts: int
    first_input: str | None


def confusion(
    results: Sequence[RankResult], choices: Mapping[str, tuple[str, ...] | None]
) -> Confusion | None:
    """Counts predictions by answer, over prompts with the most common number of fixed choices.

    Args:
      results: of one dataset's prompts.
      choices: task -> its fixed choices, None where they vary.
    """
    # Choices that vary between examples have no labels in common.
    fixed = [result for result in results if choices.get(result.task)]
    if not fixed:
        return None
    sizes = [len(choices[result.task] or ()) for result in fixed]
    # Prompts with another number of choices would need their own table.
    size = max(set(sizes), key=sizes.count)
    members = [result for result, found in zip(fixed, sizes, strict=True) if found == size]
    counts = np.zeros((size, size), np.int64)
    for result in members:
        known = result.answer >= 0  # -1: the answer is not among the choices
        # Unlike counts[a, p] += 1, this counts repeated pairs of indices.
        np.add.at(counts, (result.answer[known], result.predicted[known]), 1)
    return Confusion(
        labels=choices[members[0].task] or (),
        counts=tuple(tuple(int(n) for n in row) for row in counts),
        prompts=len(members),
    )


def calibration(results: Sequence[RankResult], bins: int = _BINS) -> Calibration:
    """Accuracy by confidence, over all prompts of a dataset."""
    confidence = np.concatenate([result.confidence for result in results])
    correct = np.concatenate([result.correct for result in results])
    # Put a confidence of exactly 1 into the last bin, not into one of its own.
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    found = [
        CalibrationBin(
            confidence=float(100 * confidence[place == at].mean()),
            accuracy=float(100 * correct[place == at].mean()),
            examples=int((place == at).sum()),
        )
        for at in range(bins)
        if (place == at).any()
    ]
    # Absolute gaps, so that over- and underconfidence do not cancel out.
    gaps = [abs(entry.accuracy - entry.confidence) * entry.examples for entry in found]
    return Calibration(tuple(found), float(sum(gaps) / len(confidence)))


def prompt_flips(
    results: Sequence[RankResult], eval_dir: str | os.PathLike[str]
) -> tuple[tuple[PromptFlip, ...], float]:
    """The examples that prompts disagree on most, and the percentage with any disagreement.

    Compares whether predictions are right, not which choices they are, because prompts order and
    word their choices differently. Only examples that all prompts share are compared.
    """
    if len(results) < 2:
        return (), 0.0
    shared = results[0].paired_by
    for result in results[1:]:
        shared = np.intersect1d(shared, result.paired_by)
    if not shared.size:
        return (), 0.0
    # For each shared example, the number of prompts that get it right.
    right = sum(result.correct[np.searchsorted(result.paired_by, shared)] for result in results)
    right = np.asarray(right, np.int64)
    # Count the smaller side: at most half of the prompts can disagree.
    disagreement = np.minimum(right, len(results) - right)
    # Stable, so that two reports of the same scores list the same examples.
    order = np.argsort(-disagreement, kind="stable")[:MAX_FLIPS]
    chosen = [at for at in order if disagreement[at]]
    # Under the first prompt, whose files number its own examples.
    first = results[0].example[np.searchsorted(results[0].paired_by, shared)]
    texts = read_inputs_of(eval_dir, results[0].task, [int(first[at]) for at in chosen])
    flips = tuple(
        PromptFlip(int(shared[at]), int(right[at]), len(results), texts.get(int(first[at])))
        for at in chosen
    )
    return flips, float(100 * (disagreement > 0).mean())
