"""Computes `t0repro tasks ls`, and prints the tables of ls, show and check on a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.text import Text

from t0repro.errors import UserError
from t0repro.tasks.catalogue import label, p3_sizes
from t0repro.tasks.showing import (
    LENGTHS,
    VARIABLE_LENGTH,
    CheckedTask,
    ShownExample,
    ShownTask,
    Verdict,
)
from t0repro.tasks.task import (
    PromptedTask,
    metric_names,
    prompted_mixtures,
    prompted_tasks,
    registered_mixtures,
    select_tasks,
    task_descriptions,
)
from t0repro.terminal import print_table, terminal
from t0repro.words import counted, printable, some

OVERSAMPLED = 2.0
"""A rate above this multiple of the training examples is marked."""


@dataclasses.dataclass(frozen=True)
class ListedTask:
    """A line of the list.

    Attributes:
      task: The SeqIO task's name.
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      template: promptsource's name for the template.
      choices: The answer choices; empty if they differ between examples, None if there are none.
      metrics: Names of its evaluation metrics.
      original_task: Whether the prompt poses the dataset's original task.
      mixture: The mixture of the rate, or None if no registered one has the task.
      rate: Its weight in the mixture, in examples; None if not known.
      examples: Number of training examples after the template has dropped rows; None if not known.
      oversampled: Rate divided by examples, if both are known and the task is not a twin.
      cached: The cache folder that has the complete task, or None.
    """

    task: str
    dataset: str
    subset: str | None
    template: str
    choices: tuple[str, ...] | None
    metrics: tuple[str, ...]
    original_task: bool
    mixture: str | None
    rate: float | None
    examples: int | None
    oversampled: float | None
    cached: str | None


def list_tasks(
    mixture: str | None = None,
    dataset: str | None = None,
    caches: Sequence[Path] = (),
    *,
    at_hand: bool = False,
) -> list[ListedTask]:
    """The registered prompted tasks, sorted by name.

    Args:
      mixture: Only tasks of this mixture; defaults to all.
      dataset: Only tasks of this dataset, given as `dataset` or `dataset/subset`.
      caches: SeqIO cache folders to look for each task in; the first that has it wins.
      at_hand: Only tasks that are cached there, or have a split with rows on this machine.

    Raises:
      UserError: If the mixture or the dataset does not exist; lists the nearest names.
    """
    known = prompted_tasks()
    names = select_tasks(mixture, dataset)
    mixtures = _mixtures_of_tasks() if mixture is None else {name: mixture for name in names}
    found = [_listed(known[name], mixtures.get(name), caches) for name in names]
    if not at_hand:
        return found
    rows = {name: task_descriptions()[name].rows for name in names}
    return [task for task in found if task.cached or rows[task.task].splits_at_hand()]


def _mixtures_of_tasks() -> dict[str, str]:
    """Task -> the first registered mixture that has it; all of T0's give it the same rate."""
    found: dict[str, str] = {}
    for name, tasks in registered_mixtures().items():
        for task in tasks:
            found.setdefault(task, name)
    return found


def _listed(task: PromptedTask, mixture: str | None, caches: Sequence[Path]) -> ListedTask:
    rate = None if mixture is None else _rate(mixture, task.name)
    # The marker is written last, so a folder with it is complete.
    cached = next(
        (folder for folder in caches if (folder / task.name / "COMPLETED").is_file()), None
    )
    examples = _training_examples(task.name, cached)
    trains = rate is not None and not task.score_eval
    return ListedTask(
        task=task.name,
        dataset=task.dataset,
        subset=task.subset,
        template=task.template_name,
        choices=(task.fixed_choices or ()) if task.has_answer_choices else None,
        metrics=metric_names(task),
        original_task=task.original_task,
        mixture=mixture,
        rate=rate,
        examples=examples,
        # A twin's rate has no meaning, since nothing trains on it.
        oversampled=rate / examples if trains and rate and examples else None,
        cached=None if cached is None else str(cached),
    )


def _rate(mixture: str, task: str) -> float | None:
    try:
        known = prompted_mixtures().get(mixture)
        rate = _rate_in_seqio(mixture, task) if known is None else known.rate(task)
    except UserError:  # the rate is a number of rows, which are not available
        return None
    # Most rates are integers; print these without a fraction.
    return int(rate) if float(rate).is_integer() else rate


def _rate_in_seqio(mixture: str, task: str) -> float:
    import seqio

    return seqio.MixtureRegistry.get(mixture).get_rate(seqio.TaskRegistry.get(task))


def _training_examples(task: str, cached: Path | None) -> int | None:
    if cached is not None:
        statistics = cached / task / "stats.train.json"
        if statistics.is_file():
            # The cache's own statistics are exact; P3's sizes are those of the released version.
            return json.loads(statistics.read_text()).get("examples")
    return p3_sizes().get(task, {}).get("train")


def as_json(tasks: Sequence[ListedTask]) -> list[dict[str, Any]]:
    """The lines as JSON values; choices that differ between examples become `per example`."""
    return [_task_as_json(task) for task in tasks]


def _task_as_json(task: ListedTask) -> dict[str, Any]:
    values: Mapping[str, Any] = dataclasses.asdict(task)
    return {**values, "choices": "per example" if task.choices == () else values["choices"]}


# ---- Prints the results of `t0repro tasks` ls, show and check on a terminal ----------------------


# For a file or another program: keep a list's lines complete and examples readable.
LIST_WIDTH, TEXT_WIDTH = 1_000, 100


# ls --------------------------------------------------------------------------------------------


def print_list(tasks: Sequence[ListedTask], caches: Sequence[Path]) -> None:
    """Prints a row for each task, then a summary in words."""
    console = terminal(LIST_WIDTH)
    header = ["task", "dataset", "template", "choices", "metrics", "rate", "examples"]
    cached = [[task.cached or "no"] if caches else [] for task in tasks]
    rows = [[*_cells(task), *more] for task, more in zip(tasks, cached, strict=True)]
    header += ["cached"] if caches else []
    print_table(console, "", header, rows, numbers=("rate", "examples"))
    for line in list_in_words(tasks, caches):
        console.print(line)


def _cells(task: ListedTask) -> list[str | Text]:
    examples = "" if task.examples is None else f"{task.examples:,}"
    rate = "" if task.rate is None else f"{task.rate:,}"
    times = task.oversampled or 0.0
    return [
        task.task,
        label(task.dataset, task.subset),
        printable(task.template),
        printable(_choices_in_words(task.choices)),
        ", ".join(task.metrics),
        Text(f"{rate} ({times:.0f}x)", style="yellow") if times > OVERSAMPLED else rate,
        examples,
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


# show ------------------------------------------------------------------------------------------


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
    inputs = Text(_shown(example.inputs))
    # A set: choices may repeat.
    for choice in set(example.choices or ()):
        inputs.highlight_words([_shown(choice)], style="underline")
    body.append_text(inputs)
    body.append("\n\ntarget", style="bold green")
    body.append(_count(example.target_tokens) + "\n")
    body.append(_shown(example.targets), style="green")
    for line, style in _choice_lines(example, shown):
        body.append("\n")
        body.append(line, style=style)
    for line in truncation_in_words(example, shown):
        body.append("\n")
        body.append(line, style="yellow")
    return Panel(body, title=f"row {example.row}", title_align="left")


def _shown(text: str) -> str:
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


# check -----------------------------------------------------------------------------------------


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
