"""What `t0repro tasks check` does: renders the first rows of every task, from what is at hand."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks.inspect.showing import ROWS_LOOKED_AT
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import SCORE_EVAL_SUFFIX, task_descriptions
from t0repro.tasks.templates import Drop

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
    """

    task: str
    dataset: str
    verdict: Verdict
    reason: str
    splits: tuple[str, ...]
    rows: int
    examples: int

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
    task, prompted = description.prompt, description.rows
    dataset = task.dataset if task.subset is None else f"{task.dataset}/{task.subset}"
    splits = tuple(prompted.splits_at_hand())
    rows = examples = 0
    never_correct = []

    def found(verdict: Verdict, reason: str = "") -> CheckedTask:
        return CheckedTask(task.name, dataset, verdict, reason, splits, rows, examples)

    if not splits:
        return found(Verdict.NO_ROWS, "its rows are not at hand")
    for split in splits:
        try:
            count, rendered, correct = _render_first(prompted, split)
        except UserError as error:
            where = f" ({error.where})" if error.where else ""
            return found(Verdict.BROKEN, error.what + where)
        rows, examples = rows + count, examples + rendered
        if task.has_answer_choices and rendered and not correct and _is_labelled(split):
            never_correct.append(split)
    if not examples:
        return found(Verdict.BROKEN, f"none of the first {rows:,} rows gives an input and a target")
    if never_correct:
        splits_in_words = ", ".join(never_correct)
        return found(
            Verdict.SUSPECT, f"the target is never among the answer choices ({splits_in_words})"
        )
    return found(Verdict.OK)


def _is_labelled(split: str) -> bool:
    """Labels of test splits are hidden in many datasets: no target is among the choices there."""
    return split != "test"


def _render_first(source: PromptedRows, split: str) -> tuple[int, int, int]:
    """Rows rendered, examples that came of them, examples whose target is one of the choices."""
    count = examples = correct = 0
    for index, row in itertools.islice(source.rows(split), ROWS_LOOKED_AT):
        if count >= ROWS and examples:
            break
        count += 1
        rendering = source.render(split, index, row)
        if isinstance(rendering, Drop):
            continue
        examples += 1
        correct += rendering.targets in (rendering.answer_choices or ())
    return count, examples, correct
