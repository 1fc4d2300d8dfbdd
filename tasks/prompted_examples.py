"""A prompted task's evaluation without SeqIO and t5: examples from rows to tokens, and metrics.

Except for padding, the examples equal those of t5.models.mesh_transformer.mesh_eval_dataset_fn.
That function traces and runs a graph per task, which calls back into Python for each row: for a
mixture of a hundred tasks, it would take most of an evaluation's time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.tasks.task import TaskDescription
from t0repro.tasks.vocabulary import processor_of

Example = dict[str, Any]
Numbered = Iterator[tuple[int, Example]]

UNCUT: Mapping[str, int] = {"inputs": sys.maxsize, "targets": sys.maxsize}
"""Lengths that truncate nothing."""
_ROWS_AT_ONCE = 512  # tokenized together for speed; also limits memory
_MAX_CACHED_TARGETS = 4096


def prompted_examples(
    task: TaskDescription,
    split: str,
    lengths: Mapping[str, int],
    choose: Callable[[Numbered], Numbered] = iter,
) -> Iterator[Example]:
    """Yields a split's examples in the order of its rows; for a twin, one per answer choice.

    Args:
      task: A task with a SentencePiece vocabulary.
      split: The task's split to read.
      lengths: Maximum tokens per feature; longer ones are truncated, and truncated targets still
        end in EOS.
      choose: Filters the stream of (number, rendered row); keeps all of them by default.

    Yields:
      Examples with `inputs` and `targets`, int32 without padding, the texts of both as bytes
      (`*_pretokenized`), and `answer_choices` or, for a twin, `idx` int32 [2], `is_correct` and
      `weight`.

    Raises:
      UserError: If a row is missing or broken, or the vocabulary cannot be read.
    """
    rendered = choose(enumerate(task.rows.examples(split)))
    tokens, ranks = None, task.prompt.score_eval
    while block := list(itertools.islice(rendered, _ROWS_AT_ONCE)):
        tokens = tokens or _Tokens(task, lengths)  # report missing rows before anything else
        inputs = tokens.of_inputs([example["inputs"] for _, example in block])
        for (number, example), encoded in zip(block, inputs, strict=True):
            if ranks:
                yield from _make_choice_examples(example, encoded, number, tokens)
            else:
                yield _make_target_example(example, encoded, tokens)


def shard_of(shard: int, num_shards: int) -> Callable[[Numbered], Numbered]:
    """The `choose` that keeps one shard of a split."""
    # SeqIO shards the rendered rows, before a twin makes an example of each choice.
    return lambda rendered: itertools.islice(rendered, shard, None, num_shards)


def _make_target_example(example: Example, inputs: Example, tokens: _Tokens) -> Example:
    found = {**inputs, **tokens.of_target(example["targets"])}
    if "answer_choices" in example:
        choices = [choice.encode() for choice in example["answer_choices"]]
        found["answer_choices"] = np.array(choices, object)
    return found


def _make_choice_examples(
    example: Example, inputs: Example, ordinal: int, tokens: _Tokens
) -> Iterator[Example]:
    # As t5.data.preprocessors.rank_classification expands them.
    for index, choice in enumerate(example["answer_choices"]):
        yield {
            **inputs,
            **tokens.of_target(choice),
            # t5's preprocessor numbers inputs by their order in the split.
            "idx": np.array([ordinal, index], np.int32),
            "is_correct": np.bool_(choice == example["targets"]),
            "weight": np.float32(1.0),
        }


class _Tokens:
    """Tokenizes the texts of one task into features."""

    def __init__(self, task: TaskDescription, lengths: Mapping[str, int]):
        assert task.sp_model is not None
        self._processor = processor_of(task.sp_model)
        self._lengths = lengths
        self._targets: dict[str, Example] = {}  # choices repeat

    def of_inputs(self, texts: Sequence[str]) -> list[Example]:
        length = self._lengths["inputs"]
        return [
            {
                "inputs": np.array(tokens[:length], np.int32),
                "inputs_pretokenized": text.encode(),
            }
            for text, tokens in zip(texts, self._processor.encode(list(texts)), strict=True)
        ]

    def of_target(self, text: str) -> Example:
        found = self._targets.get(text)
        if found is None:
            if len(self._targets) >= _MAX_CACHED_TARGETS:
                self._targets.clear()
            eos, length = self._processor.eos_id(), self._lengths["targets"]
            tokens = [*self._processor.encode(text), eos]
            # Truncated, but still with EOS at the end.
            if len(tokens) > length:
                tokens = [*tokens[: length - 1], eos]
            found = self._targets[text] = {
                "targets": np.array(tokens, np.int32),
                "targets_pretokenized": text.encode(),
            }
        return found
