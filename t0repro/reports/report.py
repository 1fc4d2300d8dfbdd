"""A rank evaluation's report as data: the content of report.json.

report.json is one object, UTF-8, indented, with the fields of `Report`; the dataclasses inside
document their own. `load_report` reads it back equal to what was written. Accuracies, chance and
intervals are in percent; scores and losses in natural-logarithm units.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import dacite

from t0repro.errors import UserError
from t0repro.reports.comparison import RunComparison
from t0repro.reports.decoded_tasks import GenerationResult
from t0repro.reports.history import History
from t0repro.reports.losses import LossComparison, LossCurve
from t0repro.reports.provenance import Provenance
from t0repro.reports.published import PublishedFigure
from t0repro.reports.results import GROUP_TITLES, DatasetResult, GroupResult
from t0repro.reports.statistics import Bootstrap
from t0repro.reports.task_costs import TaskCost
from t0repro.words import some

SCHEMA_VERSION = 9


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
      history: accuracy by step, of an evaluation of several checkpoints.
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
    history: History | None = None
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
      UserError: if it does not exist, has another schema, or is not a report.
    """
    folder = Path(path)
    path = folder / "report.json" if folder.is_dir() else folder
    if not path.is_file():
        what = "report here" if folder.is_dir() else "such file or folder"
        fix = "Give a report.json, or the folder that holds one."
        if (folder.parent / "report.json").is_file():
            fix = f"Name the folder above: {folder.parent}."
        elif below := sorted(str(each.parent) for each in folder.glob("*/report.json")):
            fix = f"Name one of those below: {some(below)}."
        elif made := sorted({str(each.parent) for each in folder.glob("*_eval/*_targets")}):
            fix = f"t0repro report make {made[0]} --out DIR writes one."
        elif (folder / "run_state.json").is_file():
            fix = f"It is a training run's folder: t0repro rank-eval --checkpoint {folder}."
        elif folder.is_dir():
            fix = (
                "rank-eval writes one when it ends: started again, it continues. For the scores of"
                " another command: t0repro report make."
            )
        raise UserError(f"There is no {what}.", where=str(folder), fix=fix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = int(content["schema_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "This is not a report: no schema_version.",
            where=str(path),
            fix="Name a report.json, or the folder that holds it.",
        ) from error
    if version != SCHEMA_VERSION:
        raise UserError(
            f"The report has schema {version}; this t0repro reads {SCHEMA_VERSION}.",
            where=str(path),
            fix="Write it again with t0repro report make.",
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
