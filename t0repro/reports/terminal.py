"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from t0repro.reports.compare import LossComparison, LossRow, ScoreComparison

if TYPE_CHECKING:
    from t0repro.reports.pages import Section
    from t0repro.reports.report import DatasetResult, GroupResult, Report

MAX_ROWS = 40

Row = TypeVar("Row")


def _console() -> Console:
    """The terminal; where output goes to a file, wide enough to keep rows on one line."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(markup=False, width=120)


def _table(title: str, text: str | None, numbers: Sequence[str]) -> Table:
    """An empty table: a column that folds, if any, and columns of numbers that do not."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    if text:
        table.add_column(text, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_losses(compared: LossComparison, console: Console | None = None) -> None:
    """Prints the losses step by step (thinned beyond MAX_ROWS) and the largest difference."""
    console = console or _console()
    numbers = ["step", compared.label_a, compared.label_b, "relative difference"]
    table = _table("Training loss, step by step", None, numbers)
    for row in thinned_losses(compared):
        table.add_row(*loss_cells(row), style="bold" if row is compared.worst else None)
    console.print(table)
    console.print(losses_in_words(compared))


def thinned_losses(compared: LossComparison, count: int = MAX_ROWS) -> list[LossRow]:
    """The rows to show: evenly chosen ones where there are many, the worst always among them."""
    rows = thinned(compared.rows, count)
    if not any(row is compared.worst for row in rows):
        rows = sorted([*rows, compared.worst], key=lambda row: row.step)
    return rows


def thinned(items: Sequence[Row], count: int) -> list[Row]:
    """At most `count` of the items, evenly spaced, first and last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def loss_cells(row: LossRow) -> tuple[str, str, str, str]:
    """A row as text: losses to seven digits, as float32 has them."""
    return (
        str(row.step),
        f"{row.loss_a:#.7g}",
        f"{row.loss_b:#.7g}",
        f"{row.relative_difference:.2e}",
    )


def losses_in_words(compared: LossComparison) -> str:
    """One sentence: the largest difference, where, and what could not be compared."""
    worst = compared.worst
    text = (
        f"Largest relative difference: {worst.relative_difference:.2e} at step {worst.step}"
        f" ({len(compared.rows)} steps compared)."
    )
    alone = compared.only_a + compared.only_b
    return f"{text} {alone} more steps are in one run only." if alone else text


def print_scores(compared: ScoreComparison, console: Console | None = None) -> None:
    """Prints one row a task, the largest difference, and where predictions differ."""
    console = console or _console()
    numbers = ["pairs", "per token", "flipped", compared.label_a, compared.label_b]
    title = f"Scores and accuracy: {compared.label_a} and {compared.label_b}"
    table = _table(title, "task", numbers)
    for task in compared.tasks:
        table.add_row(
            task.task,
            str(task.pairs),
            f"{task.max_difference_per_token:.2e}",
            str(task.flipped),
            f"{task.metrics_a['accuracy']:.2f}",
            f"{task.metrics_b['accuracy']:.2f}",
            style="bold" if task.flipped else None,
        )
    console.print(table)
    for line in scores_in_words(compared):
        console.print(line)
    for flip in compared.flips:
        console.print(
            f"  {flip.task} example {flip.example}: choice {flip.predicted_a} and"
            f" {flip.predicted_b}"
        )
    if compared.flipped > len(compared.flips):
        console.print(f"  ... and {compared.flipped - len(compared.flips)} more.")


def scores_in_words(compared: ScoreComparison) -> list[str]:
    """Sentences: where predictions differ, the largest differences, tasks in one run only."""
    worst = compared.worst
    where = f"on {compared.flipped} examples" if compared.flipped else "nowhere"
    lines = [
        f"Predictions differ: {where} ({compared.pairs} pairs of {len(compared.tasks)} tasks).",
        f"Largest difference of a score: {compared.max_difference:.2e};"
        f" per target token {worst.max_difference_per_token:.2e}"
        f" ({worst.task}, example {worst.at[0]}, choice {worst.at[1]});"
        f" of a metric: {compared.max_metric_difference:.2e} points.",
    ]
    for label, tasks in ((compared.label_a, compared.only_a), (compared.label_b, compared.only_b)):
        if tasks:
            lines.append(f"Only {label} has: {', '.join(tasks)}.")
    return lines


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints a report's datasets and groups: accuracy with its interval against chance."""
    console = console or _console()
    title = f"{report.title}: {report.provenance.label}, step {report.provenance.step}"
    numbers = ["prompts", "examples", "mean", "interval", "median", "chance", "above chance"]
    table = _table(title, "dataset", numbers)
    for group in report.groups:
        for dataset in report.datasets:
            if dataset.group == group.group:
                table.add_row(*_dataset_cells(dataset))
        table.add_row(*_group_cells(group), style="bold", end_section=True)
    if report.datasets:
        console.print(table)
    if report.generation:
        table = _table("Decoded", "dataset", ["examples"])
        table.add_column("prompt")
        table.add_column("metrics")
        for found in report.generation:
            metrics = ", ".join(f"{name} {value:.2f}" for name, value in found.metrics.items())
            row = (found.dataset, str(found.examples), found.template_name, metrics)
            table.add_row(*row)
        console.print(table)


def print_sections(sections: Sequence[Section], console: Console | None = None) -> None:
    """Prints the sections of a page: headings, sentences and tables, long ones cut short."""
    console = console or _console()
    for section in sections:
        if section.rows:
            table = _table(section.title, section.header[0], section.header[1:])
            for row in section.rows[:MAX_ROWS]:
                table.add_row(*row)
            console.print(table)
            if len(section.rows) > MAX_ROWS:
                console.print(f"... and {len(section.rows) - MAX_ROWS} more rows.")
        for line in section.lines:
            console.print(line)


def _dataset_cells(dataset: DatasetResult) -> list[str]:
    interval = dataset.mean_interval
    return [
        dataset.dataset,
        str(len(dataset.prompts)),
        str(dataset.examples),
        f"{dataset.accuracy.mean:.1f}",
        f"{interval.low:.1f}-{interval.high:.1f}",
        f"{dataset.accuracy.median:.1f}",
        f"{dataset.chance:.1f}",
        "clearly" if dataset.above_chance else "not clearly",
    ]


def _group_cells(group: GroupResult) -> list[str]:
    return [
        group.title,
        str(group.prompts),
        "",
        f"{group.mean:.1f}",
        f"{group.interval.low:.1f}-{group.interval.high:.1f}",
        "",
        f"{group.chance:.1f}",
        "clearly" if group.above_chance else "not clearly",
    ]
