"""Generates targets for many examples, batched by input length, returned in input order.

    tokens = generate_tokens(params, model, [example["inputs"] for example in examples],
                             config.decoding, length=128)
    texts = decode_texts(tokens, vocabulary)

In greedy decoding, neither order nor batching changes the output. A beam search depends on both
slightly (t0repro.model.decoding), so its batches equal Mesh TensorFlow's: consecutive examples, the
last batch padded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from t0repro.config.decoding import GREEDY, DecodingConfig
from t0repro.model.decoding import generate, search_limit
from t0repro.model.shapes import Int
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import count_data_shards, fetch, pad_rows, use_devices_of
from t0repro.progress import count_progress

if TYPE_CHECKING:
    from t0repro.evaluation.opened import Checkpoint

_IN_FLIGHT = 2  # batches dispatched before the oldest one's tokens are waited for
_BATCH = {"cpu": 32, "gpu": 256, "tpu": 256}  # examples of a task


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
      batch_size: number of rows decoded together.
      inputs_length: maximum tokens of an input; longer ones are truncated. None keeps all.
      fill_with_first: copies of the first input that a beam search appends, before empty rows.
    """
    rows = [_strip_padding(tokens, inputs_length) for tokens in inputs]
    outputs: list[list[int]] = [[] for _ in rows]
    batches = _batches(rows, batch_size)
    if config.beam_size > 1:
        # Use Mesh TensorFlow's own batches: a beam search depends on all rows of its batch.
        batches = _consecutive_batches(len(rows), batch_size)
        rows = _fill_batches(rows, batch_size, fill_with_first)
    limits = _search_limits(rows, config, batch_size)
    # Fixed, so that sampled outputs are the same in every run.
    key = jax.random.key(0)

    def start_batches() -> Iterator[tuple[np.ndarray, Any]]:
        """Each batch's row indices and its tokens, which the device may still be computing."""
        for number, members in enumerate(batches):
            # Pad a partial batch with copies of its first row, which add no decoding steps.
            full = np.concatenate([members, np.full(batch_size - len(members), members[0])])
            padded = _pad_batch([rows[member] for member in full])
            # Fold in the batch's number, so that each batch samples its own noise from one seed.
            batch_key = jax.random.fold_in(key, number)
            # Padding rows for the devices end their beam search before its first step.
            padded, steps = (pad_rows(x, count_data_shards(params)) for x in (padded, limits[full]))
            with use_devices_of(params):
                decoded = generate(
                    model, params, padded, config, length=length, search_steps=steps, key=batch_key
                )
            yield members, decoded.tokens

    with count_progress(len(outputs), "decoding", "example", "decoded") as advance:
        for members, tokens in _fetch_in_order(start_batches()):
            # Copies and padding come after the real rows, and are dropped.
            real = members[members < len(outputs)]
            for member, row in zip(real, tokens, strict=False):
                outputs[member] = np.trim_zeros(row, "b").tolist()
            advance(len(real))
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


def _consecutive_batches(count: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yields row indices of consecutive full batches that cover the first `count` rows."""
    for start in range(0, count, batch_size):
        yield np.arange(start, start + batch_size)


def _batches(rows: Sequence[np.ndarray], batch_size: int) -> Iterator[np.ndarray]:
    """Yields indices of rows of similar length, longest first so that memory runs out early."""
    order = np.argsort([-_round_up_length(len(row)) for row in rows], kind="stable")
    start = 0
    while start < len(order):
        length = _round_up_length(len(rows[order[start]]))
        end = start + 1
        while end < min(len(order), start + batch_size):
            # Slightly shorter rows may complete a batch; much shorter ones get a batch of their
            # own.
            if _round_up_length(len(rows[order[end]])) * 2 < length:
                break
            end += 1
        yield order[start:end]
        start = end


def _pad_batch(rows: Sequence[np.ndarray]) -> Int[np.ndarray, "batch length"]:
    batch = np.zeros((len(rows), _round_up_length(max(len(row) for row in rows))), np.int32)
    for target, row in zip(batch, rows, strict=True):
        target[: len(row)] = row
    return batch


def _round_up_length(length: int) -> int:
    """Rounds up to 16, 24, 32, 48, 64, ...: few lengths to compile, little padding."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


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
        batch_size=min(_BATCH.get(jax.default_backend(), 32), len(examples)),
        inputs_length=lengths["inputs"],
    )
    seconds = time.monotonic() - start_batches
    return decode_texts(tokens, vocabulary), seconds
