"""A rank evaluation's report and table of scores."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from t0repro.reports.history import read_history
from t0repro.reports.make_report import ExtraContent, ReportOptions, make_report
from t0repro.reports.prompts import PromptInfo
from t0repro.reports.report import Report
from t0repro.reports.report_files import write_report
from t0repro.reports.run import Run
from t0repro.reports.score_tables import write_tables
from t0repro.runs.rank_eval import Outcome, reasons_in_words


def write_results(
    outcome: Outcome,
    steps: Sequence[int],
    out: str | os.PathLike[str],
    prompts: Mapping[str, PromptInfo],
    options: ReportOptions,
    *,
    label: str,
) -> tuple[Report, list[Path]]:
    """Writes report.json, .md and .html and, if tasks were ranked, scores.csv and .parquet.

    Args:
      outcome: what rank_eval returned.
      steps: the evaluated steps; the report is of the last, with the accuracies of all.
      out: the results folder.
      prompts: task name -> its prompt.
      options: the report's, except for the outcome's tasks and notes.
      label: what to call the run.

    Returns:
      The report and the paths of the files.
    """
    # Empty tasks have no files.
    ranked = [name for name in outcome.tasks if name not in outcome.empty]
    decoded = [name for name in outcome.generated if name not in outcome.empty]
    options = dataclasses.replace(options, tasks=[*ranked, *decoded], notes=_notes(outcome))
    history = None
    if ranked and len(steps) > 1:
        history = read_history(outcome.folder, prompts, steps, ranked)
    run = Run(label, outcome.folder, steps[-1])
    report = make_report(run, prompts, options, ExtraContent(history=history))
    paths = write_report(report, out)
    if ranked:
        paths += write_tables(outcome.folder, steps[-1], prompts, out, ranked)
    return report, paths


def _notes(outcome: Outcome) -> tuple[str, ...]:
    notes = [f"No examples: {', '.join(outcome.empty)}."] if outcome.empty else []
    if outcome.left_out:
        notes.append(f"Left out: {reasons_in_words(outcome.left_out)}.")
    return tuple(notes)
