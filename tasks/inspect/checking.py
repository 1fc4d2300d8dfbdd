"""Implements `t0repro tasks check`: renders the first available rows of every task."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks.catalogue import label
from t0repro.tasks.inspect.showing import ROWS_LOOKED_AT
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import SCORE_EVAL_SUFFIX, task_descriptions
from t0repro.tasks.templates import Drop, Rendering, UndefinedVariable

ROWS = 20
"""Rows of each split that are rendered; more only where none of them gives an example."""


class Verdict(enum.Enum):
    """The outcome of checking a task."""

    OK = "ok"
    SUSPECT = "suspect"  # renders, but rank classification cannot be right, or labels are missing
    BROKEN = "broken"
    NO_ROWS = "no rows"


@dataclasses.dataclass(frozen=True)
class CheckedTask:
    """A task and the outcome of checking it.

    Attributes:
      task: The task's name.
      dataset: Its dataset, as `dataset` or `dataset/subset`.
      verdict: The outcome.
      reason: Why the verdict is not ok; empty if it is.
      splits: Splits that were checked.
      rows: Number of rows rendered.
      examples: Number of examples that they gave.
      no_example: Reason -> number of rows that gave no example.
    """

    task: str
    dataset: str
    verdict: Verdict
    reason: str
    splits: tuple[str, ...]
    rows: int
    examples: int
    no_example: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}


def check_tasks(tasks: Sequence[str], advance: Callable[[int], None]) -> list[CheckedTask]:
    """Checks tasks.

    Args:
      tasks: Names of registered prompted tasks.
      advance: Called with 1 after each task.
    """
    found = []
    for task in tasks:
        found.append(_check(task))
        advance(1)
    return found


def without_twins(tasks: Sequence[str]) -> list[str]:
    """One task per prompt: leaves out a twin if its task is in the list as well."""
    names, known = set(tasks), task_descriptions()
    return [
        task
        for task in tasks
        if not known[task].prompt.score_eval or task.removesuffix(SCORE_EVAL_SUFFIX) not in names
    ]


def _check(name: str) -> CheckedTask:
    description = task_descriptions()[name]
    prompted = description.rows
    splits = tuple(prompted.splits_at_hand())
    seen = [_Seen(prompted, split) for split in splits]
    try:
        for each in seen:
            each.render_first()
        verdict, reason = _judge(seen, description.prompt.has_answer_choices)
    except UserError as error:
        where = f" ({error.where})" if error.where else ""
        verdict, reason = Verdict.BROKEN, error.what + where
    return CheckedTask(
        task=name,
        dataset=label(prompted.dataset, prompted.subset),
        verdict=verdict,
        reason=reason,
        splits=splits,
        rows=sum(each.rows for each in seen),
        examples=sum(each.examples for each in seen),
        no_example=dict(sum((each.no_example for each in seen), Counter())),
    )


def _judge(seen: Sequence[_Seen], has_answer_choices: bool) -> tuple[Verdict, str]:
    """A task's verdict and the reason for it, judged by the first rows of its splits."""
    if not seen:
        return Verdict.NO_ROWS, "its rows are not available"
    # A misspelt variable is broken whatever else the template does.
    undefined = [each.undefined for each in seen if each.undefined]
    if undefined:
        return Verdict.BROKEN, undefined[0]
    rows = sum(each.rows for each in seen)
    no_example = sum((each.no_example for each in seen), Counter())
    if not any(each.examples for each in seen):
        counts = f": {_in_words(no_example)}" if no_example else ""
        return (
            Verdict.BROKEN,
            f"none of the first {rows:,} rows gives an input and a target{counts}",
        )
    # Many datasets hide the labels of their test split, where no target can be among the choices.
    labelled = [each for each in seen if each.split != "test"]
    unlabelled = sum((each.no_example for each in labelled), Counter())
    unlabelled = Counter({why: n for why, n in unlabelled.items() if why in _OF_OWN_PROMPTS})
    if unlabelled:
        return Verdict.SUSPECT, f"of {rows:,} rows looked at, {_in_words(unlabelled)}"
    never = [each.split for each in labelled if each.examples and not each.correct]
    if has_answer_choices and never:
        return (
            Verdict.SUSPECT,
            f"the target is never among the answer choices ({', '.join(never)})",
        )
    return Verdict.OK, ""


_OF_OWN_PROMPTS = (Drop.NO_TARGET.value, Drop.NO_LABEL.value)


def _in_words(counts: Counter[str]) -> str:
    return "; ".join(f"{count:,} give no example: {why}" for why, count in counts.most_common())


class _Seen:
    """What rendering the first rows of a split gave.

    Attributes:
      split: The split's name.
      rows: Number of rows rendered.
      examples: Number of examples that they gave.
      correct: Number of examples whose target is one of the choices.
      no_example: Reason -> number of rows that gave no example.
      undefined: What the template reads that rows do not have, in words; empty if nothing.
    """

    def __init__(self, source: PromptedRows, split: str):
        self._source, self.split = source, split
        self.rows = self.examples = self.correct = 0
        self.no_example: Counter[str] = Counter()
        self.undefined = ""

    def render_first(self) -> None:
        """Renders the first ROWS rows, and more if none of them gives an example.

        Raises:
          UserError: If a row is broken or the template fails on it.
        """
        # More rows are looked at only as long as none of them has given an example.
        for index, row in itertools.islice(self._source.rows(self.split), ROWS_LOOKED_AT):
            if self.rows >= ROWS and (self.examples or self.undefined):
                break
            self.rows += 1
            try:
                self._count(self._source.render(self.split, index, row))
            except UserError as error:
                if not isinstance(error.__cause__, UndefinedVariable):
                    raise
                self.no_example[f"the row lacks a variable, {error.__cause__}"] += 1
                self.undefined = self.undefined or f"{error.what} ({error.where})"
        if self.undefined:
            self.undefined += f" Of {self.rows} rows looked at, {_in_words(self.no_example)}"

    def _count(self, rendering: Rendering | Drop) -> None:
        if isinstance(rendering, Drop):
            self.no_example[rendering.value] += 1
            return
        self.examples += 1
        self.correct += rendering.targets in (rendering.answer_choices or ())
