"""`t0repro tasks check`: renders the first available rows of every task."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError
from t0repro.storage import is_address
from t0repro.tasks.catalog import label
from t0repro.tasks.prompt_environment import UndefinedVariable
from t0repro.tasks.registry import find_task, registered_tasks, task_descriptions, tasks_of_mixture
from t0repro.tasks.showing import LENGTHS, ROWS_LOOKED_AT
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import ADDS_EOS, SCORE_EVAL_SUFFIX, TaskDescription
from t0repro.tasks.templates import SEPARATOR, Drop, Rendering
from t0repro.tasks.vocabulary import VocabularyFile, address_of, check_ids, is_here
from t0repro.words import counted, shortened

if TYPE_CHECKING:
    import seqio


ROWS = 20
"""Rows to render per split; more only if none of them gives an example."""


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
      cut: Feature -> number of examples that lose tokens at T0's `LENGTHS`; empty if the vocabulary
        is not on this machine.
    """

    task: str
    dataset: str
    verdict: Verdict
    reason: str
    splits: tuple[str, ...]
    rows: int
    examples: int
    no_example: Mapping[str, int]
    cut: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}


def check_tasks(tasks: Sequence[str], advance: Callable[[int], None]) -> list[CheckedTask]:
    """Checks tasks; of one without a prompt, that it gives its output features.

    Args:
      tasks: Names of registered tasks.
      advance: Called with 1 after each task.
    """
    found, prompted = [], task_descriptions()
    for task in tasks:
        found.append(check_prompt(prompted[task]) if task in prompted else _check_seqios(task))
        advance(1)
    return found


def tasks_without_prompts(mixture: str | None) -> list[str]:
    """The tasks, of a mixture or of all, that were registered with SeqIO alone, sorted."""
    names = registered_tasks() if mixture is None else tasks_of_mixture(mixture)
    found = sorted(set(names) - set(task_descriptions()))
    if not found:
        return []
    import seqio

    # t5 registers hundreds of TensorFlow Datasets' tasks, whose splits may be looked up in a
    # bucket: check these only if they are named.
    return [
        name
        for name in found
        if mixture or not isinstance(seqio.TaskRegistry.get(name).source, seqio.TfdsDataSource)
    ]


def drop_twins(tasks: Sequence[str]) -> list[str]:
    """One task per prompt: leaves out a twin if its task is in the list as well."""
    names, known = set(tasks), task_descriptions()
    return [
        task
        for task in tasks
        if not known[task].prompt.score_eval or task.removesuffix(SCORE_EVAL_SUFFIX) not in names
    ]


def check_prompt(description: TaskDescription) -> CheckedTask:
    """Renders the first available rows of a task, which need not be registered."""
    prompted = description.rows
    splits = tuple(prompted.available_splits())
    seen = [_Seen(prompted, split) for split in splits]
    cut: dict[str, int] = {}
    try:
        for each in seen:
            each.render_first()
        verdict, reason = _judge(seen, description.prompt.has_answer_choices)
        cut = _count_cut(description.vocabulary, seen)
    except UserError as error:
        where = f" ({error.where})" if error.where else ""
        verdict, reason = Verdict.BROKEN, error.what + where
    return CheckedTask(
        task=description.prompt.name,
        dataset=label(prompted.dataset, prompted.subset),
        verdict=verdict,
        reason=reason,
        splits=splits,
        rows=sum(each.rows for each in seen),
        examples=sum(each.examples for each in seen),
        no_example=dict(sum((each.no_example for each in seen), Counter())),
        cut=cut,
    )


def _count_cut(
    vocabulary: VocabularyFile | seqio.Vocabulary, seen: Sequence[_Seen]
) -> dict[str, int]:
    # A check of prompts must not wait for a download.
    if not is_here(vocabulary) and is_address(address_of(vocabulary) or ""):
        return {}
    check_ids(vocabulary)
    tokenizer: Any = (
        vocabulary.processor() if isinstance(vocabulary, VocabularyFile) else vocabulary
    )
    texts = {
        feature: [text for each in seen for text in each.texts[feature]] for feature in LENGTHS
    }
    return {
        # Targets end in EOS.
        feature: sum(
            len(tokenizer.encode(text)) + ADDS_EOS[feature] > length for text in texts[feature]
        )
        for feature, length in LENGTHS.items()
    }


def _check_seqios(name: str) -> CheckedTask:
    from t0repro.tasks.seqio_tasks import check_features

    task: Any = find_task(name)
    splits: tuple[str, ...] = ()
    verdict, reason = Verdict.NO_ROWS, ""
    try:
        splits = tuple(task.splits)
        for split in splits:
            check_features(task, split, None)
            verdict = Verdict.OK
    except Exception as error:  # whatever its source or its preprocessors raise
        # TensorFlow Datasets lists all of its datasets in the message about one.
        raised = shortened(f"{type(error).__name__}: {error}", 200)
        verdict, reason = Verdict.BROKEN, error.what if isinstance(error, UserError) else raised
    return CheckedTask(name, name, verdict, reason, splits, 0, 0, {}, {})


def _judge(seen: Sequence[_Seen], has_answer_choices: bool) -> tuple[Verdict, str]:
    """A task's verdict and its reason, from the first rows of its splits."""
    if not seen:
        return Verdict.NO_ROWS, "its rows are not available"
    # A misspelled variable breaks a template, whatever else it does.
    undefined = [each.undefined for each in seen if each.undefined]
    if undefined:
        return Verdict.BROKEN, undefined[0]
    rows = sum(each.rows for each in seen)
    no_example = sum((each.no_example for each in seen), Counter())
    if not any(each.examples for each in seen):
        counts = f": {_describe_counts(no_example)}" if no_example else ""
        return (
            Verdict.BROKEN,
            f"none of the first {rows:,} rows gives an input and a target{counts}",
        )
    # Many datasets hide the labels of their test split, whose targets are then not among the
    # choices.
    labeled = [each for each in seen if each.split != "test"]
    unlabeled = sum((each.no_example for each in labeled), Counter())
    unlabeled = Counter({why: n for why, n in unlabeled.items() if why in _OF_OWN_PROMPTS})
    if unlabeled:
        return Verdict.SUSPECT, f"of {rows:,} rows looked at, {_describe_counts(unlabeled)}"
    alone = [each.split for each in seen if each.examples and not each.several]
    if has_answer_choices and alone:
        return (
            Verdict.SUSPECT,
            f"there is one answer choice; {SEPARATOR} separates several ({', '.join(alone)})",
        )
    never = [each.split for each in labeled if each.examples and not each.correct]
    if has_answer_choices and never:
        return (
            Verdict.SUSPECT,
            f"the target is never among the answer choices ({', '.join(never)})",
        )
    alike = [each.split for each in seen if each.examples and not each.distinct]
    if has_answer_choices and alike:
        return (
            Verdict.SUSPECT,
            f"an answer choice is always empty or equal to another ({', '.join(alike)})",
        )
    if has_answer_choices and any(each.counts_from_one() for each in labeled):
        return (
            Verdict.SUSPECT,
            "every answer choice is a target but the first; do labels count from 1? Then write"
            " answer_choices[label - 1]",
        )
    return Verdict.OK, ""


_OF_OWN_PROMPTS = (Drop.NO_TARGET.value, Drop.NO_LABEL.value)


def _describe_counts(counts: Counter[str]) -> str:
    return "; ".join(
        f"{count:,} give{'s' if count == 1 else ''} no example: {why}"
        for why, count in counts.most_common()
    )


class _Seen:
    """The result of rendering the first rows of a split.

    Attributes:
      split: The split's name.
      rows: Number of rows rendered.
      examples: Number of examples that they gave.
      correct: Number of examples whose target is one of the choices.
      several: Number of examples with more than one choice.
      distinct: Number of examples whose choices differ from each other, none of them empty.
      no_example: Reason -> number of rows that gave no example.
      lists: The lists of choices that examples have.
      texts: Feature -> its text in each example.
      undefined: Variables that the template reads but rows lack, in words; empty if none.
    """

    def __init__(self, source: PromptedRows, split: str):
        self._source, self.split = source, split
        self.rows = self.examples = self.correct = self.several = self.distinct = 0
        self.no_example: Counter[str] = Counter()
        self.lists: set[tuple[str, ...]] = set()
        self.texts: dict[str, list[str]] = {feature: [] for feature in LENGTHS}
        self.undefined = ""

    def render_first(self) -> None:
        """Renders the first ROWS rows, and more if none of them gives an example.

        Raises:
          UserError: If a row is broken or the template fails on it.
        """
        # Read more rows only until one of them gives an example.
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
            looked_at = f"{counted(self.rows, 'row')} looked at"
            self.undefined += f" Of {looked_at}, {_describe_counts(self.no_example)}"

    def counts_from_one(self) -> bool:
        """Whether each of three or more choices, the same for all rows, is right but the first."""
        if len(self.lists) != 1 or self.examples < ROWS:
            return False
        ((first, *others),) = self.lists
        return len(others) > 1 and set(self.texts["targets"]) == {*others} - {first}

    def _count(self, rendering: Rendering | Drop) -> None:
        if isinstance(rendering, Drop):
            self.no_example[rendering.value] += 1
            return
        self.examples += 1
        self.texts["inputs"].append(rendering.inputs)
        self.texts["targets"].append(rendering.targets)
        choices = rendering.answer_choices or ()
        self.lists.add(tuple(choices))
        self.correct += rendering.targets in choices
        self.several += len(choices) > 1
        self.distinct += all(choices) and len(set(choices)) == len(choices)
