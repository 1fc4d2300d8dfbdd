"""Sections of a report's page: what was read of each task, and what it took."""

from __future__ import annotations

from collections.abc import Sequence

from t0repro.reports.page import Cell, Column, Section
from t0repro.reports.report import Report
from t0repro.reports.task_cost import TaskCost
from t0repro.words import counted

_TASKS_SHOWN = 10


def coverage_in_words(report: Report) -> list[str]:
    """Sentences: how many of how many inputs were evaluated, and how many were cut."""
    return [*_sampled_in_words(report.tasks), *_cut_in_words(report.tasks)]


def _sampled_in_words(tasks: Sequence[TaskCost]) -> list[str]:
    # Only what both numbers are known of can be summed.
    known = [
        (cost.inputs, cost.available)
        for cost in tasks
        if cost.inputs is not None and cost.available is not None
    ]
    if not known:
        return []
    inputs, available = (sum(numbers) for numbers in zip(*known, strict=True))
    unknown = len(tasks) - len(known)
    rest = f"; of {counted(unknown, 'task')} it was not recorded" if unknown else ""
    if inputs == available:
        return [f"Evaluated on all inputs, {available:,} over all tasks{rest}."]
    return [
        f"Evaluated on a sample: {inputs:,} of {counted(available, 'input')} over all tasks{rest}."
    ]


def _cut_in_words(tasks: Sequence[TaskCost]) -> list[str]:
    known = [cost for cost in tasks if cost.cut_inputs is not None]
    if not known:
        return []
    inputs = sum(cost.cut_inputs or 0 for cost in known)
    targets = sum(cost.cut_targets or 0 for cost in known)
    if not inputs + targets:
        return ["No input or target was cut to the sequence lengths."]
    total = sum(cost.inputs or 0 for cost in known)
    return [
        f"Cut to the sequence lengths: {inputs:,} of {counted(total, 'input')} and"
        f" {counted(targets, 'target')}. A cut input may lack its question; longer sequence"
        " lengths may give other results."
    ]


def coverage_sections(report: Report) -> list[Section]:
    """The tasks of which only a sample was evaluated, or of which something was cut."""
    header = (Column("task"), "inputs", "of", "inputs cut", "targets cut")
    rows = tuple(
        (
            cost.task,
            _number(cost.inputs),
            _number(cost.available),
            _number(cost.cut_inputs),
            _number(cost.cut_targets),
        )
        for cost in report.tasks
        # Of older evaluations both numbers are None, and so are equal.
        if cost.cut_inputs or cost.cut_targets or cost.inputs != cost.available
    )
    return [Section("Sampled and cut tasks", header=header, rows=rows)] * bool(rows)


def _number(value: int | None) -> str:
    return "not recorded" if value is None else str(value)


def cost_sections(report: Report) -> list[Section]:
    """The tasks that took most seconds and those with the longest inputs, each once."""
    slowest = sorted(report.tasks, key=lambda cost: -cost.seconds)[:_TASKS_SHOWN]
    longest = sorted(report.tasks, key=lambda cost: -cost.longest_input)[:_TASKS_SHOWN]
    # Both lists may name a task; it is shown once.
    shown: Sequence[TaskCost] = list(dict.fromkeys([*slowest, *longest]))
    header = (Column("task"), "pairs", "tokens", "longest input", "seconds")
    rows = tuple(
        (
            cost.task,
            str(cost.pairs),
            str(cost.tokens),
            str(cost.longest_input),
            Cell(f"{cost.seconds:.1f}", cost.seconds),
        )
        for cost in shown
    )
    return [Section("Slowest and longest tasks", header=header, rows=rows)] * bool(rows)
