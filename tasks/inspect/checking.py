"""What `t0repro tasks check` does: renders the first rows of every task, from what is at hand."""

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
    """How a task stands."""

    OK = "ok"
    SUSPECT = "suspect"  # it renders, but rank classification must go wrong
    BROKEN = "broken"
    NO_ROWS = "no rows"


@dataclasses.dataclass(frozen=True)
class CheckedTask:
    """A task and how it stands.

    Attributes:
      task: its name.
      dataset: of the task, `dataset` or `dataset/subset`.
      verdict: how it stands.
      reason: of a verdict that is not ok.
      splits: those looked at.
      rows: rendered.
      examples: that came of them.
      no_example: reason -> rows that gave no example for it.
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
      tasks: names of registered prompted tasks.
      advance: told of each task done.
    """
    found = []
    for task in tasks:
        found.append(_check(task))
        advance(1)
    return found


def without_twins(tasks: Sequence[str]) -> list[str]:
    """One task for each prompt: a twin is left out where its task is there as well."""
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
    """A task's verdict and its reason, from what its splits' first rows gave."""
    if not seen:
        return Verdict.NO_ROWS, "its rows are not at hand"
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
    # Labels of test splits are hidden in many datasets: no target is among the choices there.
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
    """What the first rows of a split gave.

    Attributes:
      split: its name.
      rows: rendered.
      examples: that came of them.
      correct: examples whose target is one of the choices.
      no_example: reason -> rows that gave none.
      undefined: what the template reads that rows do not have, in words; empty if nothing.
    """

    def __init__(self, source: PromptedRows, split: str):
        self._source, self.split = source, split
        self.rows = self.examples = self.correct = 0
        self.no_example: Counter[str] = Counter()
        self.undefined = ""

    def render_first(self) -> None:
        """Renders the first rows, more where none of them gives an example.

        Raises:
          UserError: if a row is broken or the template fails on it.
        """
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
