"""A rank evaluation's report as data: the content of report.json.

report.json is one object, UTF-8, indented, with the fields of `Report`; the dataclasses inside
document their own. `load_report` reads it back equal to what was written. Accuracies, chance and
intervals are in percent; scores and losses in natural-logarithm units.

What each schema added, so that readers know what older reports lack:

    2   provenance: checkpoint_hash, templates_hash, data_revision, energy_joules; datasets:
        confusion, calibration, flips, flipped; datasets.prompts: extras; published; tasks
    3   provenance: data, energy_source; datasets.prompts: unanswerable_examples; generation
    4   stacks: datasets, and right_a and right_b of its flips; synthetic; tasks: inputs, available,
        cut_inputs, cut_targets, and an entry for each decoded task
    5   datasets: p_above_chance, p_below_chance, p_above_majority, random_prompts_interval,
        detectable; stacks.datasets: p_adjusted, detectable
    6   provenance: scores_sha256; models
    7   stacks: left_out
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import dacite

from t0repro.errors import UserError
from t0repro.reports.comparison import RunComparison
from t0repro.reports.losses import LossComparison, LossCurve
from t0repro.reports.results import GROUP_TITLES, DatasetResult, GenerationResult, GroupResult
from t0repro.reports.run import Provenance
from t0repro.reports.statistics import Bootstrap

SCHEMA_VERSION = 7  # earlier reports lack the additions above but can still be read


@dataclasses.dataclass(frozen=True)
class Report:
    """The content of report.json, report.md and report.html.

    Attributes:
      title: the heading.
      groups: means over datasets, the headline figures.
      datasets: one for each dataset and group.
      stacks: this run's scores compared with another run's, for instance the other stack's.
      losses: two training runs' losses, step by step.
      loss_curve: the training run's losses.
      conversion: the result of converting the checkpoint and back, as text.
      notes: sentences for the top of the report.
      published: figures that others published for the same datasets.
      tasks: size and cost of each task, slowest first.
      generation: decoded prompts.
      synthetic: datasets with generated rows.
    """

    title: str
    provenance: Provenance
    bootstrap: Bootstrap
    groups: tuple[GroupResult, ...]
    datasets: tuple[DatasetResult, ...]
    stacks: RunComparison | None = None
    losses: LossComparison | None = None
    loss_curve: LossCurve | None = None
    conversion: str | None = None
    notes: tuple[str, ...] = ()
    published: tuple[PublishedFigure, ...] = ()
    tasks: tuple[TaskCost, ...] = ()
    generation: tuple[GenerationResult, ...] = ()
    synthetic: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def members(self, group: GroupResult) -> list[DatasetResult]:
        """The datasets of a group, in the report's order."""
        return [dataset for dataset in self.datasets if dataset.group == group.group]

    def to_json(self) -> str:
        """The report as indented JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"
        # Python reads file names that are not UTF-8 with lone surrogates; escape these.
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


# JSON has lists in place of tuples, and other writers may have turned 5.0 into 5.
_FROM_JSON = dacite.Config(cast=[tuple, float], strict=True)


def load_report(path: str | os.PathLike[str]) -> Report:
    """Reads a report.json, given its path or its folder.

    Raises:
      UserError: if it does not exist, was written by a newer t0repro, or is not a report.
    """
    path = Path(path)
    path = path / "report.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            "There is no report here.",
            where=str(path),
            fix="Write one with t0repro report make.",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = int(content["schema_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("This is not a report: no schema_version.", where=str(path)) from error
    # An older report lacks fields, which have defaults; in a newer one, fields may have another
    # meaning.
    if version > SCHEMA_VERSION:
        raise UserError(
            f"The report has schema {version}; this t0repro reads up to {SCHEMA_VERSION}.",
            where=str(path),
            fix="Read it with the version of t0repro that wrote it, or a later one.",
        )
    try:
        report = dacite.from_dict(Report, content, _FROM_JSON)
        for result in (*report.groups, *report.datasets, *report.generation):
            GROUP_TITLES[result.group]  # the pages look it up
        return report
    except (TypeError, KeyError, AttributeError, ValueError, dacite.DaciteError) as error:
        raise UserError(
            f"The report's fields are not those of schema {version}: {error}",
            where=str(path),
            fix="Write it again with t0repro report make; do not edit it by hand.",
        ) from error


# ---- Size and cost of a task ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TaskCost:
    """A task's size, and the cost of scoring or decoding it.

    Attributes:
      pairs: (input, choice) pairs that were scored, or inputs that were decoded.
      tokens: tokens of inputs and targets.
      longest_input: tokens of the longest input.
      seconds: time spent scoring or decoding.
      inputs: number of inputs; like the fields below, None if not recorded.
      available: inputs in the split; more than `inputs` if a sample was evaluated.
      cut_inputs: inputs truncated to their sequence length.
      cut_targets: targets, one per pair, truncated to their sequence length.
    """

    task: str
    pairs: int
    tokens: int
    longest_input: int
    seconds: float
    inputs: int | None = None
    available: int | None = None
    cut_inputs: int | None = None
    cut_targets: int | None = None


def task_costs(
    records: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]
) -> tuple[TaskCost, ...]:
    """Costs of the tasks that the evaluation recorded, slowest first."""
    costs = [_task_cost(task, records[task]) for task in tasks if task in records]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))


def _task_cost(task: str, record: Mapping[str, Any]) -> TaskCost:
    return TaskCost(
        task=task,
        # A decoded task has examples but no pairs.
        pairs=record["pairs"] if "pairs" in record else record["examples"],
        tokens=record["input_tokens"] + record["target_tokens"],
        longest_input=record["longest_input"],
        seconds=record["seconds"],
        inputs=record.get("inputs"),
        available=record.get("available"),
        cut_inputs=record.get("cut_inputs"),
        cut_targets=record.get("cut_targets"),
    )


# ---- What others published for the same datasets -------------------------------------------------


# published.csv has model, dataset (as prompts.dataset_label names it, ANLI's rounds together),
# statistic over prompts (mean or median), percent and source. A figure that is added, such as
# one of the paper's medians, names the source that it was read in.
_PUBLISHED = Path(__file__).parent / "published.csv"


@dataclasses.dataclass(frozen=True)
class PublishedFigure:
    """A figure that others published, in percent, and its source."""

    model: str
    dataset: str
    statistic: str
    value: float
    source: str


def published_figures(datasets: Collection[str]) -> tuple[PublishedFigure, ...]:
    """The published figures for datasets, in the file's order; ANLI's for any of its rounds."""
    wanted = {family_of(dataset) for dataset in datasets}
    # A source may contain commas and quotes; newline="" leaves them to the csv module.
    with open(_PUBLISHED, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] in wanted]
    return tuple(
        PublishedFigure(
            row["model"], row["dataset"], row["statistic"], float(row["value"]), row["source"]
        )
        for row in rows
    )


def family_of(dataset: str) -> str:
    """The dataset name under which figures were published: ANLI's rounds share one."""
    return "anli" if dataset.startswith("anli/") else dataset
