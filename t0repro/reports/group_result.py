"""Results of a group of datasets: held-out ones, or ones that were trained on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from t0repro.reports.dataset_result import DatasetResult
from t0repro.reports.statistics import Bootstrap, DatasetMean, Interval, mean_over_datasets

# In a report's order. The last is for runs of which it is unknown what was trained on.
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
    """A key of GROUP_TITLES: what the task's dataset and prompt were to the training."""
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
    """A group's aggregate, None where no dataset is in it.

    Args:
      group: a key of GROUP_TITLES.
      datasets: the report's datasets.
      means: (label, group) of a dataset -> its mean over prompts.
      bootstrap: how to make the interval.
    """
    members = [dataset for dataset in datasets if dataset.group == group]
    if not members:
        return None
    # Each dataset counts the same, however many prompts it has.
    found = [means[dataset.dataset, group] for dataset in members]
    interval = mean_over_datasets(found, bootstrap).interval(bootstrap)
    chance = float(np.mean([dataset.chance for dataset in members]))
    return GroupResult(
        group=group,
        datasets=len(members),
        prompts=sum(len(dataset.prompts) for dataset in members),
        mean=float(np.mean([dataset.accuracy.mean for dataset in members])),
        interval=interval,
        # Datasets have no examples in common, so that their errors are independent.
        standard_error=math.hypot(*(dataset.standard_error for dataset in members)) / len(members),
        chance=chance,
        majority=float(np.mean([dataset.majority for dataset in members])),
        above_chance=interval.low > chance,
    )
