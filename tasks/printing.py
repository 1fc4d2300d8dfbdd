"""Prints the results of `t0repro tasks` ls, show and check on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from t0repro.tasks.catalog import label
from t0repro.tasks.checking import CheckedTask, Verdict
from t0repro.tasks.listing import OVERSAMPLED, ListedTask
from t0repro.tasks.showing import LENGTHS, VARIABLE_LENGTH, ShownExample, ShownTask
from t0repro.terminal import print_table, terminal
from t0repro.words import counted, printable, some

# For a file or another program: keep a list's lines complete and examples readable.
LIST_WIDTH, TEXT_WIDTH = 1_000, 100


def print_list(tasks: Sequence[ListedTask], caches: Sequence[Path]) -> None:
    """Prints a row for each task, then a summary in words."""
    console = terminal(LIST_WIDTH)
    header = ["task", "dataset", "template", "choices", "metrics", "rate"]
    rows = [_cells(task) for task in tasks]
    if any(task.examples is not None for task in tasks):
        header.append("examples")
        for row, task in zip(rows, tasks, strict=True):
            row.append("" if task.examples is None else f"{task.examples:,}")
    if caches:
        header.append("cached")
        for row, task in zip(rows, tasks, strict=True):
            row.append(task.cached or "no")
    print_table(console, "", header, rows, numbers=("rate", "examples"))
    for line in list_in_words(tasks, caches):
        console.print(line)


def _cells(task: ListedTask) -> list[str | Text]:
    rate = "" if task.rate is None else f"{task.rate:,}"
    times = task.oversampled or 0.0
    return [
        task.task,
        label(task.dataset, task.subset),
        printable(task.template),
        printable(_choices_in_words(task.choices)),
        ", ".join(task.metrics),
        Text(f"{rate} ({times:.0f}x)", style="yellow") if times > OVERSAMPLED else rate,
    ]


def _choices_in_words(choices: tuple[str, ...] | None) -> str:
    if choices is None:
        return ""
    if not choices:
        return "per example"
    text = " | ".join(choices)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(choices)})"


def list_in_words(tasks: Sequence[ListedTask], caches: Sequence[Path]) -> list[str]:
    """Summary lines: how many tasks there are, how many are cached, which are oversampled."""
    datasets = {(task.dataset, task.subset) for task in tasks}
    lines = [f"{counted(len(tasks), 'task')} of {counted(len(datasets), 'dataset')}."]
    if caches:
        lines.append(f"{sum(task.cached is not None for task in tasks)} of them are cached.")
    over = [task for task in tasks if (task.oversampled or 0.0) > OVERSAMPLED]
    over.sort(key=lambda task: -(task.oversampled or 0.0))
    if over:
        most = over[0]
        lines.append(
            f"{len(over)} have a rate of more than {OVERSAMPLED:g} times their training examples,"
            f" since T0's rates count the rows that a template drops: most of all {most.task},"
            f" {most.rate:,} for {most.examples:,} ({most.oversampled:.0f} times)."
        )
    return lines


def print_task(shown: ShownTask) -> None:
    """Prints a task's examples: input, target, choices, tokens, and truncated text."""
    console, task = terminal(TEXT_WIDTH), shown.task
    dataset = label(task.dataset, task.subset)
    console.print(Text(task.name, style="bold"), f"split {shown.split}")
    console.print(printable(f"{dataset}, template {task.template_name!r} ({task.template_id})"))
    if shown.vocabulary_error:
        console.print(f"No token counts: {shown.vocabulary_error}")
    for example in shown.examples:
        console.print(_panel(example, shown))
    console.print(
        f"{counted(shown.rows_read, 'row')} read, {counted(len(shown.examples), 'example')}."
    )
    for reason, count in shown.dropped.items():
        console.print(f"{counted(count, 'row gives', 'rows give')} none: {reason}.")


def _panel(example: ShownExample, shown: ShownTask) -> Panel:
    body = Text()
    body.append("input", style="bold cyan")
    body.append(_count(example.input_tokens) + "\n")
    inputs = Text(_strip_controls(example.inputs))
    # A set: choices may repeat.
    for choice in set(example.choices or ()):
        inputs.highlight_words([_strip_controls(choice)], style="underline")
    body.append_text(inputs)
    body.append("\n\ntarget", style="bold green")
    body.append(_count(example.target_tokens) + "\n")
    body.append(_strip_controls(example.targets), style="green")
    for line, style in _choice_lines(example, shown):
        body.append("\n")
        body.append(line, style=style)
    for line in truncation_in_words(example, shown):
        body.append("\n")
        body.append(line, style="yellow")
    return Panel(body, title=f"row {example.row}", title_align="left")


def _strip_controls(text: str) -> str:
    """The text with its line breaks, but without terminal control sequences."""
    return printable(text, keep="\n\t")


def _count(tokens: int | None) -> str:
    return "" if tokens is None else f" ({counted(tokens, 'token')})"


def _choice_lines(example: ShownExample, shown: ShownTask) -> list[tuple[str, str]]:
    if not example.choices:
        return []
    heading = "choices"
    if shown.task.score_eval:
        heading += f", each a pair with the input ({counted(len(example.choices), 'pair')})"
    lines = [("", ""), (heading, "bold magenta")]
    for number, choice in enumerate(example.choices):
        tokens = None if example.choice_tokens is None else example.choice_tokens[number]
        right = number == example.correct
        lines.append(
            (
                f"{'*' if right else ' '} {printable(choice)}{_count(tokens)}",
                "green" if right else "",
            )
        )
    if example.correct is None:
        lines.append(("The target is none of them: ranking counts this example as wrong.", "red"))
    return lines


def truncation_in_words(example: ShownExample, shown: ShownTask) -> list[str]:
    """Lines that report what the limits on variables and sequences truncated."""
    lines = []
    for name, lost in zip(("input", "target"), example.cut_characters, strict=True):
        if lost:
            fields = f" (long: {', '.join(example.long_fields)})" if example.long_fields else ""
            lines.append(
                f"cut: {counted(lost, 'character')} of the {name}; a variable has at most"
                f" {VARIABLE_LENGTH:,}{fields}"
            )
    pairs = zip(("inputs", "targets"), example.lost_tokens, strict=True)
    for feature, lost in pairs:
        if lost:
            lines.append(
                f"cut: {counted(lost, 'token')} beyond {shown.lengths[feature]:,} of {feature}"
            )
    if example.kept_end:
        lines.append(f"  the input then ends: ...{printable(example.kept_end)}")
    return lines


def print_checks(checked: Sequence[CheckedTask]) -> None:
    """Prints suspect and broken tasks with reasons, and the number of tasks per verdict."""
    console = terminal(LIST_WIDTH)
    for verdict in (Verdict.SUSPECT, Verdict.BROKEN):
        for task in checked:
            if task.verdict is verdict:
                line = printable(f"{verdict.value}: {task.task}: {task.reason}")
                console.print(line, soft_wrap=True)
    absent = sorted({task.dataset for task in checked if task.verdict is Verdict.NO_ROWS})
    if absent:
        console.print(f"no rows available: {', '.join(absent)}", soft_wrap=True)
    for feature, length in LENGTHS.items():
        lost = {
            task.task: task.cut[feature] / task.examples
            for task in checked
            if task.cut.get(feature)
        }
        if lost:
            worst = sorted(lost, key=lambda name: (-lost[name], name))
            named = some([f"{100 * lost[name]:.0f}% of {name}" for name in worst])
            line = f"{feature} of more than {counted(length, 'token')} (T0's length) lose their end"
            console.print(f"{line}: {named}", soft_wrap=True)
    counts = Counter(task.verdict for task in checked)
    kinds = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    console.print(f"{counted(len(checked), 'task')}: {kinds}.")
