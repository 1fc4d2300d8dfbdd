"""Computes `t0repro tasks` show and check: prompted examples, their tokens, truncation."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.catalogue import label
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import (
    ADDS_EOS,
    SCORE_EVAL_SUFFIX,
    PromptedTask,
    find_task,
    registered_tasks,
    task_descriptions,
    tasks_of_mixture,
)
from t0repro.tasks.templates import Drop, Rendering, UndefinedVariable, compile_template
from t0repro.tasks.vocabulary import BYTES, VocabularyFile, address_of, check_ids
from t0repro.words import shortened

if TYPE_CHECKING:
    import seqio
    from sentencepiece import SentencePieceProcessor


ROWS_LOOKED_AT = 5_000
"""Rows read before giving up on a template that gives no example."""
VARIABLE_LENGTH = 2_048
"""Characters to which promptsource truncates a variable."""
LENGTHS: Mapping[str, int] = {"inputs": 1024, "targets": 256}
"""T0's tokens per feature."""


@dataclasses.dataclass(frozen=True)
class ShownExample:
    """A prompted example.

    Attributes:
      row: The row's number in the data, from 0.
      inputs: The input.
      targets: The target.
      choices: The answer choices, or None.
      correct: Index of the choice that is the target, or None.
      input_tokens: Number of tokens in the input, which has no EOS; None without a vocabulary.
      target_tokens: Number of tokens in the target, including EOS; None without a vocabulary.
      choice_tokens: Number of tokens in each choice, including EOS, or None.
      cut_characters: Characters lost from (input, target) because variables are truncated at 2,048.
      long_fields: Names of the row's text fields that are longer than that.
      kept_end: The last characters of an input truncated to the sequence length, else None.
      lost_tokens: Tokens of (input, target) beyond the sequence lengths.
    """

    row: int
    inputs: str
    targets: str
    choices: list[str] | None
    correct: int | None
    input_tokens: int | None
    target_tokens: int | None
    choice_tokens: list[int] | None
    cut_characters: tuple[int, int]
    long_fields: list[str]
    kept_end: str | None
    lost_tokens: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ShownTask:
    """A task's examples.

    Attributes:
      task: The registered task.
      split: The task's split.
      examples: Its first examples.
      rows_read: Number of rows read to get them.
      dropped: Reason -> number of rows that gave no example.
      lengths: Feature -> maximum number of tokens.
      vocabulary_error: Why there are no token counts, or None.
    """

    task: PromptedTask
    split: str
    examples: list[ShownExample]
    rows_read: int
    dropped: Mapping[str, int]
    lengths: Mapping[str, int]
    vocabulary_error: str | None

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return dataclasses.asdict(self)


def show_task(
    name: str, split: str | None, rows: int, lengths: Mapping[str, int] | None = None
) -> ShownTask:
    """The first examples of a task.

    Args:
      name: Name of a registered prompted task, or of a twin.
      split: The task's split; defaults to the first of train, validation, test and others that is
        available.
      rows: Number of examples.
      lengths: Maximum tokens per feature; defaults to T0's 1,024 for inputs and 256 for targets.

    Raises:
      UserError: If there is no such task or split, or rows are missing or broken.
    """
    description = task_descriptions().get(name)
    if description is None:
        raise UserError(
            f"There is no task {name!r}.",
            fix=f"Nearest: {nearest_names(name, task_descriptions())}.",
        )
    lengths = lengths or LENGTHS
    source = description.rows
    split = chosen_split(source, name, split)
    # Render again without truncation, to show what it removes.
    uncut = compile_template(source.template, cut=False)
    tokenizer, error = _tokenizer(description.vocabulary)
    dropped: Counter[str] = Counter()
    examples: list[ShownExample] = []
    read = 0
    for index, row in itertools.islice(source.rows(split), ROWS_LOOKED_AT):
        read += 1
        rendering = source.render(split, index, row)
        if isinstance(rendering, Drop):
            dropped[rendering.value] += 1
            continue
        # Use the same random choices as above, or the two could not be compared.
        whole = uncut.render(row, f"{source.name}/{split}/{index}")
        examples.append(_shown(index, row, rendering, whole, tokenizer, lengths))
        if len(examples) == rows:
            break
    return ShownTask(description.prompt, split, examples, read, dict(dropped), lengths, error)


def chosen_split(source: PromptedRows, name: str, split: str | None) -> str:
    """The requested split, or the first of train, validation, test and others that is available.

    Raises:
      UserError: If the task has no such split.
    """
    splits = list(source.files_of_splits)
    if split is not None:
        if split not in splits:
            raise UserError(
                f"{name} has no split {split!r}.",
                where="--split",
                fix=f"Its splits: {', '.join(splits)}.",
            )
        return split
    order = {"train": 0, "validation": 1, "test": 2}
    splits.sort(key=lambda name: order.get(name, 3))
    at_hand = set(source.splits_at_hand())
    # If none is available, take the first: its reader's error lists every way to get the rows.
    return next((split for split in splits if split in at_hand), splits[0])


def _tokenizer(
    vocabulary: VocabularyFile | seqio.Vocabulary,
) -> tuple[SentencePieceProcessor | seqio.Vocabulary | None, str | None]:
    if not isinstance(vocabulary, VocabularyFile):
        return vocabulary, None
    try:
        return vocabulary.processor(), None
    except UserError as error:
        return None, str(error)


def _place(choices: list[str] | None, target: str) -> int | None:
    return choices.index(target) if choices and target in choices else None


def _shown(
    index: int,
    row: Mapping[str, Any],
    rendering: Rendering,
    whole: Rendering | Drop,
    tokenizer: SentencePieceProcessor | seqio.Vocabulary | None,
    lengths: Mapping[str, int],
) -> ShownExample:
    choices = rendering.answer_choices or None
    tokens = tokenizer.encode(rendering.inputs) if tokenizer else None
    # EOS counts, as it does in a batch.
    target_tokens = len(tokenizer.encode(rendering.targets)) + 1 if tokenizer else None
    kept_end = None
    if tokenizer and tokens and len(tokens) > lengths["inputs"]:
        kept_end = tokenizer.decode(tokens[: lengths["inputs"]])[-60:]
    cut = (0, 0)
    if isinstance(whole, Rendering):
        cut = (
            max(len(whole.inputs) - len(rendering.inputs), 0),
            max(len(whole.targets) - len(rendering.targets), 0),
        )
    return ShownExample(
        row=index,
        inputs=rendering.inputs,
        targets=rendering.targets,
        choices=choices,
        correct=_place(choices, rendering.targets),
        input_tokens=None if tokens is None else len(tokens),
        target_tokens=target_tokens,
        choice_tokens=(
            [len(tokenizer.encode(choice)) + 1 for choice in choices]
            if tokenizer and choices
            else None
        ),
        cut_characters=cut,
        long_fields=[
            field
            for field, value in row.items()
            if isinstance(value, str) and len(value) > VARIABLE_LENGTH
        ],
        kept_end=kept_end,
        lost_tokens=(
            max(len(tokens or ()) - lengths["inputs"], 0),
            max((target_tokens or 0) - lengths["targets"], 0),
        ),
    )


# ---- `t0repro tasks check`: renders the first available rows of every task -----------------------


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
        found.append(_check(task) if task in prompted else _check_seqios(task))
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
        task=name,
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
    address = address_of(vocabulary)
    if address not in (None, BYTES) and not Path(address).is_file():
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
    # A misspelt variable breaks a template, whatever else it does.
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
    # Many datasets hide the labels of their test split, whose targets are then not among the
    # choices.
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
    """The result of rendering the first rows of a split.

    Attributes:
      split: The split's name.
      rows: Number of rows rendered.
      examples: Number of examples that they gave.
      correct: Number of examples whose target is one of the choices.
      no_example: Reason -> number of rows that gave no example.
      texts: Feature -> its text in each example.
      undefined: Variables that the template reads but rows lack, in words; empty if none.
    """

    def __init__(self, source: PromptedRows, split: str):
        self._source, self.split = source, split
        self.rows = self.examples = self.correct = 0
        self.no_example: Counter[str] = Counter()
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
            self.undefined += f" Of {self.rows} rows looked at, {_in_words(self.no_example)}"

    def _count(self, rendering: Rendering | Drop) -> None:
        if isinstance(rendering, Drop):
            self.no_example[rendering.value] += 1
            return
        self.examples += 1
        self.texts["inputs"].append(rendering.inputs)
        self.texts["targets"].append(rendering.targets)
        self.correct += rendering.targets in (rendering.answer_choices or ())
