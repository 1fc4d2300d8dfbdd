"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from t0repro.evaluation.compare import LossComparison, LossRow, ScoreComparison

MAX_ROWS = 40

Row = TypeVar("Row")


def print_losses(compared: LossComparison, console: Console | None = None) -> None:
    """Prints the losses step by step (thinned beyond MAX_ROWS) and the largest difference."""
    console = console or Console()
    table = Table(title="Training loss, step by step")
    table.add_column("step", justify="right")
    for label in (compared.label_a, compared.label_b):
        table.add_column(label, justify="right")
    table.add_column("relative difference", justify="right")
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
        f"{row.loss_a:.7g}",
        f"{row.loss_b:.7g}",
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
    console = console or Console()
    table = Table(title=f"{compared.label_a} and {compared.label_b}, pair by pair")
    table.add_column("task", overflow="fold")
    for name in ("pairs", "score diff. per token", "flipped"):
        table.add_column(name, justify="right")
    for label in (compared.label_a, compared.label_b):
        table.add_column(f"accuracy {label}", justify="right")
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
