"""From a folder of scores to the figures of a report: spreads over prompts, intervals, groups."""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float

from t0repro.evaluation.outputs import read_first_input, read_inputs_of, read_task_scores
from t0repro.evaluation.rank import RankResult, rank_classification
from t0repro.reports.compare import read_losses
from t0repro.reports.diagnostics import calibration, confusion, prompt_flips
from t0repro.reports.report import (
    GROUP_TITLES,
    Bootstrap,
    DatasetResult,
    GroupResult,
    Interval,
    LossCurve,
    PromptResult,
    Spread,
    Unanswerable,
)
from t0repro.reports.terminal import thinned

MAX_CURVE_POINTS = 1000
UNANSWERABLE_KEPT = 20


class PromptInfo(Protocol):
    """What a report takes from t0repro.tasks.PromptedTask."""

    @property
    def dataset(self) -> str:
        """The Hugging Face name of the dataset."""
        ...

    @property
    def subset(self) -> str | None:
        """The dataset's configuration."""
        ...

    @property
    def template_name(self) -> str:
        """The name in promptsource of the template."""
        ...

    @property
    def fixed_choices(self) -> tuple[str, ...] | None:
        """The answers where every example has the same ones."""
        ...

    @property
    def prompt(self) -> str:
        """The template's Jinja text."""
        ...


def dataset_label(task: str, prompts: Mapping[str, PromptInfo]) -> str:
    """What a task's results are grouped by: `super_glue/rte`, or the task's own name if unknown.

    ANLI's rounds are datasets of their own, as in T0's figures: `anli/r1`, from the task's suffix.
    """
    info = prompts.get(task)
    if info is None:
        return task.removesuffix("_score_eval")
    label = f"{info.dataset}/{info.subset}" if info.subset else info.dataset
    round_of_anli = re.search(r"_(r[123])(_score_eval)?$", task)
    return f"anli/{round_of_anli[1]}" if info.dataset == "anli" and round_of_anli else label


def fixed_classes(prompts: Mapping[str, PromptInfo]) -> dict[str, int]:
    """Task name -> number of choices, for the tasks where it is fixed."""
    return {name: len(info.fixed_choices) for name, info in prompts.items() if info.fixed_choices}


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
      step: of the checkpoint.
      normalize_by_target_length: see rank_classification.
      tasks: only these.
      less: task -> what to take from each pair's score, in TaskScores' order; tasks that are not
        there are left out.

    Raises:
      UserError: as read_task_scores and rank_classification do.
    """
    classes = fixed_classes(prompts)
    found = read_task_scores(eval_dir, step, tasks)
    if less is not None:
        found = [
            dataclasses.replace(scores, score=scores.score - np.asarray(less[scores.task]))
            for scores in found
            if scores.task in less
        ]
    return [
        rank_classification(
            scores,
            num_classes=classes.get(scores.task),
            normalize_by_target_length=normalize_by_target_length,
        )
        for scores in found
    ]


def summarize(
    results: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    *,
    eval_dir: str | os.PathLike[str],
    training_datasets: Collection[str] | None,
    training_tasks: Collection[str] = (),
    bootstrap: Bootstrap,
    extras: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[tuple[GroupResult, ...], tuple[DatasetResult, ...]]:
    """The report's groups and datasets.

    Args:
      results: of `rank_folder`.
      prompts: task name -> its prompt; tasks without one are grouped by their own name.
      eval_dir: where the rendered inputs are.
      training_datasets: labels (`dataset_label`) of the datasets that were trained on; their
        results are those of held-out prompts. None where that is unknown: one group for all.
      training_tasks: names of the tasks that were trained on (without `_score_eval`), so that their
        prompts are not taken for held-out ones.
      bootstrap: how to make the intervals.
      extras: task -> name of another definition -> accuracy under it.
    """
    extras = extras or {}
    parts: dict[tuple[str, str], list[RankResult]] = {}
    for result in sorted(results, key=lambda result: result.task):
        label = dataset_label(result.task, prompts)
        group = group_of(result.task, label, training_datasets, training_tasks)
        parts.setdefault((label, group), []).append(result)
    datasets, means = [], {}
    for (label, group), found in sorted(parts.items()):
        resampled, paired = _resampled_accuracy(found, label, bootstrap)
        shown = [
            dataclasses.replace(
                _prompt_result(result, prompts.get(result.task), eval_dir, column, bootstrap),
                extras=dict(extras.get(result.task, {})),
            )
            for result, column in zip(found, resampled.T, strict=True)
        ]
        dataset = _dataset_result(label, group, shown, resampled, paired, bootstrap)
        datasets.append(_diagnosed(dataset, found, prompts, eval_dir))
        means[label, group] = resampled.mean(-1)
    groups = [_group_result(group, datasets, means, bootstrap) for group in GROUP_TITLES]
    return tuple(group for group in groups if group is not None), tuple(datasets)


def _diagnosed(
    dataset: DatasetResult,
    results: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    eval_dir: str | os.PathLike[str],
) -> DatasetResult:
    """The dataset with its confusion, its calibration and the examples that prompts flip."""
    flips, flipped = prompt_flips(results, eval_dir)
    choices = {task: info.fixed_choices for task, info in prompts.items()}
    return dataclasses.replace(
        dataset,
        confusion=confusion(results, choices),
        calibration=calibration(results),
        flips=flips,
        flipped=flipped,
    )


def loss_curve(metrics: str | os.PathLike[str], label: str) -> LossCurve | None:
    """The training losses of a metrics.jsonl for a plot; None where it has no finite ones.

    Raises:
      UserError: as read_losses does.
    """
    found = [(step, loss) for step, loss in read_losses(metrics).items() if np.isfinite(loss)]
    if not found:
        return None
    steps, losses = zip(*thinned(found, MAX_CURVE_POINTS), strict=True)
    return LossCurve(label, steps, losses, len(found))


# Bootstrap ---------------------------------------------------------------------------------------


def _resampled_accuracy(
    results: Sequence[RankResult], label: str, bootstrap: Bootstrap
) -> tuple[Float[np.ndarray, "replicates prompts"], bool]:
    """Accuracy in percent of each prompt in each resample, and whether one resample serves all.

    Prompts with equally many examples are taken to have the same ones, in the same order, and are
    resampled together, since an example that is hard under one prompt is hard under the next. A
    template that drops examples gets resamples of its own.
    """
    sizes = [len(result.example) for result in results]
    accuracy = np.empty((bootstrap.replicates, len(results)))
    for size in sorted(set(sizes)):
        columns = [i for i, found in enumerate(sizes) if found == size]
        weight = np.stack([results[i].weight for i in columns], -1)
        right = weight * np.stack([results[i].correct for i in columns], -1)
        # The label's checksum keeps a dataset's intervals whatever others are in the report.
        generator = np.random.default_rng([bootstrap.seed, zlib.crc32(label.encode()), size])
        for replicate in range(bootstrap.replicates):
            drawn = generator.integers(0, size, size)
            counts = np.bincount(drawn, minlength=size)
            accuracy[replicate, columns] = 100 * (counts @ right) / (counts @ weight)
    return accuracy, len(set(sizes)) == 1


def _interval(values: Float[np.ndarray, " replicates"], bootstrap: Bootstrap) -> Interval:
    tail = 50 * (1 - bootstrap.confidence)
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high))


def _prompt_result(
    result: RankResult,
    info: PromptInfo | None,
    eval_dir: str | os.PathLike[str],
    resampled: Float[np.ndarray, " replicates"],
    bootstrap: Bootstrap,
) -> PromptResult:
    return PromptResult(
        task=result.task,
        template_name=info.template_name if info else result.task.removesuffix("_score_eval"),
        prompt=info.prompt if info else None,
        first_input=read_first_input(eval_dir, result.task),
        examples=len(result.example),
        accuracy=result.accuracy,
        interval=_interval(resampled, bootstrap),
        standard_error=float(resampled.std(ddof=1)),
        chance=result.chance,
        majority=result.majority,
        ties=int(result.tie.sum()),
        unanswerable=int((~result.answerable).sum()),
        metrics=result.metrics,
        unanswerable_examples=_unanswerable(result, eval_dir),
    )


def _unanswerable(result: RankResult, eval_dir: str | os.PathLike[str]) -> tuple[Unanswerable, ...]:
    """The first examples whose answer is none of their choices."""
    found = [int(example) for example in result.example[~result.answerable][:UNANSWERABLE_KEPT]]
    texts = read_inputs_of(eval_dir, result.task, found)
    return tuple(Unanswerable(example, texts.get(example)) for example in found)


def _dataset_result(
    label: str,
    group: str,
    prompts: Sequence[PromptResult],
    resampled: Float[np.ndarray, "replicates prompts"],
    paired: bool,
    bootstrap: Bootstrap,
) -> DatasetResult:
    accuracy = np.array([prompt.accuracy for prompt in prompts])
    spread = np.percentile(accuracy, [25, 50, 75])
    chance = float(np.mean([prompt.chance for prompt in prompts]))
    mean_interval = _interval(resampled.mean(-1), bootstrap)
    return DatasetResult(
        dataset=label,
        group=group,
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
        median_interval=_interval(np.median(resampled, axis=-1), bootstrap),
        standard_error=float(resampled.mean(-1).std(ddof=1)),
        chance=chance,
        majority=float(np.mean([prompt.majority for prompt in prompts])),
        above_chance=mean_interval.low > chance,
        prompts=tuple(prompts),
    )


def group_of(
    task: str,
    label: str,
    training_datasets: Collection[str] | None,
    training_tasks: Collection[str],
) -> str:
    """A key of GROUP_TITLES: what the task's dataset and prompt were to the training."""
    if task.removesuffix("_score_eval") in training_tasks:
        return "trained_prompts"
    if training_datasets is None:
        return "datasets"
    return "held_out_prompts" if label in training_datasets else "held_out_datasets"


def _group_result(
    group: str,
    datasets: Sequence[DatasetResult],
    means: Mapping[tuple[str, str], Float[np.ndarray, " replicates"]],
    bootstrap: Bootstrap,
) -> GroupResult | None:
    """A group's aggregate; the datasets' resamples are independent of each other."""
    members = [dataset for dataset in datasets if dataset.group == group]
    if not members:
        return None
    resampled = np.mean([means[dataset.dataset, group] for dataset in members], axis=0)
    interval = _interval(resampled, bootstrap)
    chance = float(np.mean([dataset.chance for dataset in members]))
    return GroupResult(
        group=group,
        datasets=len(members),
        prompts=sum(len(dataset.prompts) for dataset in members),
        mean=float(np.mean([dataset.accuracy.mean for dataset in members])),
        interval=interval,
        standard_error=float(resampled.std(ddof=1)),
        chance=chance,
        majority=float(np.mean([dataset.majority for dataset in members])),
        above_chance=interval.low > chance,
    )
