"""What `t0repro tasks show` shows: prompted examples, their tokens, and what is cut off them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import PromptedTask, task_descriptions
from t0repro.tasks.templates import Drop, Rendering, compile_template
from t0repro.tasks.vocabulary import VocabularyFile

if TYPE_CHECKING:
    import seqio
    from sentencepiece import SentencePieceProcessor

ROWS_LOOKED_AT = 5_000
"""Rows read before giving up on a template that makes no example of them."""
VARIABLE_LENGTH = 2_048
"""Characters that promptsource leaves of a variable."""


@dataclasses.dataclass(frozen=True)
class ShownExample:
    """A prompted example.

    Attributes:
      row: its number in the split, from 0.
      inputs: the input.
      targets: the target.
      choices: the answer choices, or None.
      correct: which of them is the target; None if there are none, or it is not among them.
      input_tokens: of the input, which ends without EOS; None without a vocabulary.
      target_tokens: of the target, its EOS included.
      choice_tokens: of each choice, EOS included.
      cut_characters: (of the input, of the target), lost to the rule that a variable has at most
        2,048 characters.
      long_fields: names of the row's texts that are longer.
      kept_end: the last words of an input that is cut to `inputs` tokens; None if it is whole.
      lost_tokens: of (input, target), beyond the sequence lengths.
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
      task: what was registered.
      split: of the task.
      examples: the first ones.
      rows_read: rows read to get them.
      dropped: reason -> rows that the template makes no example of.
      lengths: feature -> tokens that are kept.
      vocabulary_error: why there are no token counts, or None.
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
      name: of a registered prompted task, or of its twin.
      split: of the task; None is the first of train, validation, test and others at hand.
      rows: the number of examples.
      lengths: tokens per feature; None is T0's 1,024 and 256.

    Raises:
      UserError: if task or split is not there, or rows are missing or broken.
    """
    description = task_descriptions().get(name)
    if description is None:
        raise UserError(
            f"There is no task {name!r}.",
            fix=f"Nearest: {nearest_names(name, task_descriptions())}.",
        )
    lengths = lengths or {"inputs": 1024, "targets": 256}
    source = description.rows
    split = chosen_split(source, name, split)
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
        whole = uncut.render(row, f"{source.name}/{split}/{index}")
        examples.append(_shown(index, row, rendering, whole, tokenizer, lengths))
        if len(examples) == rows:
            break
    return ShownTask(description.prompt, split, examples, read, dict(dropped), lengths, error)


def chosen_split(source: PromptedRows, name: str, split: str | None) -> str:
    """The split asked for, or the first of train, validation, test and others that is at hand.

    Raises:
      UserError: if the task does not have it; or, by the reader, if no rows are at hand.
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
    # If none is: the first, whose reader says every way to get its rows.
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
