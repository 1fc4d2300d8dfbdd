"""Summarises ranked tasks into a report's figures: by dataset over prompts, and by group."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence

from t0repro.evaluation.rank import RankResult
from t0repro.reports.dataset_result import DatasetResult, dataset_result, prompt_result
from t0repro.reports.diagnostics import calibration, confusion, prompt_flips
from t0repro.reports.group_result import GROUP_TITLES, GroupResult, group_of, group_result
from t0repro.reports.prompts import PromptInfo, dataset_label
from t0repro.reports.statistics import Bootstrap, DatasetMean, Outcomes, reweighted


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
    """Computes the report's groups and datasets.

    Args:
      results: from `ranking.rank_folder`.
      prompts: task name -> its prompt; tasks without one are grouped by their own name.
      eval_dir: where the rendered inputs are.
      training_datasets: labels (`dataset_label`) of the datasets that were trained on, whose other
        prompts count as held out. None if unknown: all datasets then form one group.
      training_tasks: names of the tasks that were trained on (without `_score_eval`), so that their
        prompts do not count as held out.
      bootstrap: how to compute the intervals.
      extras: task -> name of another definition -> accuracy under it, in percent.
    """
    parts: dict[tuple[str, str], list[RankResult]] = {}
    for result in sorted(results, key=lambda result: result.task):
        label = dataset_label(result.task, prompts)
        group = group_of(result.task, label, training_datasets, training_tasks)
        parts.setdefault((label, group), []).append(result)
    datasets, means = [], {}
    for (label, group), members in sorted(parts.items()):
        dataset, means[label, group] = _summarize_dataset(
            label, group, members, prompts, eval_dir, bootstrap, extras or {}
        )
        datasets.append(dataset)
    groups = [group_result(group, datasets, means, bootstrap) for group in GROUP_TITLES]
    return tuple(group for group in groups if group is not None), tuple(datasets)


def _summarize_dataset(
    label: str,
    group: str,
    results: Sequence[RankResult],
    prompts: Mapping[str, PromptInfo],
    eval_dir: str | os.PathLike[str],
    bootstrap: Bootstrap,
    extras: Mapping[str, Mapping[str, float]],
) -> tuple[DatasetResult, DatasetMean]:
    """The dataset's result with its diagnostics, and its mean over prompts."""
    outcomes = Outcomes.of(results)
    found = reweighted(outcomes, label, bootstrap)
    errors, error_of_mean = outcomes.standard_errors()
    shown = [
        dataclasses.replace(
            prompt_result(
                result,
                prompts,
                eval_dir,
                found.each(lambda values, at=at: values[:, at]).interval(bootstrap),
                float(errors[at]),
            ),
            extras=dict(extras.get(result.task, {})),
        )
        for at, result in enumerate(results)
    ]
    flips, flipped = prompt_flips(results, eval_dir)
    choices = {task: info.fixed_choices for task, info in prompts.items()}
    dataset = dataclasses.replace(
        dataset_result(
            label, group, shown, found, float(error_of_mean), outcomes.same_rows, bootstrap
        ),
        confusion=confusion(results, choices),
        calibration=calibration(results),
        flips=flips,
        flipped=flipped,
    )
    return dataset, DatasetMean.of(outcomes, found)
