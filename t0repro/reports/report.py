"""The report of a rank evaluation, as data: what report.json holds.

report.json is one object, UTF-8, indented. `load_report` reads it back equal to what was written.
Accuracies, chance and intervals are in percent; scores and losses in natural-logarithm units.

    schema_version   SCHEMA_VERSION; a reader refuses a newer one
    title            heading of the report
    provenance       created (ISO 8601, UTC), label of the run or stack, eval_dir, checkpoint, step,
                     device, duration_seconds, versions {package: version}, git_commit,
                     operative_config (text); what is not known is null
    bootstrap        replicates, seed, confidence (of 1) of every interval
    groups           list of: group (trained_prompts | held_out_prompts | held_out_datasets |
                     datasets), datasets, prompts, mean (over datasets of each one's mean over
                     prompts), interval, standard_error, chance, majority, above_chance
    datasets         list of (one a dataset and group): dataset, group, examples, paired (all
                     prompts have the same examples), accuracy {mean, median, lower_quartile,
                     upper_quartile, minimum, maximum} over prompts, mean_interval,
                     median_interval, standard_error (of the mean), chance, majority,
                     above_chance (the mean's interval begins above chance), prompts
    datasets.prompts list of: task, template_name, prompt (Jinja), first_input, examples, accuracy,
                     interval, standard_error, chance, majority, ties, unanswerable (examples whose
                     answer is none of the choices), metrics {name: percent}
    stacks           t0repro.reports.compare.ScoreComparison of this run and another, or null
    losses           t0repro.reports.compare.LossComparison, or null
    loss_curve       label, steps, losses (thinned), total_steps; or null
    conversion       what a conversion of the checkpoint and back gave, as text; or null
    notes            list of texts

New in schema 2:

    provenance       also checkpoint_hash, templates_hash, data_revision (hashes of the parameters,
                     of the prompts' texts, of the rendered rows), energy_joules; null if not known
    datasets         also confusion {labels, counts [answer][prediction], prompts}, null where the
                     choices vary; calibration {bins [{confidence, accuracy, examples}], error};
                     flips (the examples that prompts disagree on most), flipped (share of all)
    datasets.prompts also extras {name: accuracy under another definition}
    published        list of: model, dataset, statistic (mean | median), value, source
    tasks            list of: task, pairs, tokens, longest_input, seconds

New in schema 3:

    provenance       also data {dataset: which version of which rows}, energy_source (what counted)
    datasets.prompts also unanswerable_examples: list of {example, first_input}, the first of them
    generation       list of: task, dataset, group, template_name, prompt, examples, metrics {name:
                     value, as the template's metric gives it}, first_input, first_target,
                     first_output, seconds
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.reports.compare import LossComparison, ScoreComparison

SCHEMA_VERSION = 3  # 1 and 2 lack what is called new above; they are still read

GROUP_TITLES = {
    "trained_prompts": "Prompts trained on",
    "held_out_prompts": "Held-out prompts of training datasets",
    "held_out_datasets": "Held-out datasets",
    "datasets": "Datasets",
}


@dataclasses.dataclass(frozen=True)
class Interval:
    """A confidence interval, in percent."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: percentiles over resamples of the examples, prompts held fixed."""

    replicates: int = 1000
    seed: int = 0
    confidence: float = 0.95


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
class Confusion:
    """How often each answer was predicted as each choice, summed over prompts.

    Attributes:
      labels: the choices, as the first prompt words them.
      counts: [answer][prediction].
      prompts: how many prompts have this number of fixed choices.
    """

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    prompts: int


@dataclasses.dataclass(frozen=True)
class CalibrationBin:
    """Examples of a range of confidence: mean confidence and accuracy in percent."""

    confidence: float
    accuracy: float
    examples: int


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Whether a confidence of 80% is right in 80% of the cases.

    Attributes:
      bins: of equal width, empty ones left out; every example counts once a prompt.
      error: expected calibration error, percentage points: mean |accuracy - confidence| over the
        bins by their examples.
    """

    bins: tuple[CalibrationBin, ...]
    error: float


@dataclasses.dataclass(frozen=True)
class PromptFlip:
    """An example that some prompts get right and others wrong.

    Attributes:
      example: its index in the task.
      right: prompts that get it right, of `prompts`.
      first_input: the example under the first prompt, None where inputs were not written.
    """

    example: int
    right: int
    prompts: int
    first_input: str | None


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """A dataset's results over its prompts.

    Attributes:
      group: a key of GROUP_TITLES.
      examples: of the prompt that has most.
      paired: whether all prompts have the same number of examples, so that one resample serves all.
      standard_error: of the mean over prompts.
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
    def title(self) -> str:
        """The group's heading."""
        return GROUP_TITLES[self.group]


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where the numbers come from; None where it is not known."""

    created: str
    label: str
    eval_dir: str
    checkpoint: str | None
    step: int
    device: str | None
    duration_seconds: float | None
    versions: dict[str, str]
    git_commit: str | None
    operative_config: str | None
    checkpoint_hash: str | None = None
    templates_hash: str | None = None
    data_revision: str | None = None
    energy_joules: float | None = None
    energy_source: str | None = None
    data: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """Training losses, thinned evenly to what a plot can show."""

    label: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    total_steps: int


@dataclasses.dataclass(frozen=True)
class PublishedFigure:
    """A figure that others have published, in percent, and where it stands."""

    model: str
    dataset: str
    statistic: str
    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class TaskCost:
    """What a task took: its pairs, their tokens (inputs and choices), and seconds of scoring."""

    task: str
    pairs: int
    tokens: int
    longest_input: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One prompt without answer choices, decoded.

    Attributes:
      group: a key of GROUP_TITLES.
      metrics: as the template's metrics give them, most in percent; each of all examples.
      first_target: of the first example; first_output what was decoded for it.
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


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that report.json, report.md and report.html show."""

    title: str
    provenance: Provenance
    bootstrap: Bootstrap
    groups: tuple[GroupResult, ...]
    datasets: tuple[DatasetResult, ...]
    stacks: ScoreComparison | None = None
    losses: LossComparison | None = None
    loss_curve: LossCurve | None = None
    conversion: str | None = None
    notes: tuple[str, ...] = ()
    published: tuple[PublishedFigure, ...] = ()
    tasks: tuple[TaskCost, ...] = ()
    generation: tuple[GenerationResult, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


def load_report(path: str | os.PathLike[str]) -> Report:
    """Reads report.json, or the report.json of a folder.

    Raises:
      UserError: if there is none, if a newer t0repro wrote it, or if it is not a report.
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
    if version > SCHEMA_VERSION:
        raise UserError(
            f"The report has schema {version}; this t0repro reads up to {SCHEMA_VERSION}.",
            where=str(path),
            fix="Read it with the version of t0repro that wrote it, or a later one.",
        )
    try:
        return _build(Report, content)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(
            f"The report's fields are not those of schema {version}: {error}",
            where=str(path),
            fix="Write it anew with t0repro report make; do not edit it.",
        ) from error


def _build(kind: Any, value: Any) -> Any:
    """Rebuilds a value of the annotated type from what JSON made of it."""
    if value is None:
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _build(next(item for item in arguments if item is not type(None)), value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})  # pyright: ignore[reportCallIssue] - an instance is never passed
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_build(item_kind, item) for item_kind, item in zip(kinds, value, strict=True))
    if origin is dict:
        return {key: _build(arguments[1], item) for key, item in value.items()}
    return kind(value)
