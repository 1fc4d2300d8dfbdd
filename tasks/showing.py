"""Computes `t0repro tasks` show and check: prompted examples, their tokens, truncation."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t0repro.errors import UserError, nearest_names
from t0repro.tasks.registry import how_to_register, registered_mixtures, task_descriptions
from t0repro.tasks.rendering import compile_template
from t0repro.tasks.source import PromptedRows
from t0repro.tasks.task import PromptedTask
from t0repro.tasks.templates import Drop, Rendering
from t0repro.tasks.vocabulary import VocabularyFile

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
        if name in registered_mixtures():
            raise UserError(
                f"{name!r} is a mixture, not a task.",
                fix=f"Show one of its tasks; t0repro tasks ls --mixture {name} lists them.",
            )
        raise UserError(
            f"There is no task {name!r}.",
            where="TASK",
            fix=how_to_register(name, nearest_names(name, task_descriptions())),
        )
    lengths = lengths or LENGTHS
    source = description.rows
    split = choose_split(source, name, split)
    # Render again without truncation, to show what it removes.
    uncut = compile_template(source.template, cut=False)
    tokenizer, error = find_tokenizer(description.vocabulary)
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
        examples.append(show_example(index, row, rendering, whole, tokenizer, lengths))
        if len(examples) == rows:
            break
    return ShownTask(description.prompt, split, examples, read, dict(dropped), lengths, error)


def choose_split(source: PromptedRows, name: str, split: str | None) -> str:
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
    available = set(source.available_splits())
    # If none is available, take the first: its reader's error lists every way to get the rows.
    return next((split for split in splits if split in available), splits[0])


def find_tokenizer(
    vocabulary: VocabularyFile | seqio.Vocabulary,
) -> tuple[SentencePieceProcessor | seqio.Vocabulary | None, str | None]:
    """What counts a vocabulary's tokens, or None and why there is nothing."""
    if not isinstance(vocabulary, VocabularyFile):
        return vocabulary, None
    try:
        return vocabulary.processor(), None
    except UserError as error:
        return None, str(error)


def show_example(
    index: int,
    row: Mapping[str, Any],
    rendering: Rendering,
    whole: Rendering | Drop,
    tokenizer: SentencePieceProcessor | seqio.Vocabulary | None,
    lengths: Mapping[str, int],
) -> ShownExample:
    """A row's example, its tokens, and what is cut off it.

    Args:
      index: The row's number.
      row: The row.
      rendering: Its example.
      whole: The same with variables of any length.
      tokenizer: Counts tokens; None counts none.
      lengths: Maximum tokens per feature.
    """
    choices, target = rendering.answer_choices or None, rendering.targets
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
        correct=choices.index(target) if choices and target in choices else None,
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
