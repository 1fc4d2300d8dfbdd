"""Generates targets for many examples, in programs of fixed shapes, returned in input order.

    tokens = generate_tokens(params, model, [example["inputs"] for example in examples],
                             config.decoding, length=128)
    texts = decode_texts(tokens, vocabulary)

The lengths of an input and of outputs decide the program that decodes it greedily or by sampling.
As in scoring (t0repro.evaluation.grouping), a row then has the same bits in any place and company,
and so the same tokens, however close the second likeliest is. What it samples follows from its
tokens and from how many equal inputs come before it. A beam search depends on all rows of its batch
(t0repro.model.decoding), so its batches are Mesh TensorFlow's: consecutive examples, the last batch
padded.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from t0repro.config.decoding import GREEDY, DecodingConfig
from t0repro.evaluation.engine import count_kept, is_out_of_memory
from t0repro.evaluation.grouping import memory_class
from t0repro.model.decoding import generate, search_limit
from t0repro.model.shapes import Int
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import count_data_shards, fetch, pad_rows, use_devices_of
from t0repro.progress import count_progress, say

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint

_IN_FLIGHT = 2  # batches dispatched before the oldest one's tokens are waited for
# Rows that a device decodes at once, at most: each step reads all parameters, for one row or many.
_MOST_ROWS = {"cpu": 32, "gpu": 256, "tpu": 256}

Batch = tuple[np.ndarray, int, int]
"""Numbers of rows, how many rows their program has, and the length that inputs are padded to."""


def generate_tokens(
    params: dict,
    model: T5,
    inputs: Sequence[Int[np.ndarray, " length"]],
    config: DecodingConfig,
    *,
    length: int,
    batch_size: int = 32,
    inputs_length: int | None = None,
    fill_with_first: int = 0,
) -> list[list[int]]:
    """Generates token ids for each input, up to and including EOS; zeros at the end are dropped.

    Args:
      params: the model's parameters.
      model: the model.
      inputs: token ids of each example; zeros at the end are padding.
      config: greedy, sampling or beam search.
      length: maximum tokens of an output.
      batch_size: number of inputs that a beam search decodes together; nothing else reads it.
      inputs_length: maximum tokens of an input; longer ones are truncated. None keeps all.
      fill_with_first: copies of the first input that a beam search appends, before empty rows.
    """
    rows = [_strip_padding(tokens, inputs_length) for tokens in inputs]
    outputs: list[list[int]] = [[] for _ in rows]
    searches, parts = config.beam_size > 1, count_data_shards(params)
    if searches:
        rows = _fill_batches(rows, batch_size, fill_with_first)
    limits, seeds = _search_limits(rows, config, batch_size), _noise_seeds(rows)

    def start(batches: Iterable[Batch]) -> Iterator[tuple[np.ndarray, Any]]:
        """Each batch's row numbers and its tokens, which the device may still be computing."""
        for members, size, input_length in batches:
            # Pad a partial batch with copies of its first row, which add no decoding steps.
            full = np.concatenate([members, np.full(size - len(members), members[0])])
            arrays = (_pad_rows([rows[n] for n in full], input_length), limits[full], seeds[full])
            # Padding rows for the devices end their beam search before its first step.
            padded, steps, noise = (pad_rows(x, parts) for x in arrays)
            with use_devices_of(params):
                decoded = generate(
                    model, params, padded, config, length=length, search_steps=steps, seeds=noise
                )
            yield members, decoded.tokens

    with count_progress(len(outputs), "decoding", "example", "decoded") as advance:
        left, split = dict.fromkeys(range(len(outputs))), 1
        while left:
            if searches:
                batches = _consecutive_batches(rows, batch_size)
            else:
                batches = _make_fixed_batches(rows, list(left), model, length, parts, split)
            try:
                for members, tokens in _fetch_in_order(start(batches)):
                    # Copies and padding come after the real rows, and are dropped.
                    real = members[members < len(outputs)].tolist()
                    for member, row in zip(real, tokens, strict=False):
                        outputs[member] = np.trim_zeros(row, "b").tolist()
                        del left[member]
                    advance(len(real))
            except jax.errors.JaxRuntimeError as error:
                if searches or not is_out_of_memory(error) or batches[0][1] <= parts:
                    raise
                split *= 2
                say_halved(batches[0][1])
    return outputs


def _fetch_in_order(
    start_batches: Iterator[tuple[np.ndarray, Any]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Fetches each batch only after starting the next one, so that the device stays busy."""
    waiting: deque[tuple[np.ndarray, Any]] = deque()
    for batch in start_batches:
        waiting.append(batch)
        if len(waiting) >= _IN_FLIGHT:
            members, tokens = waiting.popleft()
            yield members, fetch(tokens)
    for members, tokens in waiting:
        yield members, fetch(tokens)


def decode_texts(tokens: Sequence[Sequence[int]], vocabulary: Any) -> list[str]:
    """Decodes generated tokens to text, as Mesh TensorFlow does on a CPU.

    Args:
      tokens: token ids of each example.
      vocabulary: a SeqIO vocabulary. Uses its `decode_tf` if it has one, since `decode` treats ids
        beyond the vocabulary differently, and the model's padded vocabulary can generate them.
    """
    if not hasattr(vocabulary, "decode_tf"):
        return [vocabulary.decode(list(ids)) for ids in tokens]
    import tensorflow as tf

    longest = max((len(ids) for ids in tokens), default=0)
    if not longest:
        return ["" for _ in tokens]
    table = np.zeros((len(tokens), longest), np.int32)
    for row, ids in zip(table, tokens, strict=True):
        row[: len(ids)] = ids
    return [text.decode("utf-8") for text in vocabulary.decode_tf(tf.constant(table)).numpy()]


def _fill_batches(rows: list[np.ndarray], batch_size: int, copies: int) -> list[np.ndarray]:
    """The rows, then copies of the first, then empty rows up to a full batch."""
    rows = rows + rows[:1] * copies
    return rows + [np.zeros(0, np.int32)] * (-len(rows) % batch_size)


def _search_limits(rows: Sequence[np.ndarray], config: DecodingConfig, batch_size: int) -> Any:
    """Maximum beam-search steps of each row, from its batch's longest input: int32 [rows]."""
    lengths = np.array([np.count_nonzero(row) for row in rows], np.int64)
    limits = [
        search_limit(int(lengths[start : start + batch_size].max()), config)
        for start in range(0, len(rows), batch_size)
    ]
    return np.repeat(np.array(limits, np.int32), batch_size)[: len(rows)]


def _noise_seeds(rows: Sequence[np.ndarray]) -> Int[np.ndarray, "rows 2"]:
    """What decides each row's noise: a hash of its tokens, and how many equal rows precede it."""
    seen: Counter[int] = Counter()
    seeds = np.zeros((len(rows), 2), np.uint32)  # as zlib's
    for seed, row in zip(seeds, rows, strict=True):
        tokens = zlib.crc32(row.tobytes())
        seed[:] = tokens, seen[tokens]
        seen[tokens] += 1
    return seeds.view(np.int32)


def _consecutive_batches(rows: Sequence[np.ndarray], batch_size: int) -> list[Batch]:
    """Full batches in the order of the rows."""
    batches = []
    for start in range(0, len(rows), batch_size):
        longest = max(len(row) for row in rows[start : start + batch_size])
        members = np.arange(start, start + batch_size)
        batches.append((members, batch_size, memory_class(longest)))
    return batches


def _make_fixed_batches(
    rows: Sequence[np.ndarray],
    numbers: Sequence[int],
    model: T5,
    length: int,
    parts: int,
    split: int,
) -> list[Batch]:
    """Rows of one class of lengths together, the longest first so that memory runs out early.

    Args:
      rows: all of them.
      numbers: those to decode.
      model: the model.
      length: maximum tokens of an output.
      parts: number of devices that share the rows.
      split: what the number of rows is divided by, to fit the memory.
    """
    classes: dict[int, list[int]] = {}
    for number in numbers:
        classes.setdefault(memory_class(len(rows[number])), []).append(number)
    batches = []
    for padded, members in sorted(classes.items(), reverse=True):
        own = rows_decoded_together(model, padded + length, jax.default_backend())
        size = max(1, own // split) * parts
        batches += [
            (np.array(members[start : start + size]), size, padded)
            for start in range(0, len(members), size)
        ]
    return batches


def rows_decoded_together(model: T5, length: int, platform: str) -> int:
    """Rows of the program that decodes them on a device; another number might give other bits.

    Args:
      model: the model.
      length: tokens of an input and of its outputs together, padding included.
      platform: the device's.
    """
    return max(1, min(_MOST_ROWS.get(platform, 32), count_kept(model) // length))


def say_halved(rows: int) -> None:
    """Says that a program of so many rows did not fit the memory."""
    say(
        f"Out of memory with {rows} rows at once: continuing with half as many. Outputs that hang"
        " on rounding may differ from another device's."
    )


def _pad_rows(rows: Sequence[np.ndarray], length: int) -> Int[np.ndarray, "batch length"]:
    batch = np.zeros((len(rows), length), np.int32)
    for target, row in zip(batch, rows, strict=True):
        target[: len(row)] = row
    return batch


def _strip_padding(tokens: Any, length: int | None) -> np.ndarray:
    return np.trim_zeros(np.asarray(tokens, np.int32)[:length], "b")


def decode_examples(
    checkpoint: Checkpoint,
    examples: Sequence[Mapping[str, Any]],
    lengths: Mapping[str, int],
    vocabulary: Any,
) -> tuple[list[str], float]:
    """Decodes the inputs of a task without answer choices greedily, as T0 does.

    Args:
      checkpoint: the checkpoint to decode with.
      examples: the task's examples, at least one.
      lengths: maximum tokens of an input (`inputs`) and of an output (`targets`).
      vocabulary: a SeqIO vocabulary.

    Returns:
      The texts in the order of the examples, and the seconds that they took.
    """
    start_batches = time.monotonic()
    tokens = generate_tokens(
        checkpoint.params,
        checkpoint.model,
        [example["inputs"] for example in examples],
        GREEDY,
        length=lengths["targets"],
        inputs_length=lengths["inputs"],
    )
    seconds = time.monotonic() - start_batches
    return decode_texts(tokens, vocabulary), seconds
