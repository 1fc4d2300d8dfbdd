"""Generates targets for many examples: batches of similar input lengths, in the examples' order.

    tokens = generate_tokens(params, model, [example["inputs"] for example in examples],
                             config.decoding, length=128)
    texts = texts_of(tokens, vocabulary)

In greedy decoding neither the order nor the batches change what is generated. A beam search depends
on them a little (t0repro.model.decoding), so that its batches are Mesh TensorFlow's: consecutive
examples, the last batch filled up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from t0repro.config.run_config import DecodingConfig
from t0repro.model.decoding import generate, search_limit
from t0repro.model.shapes import Int
from t0repro.model.t5 import T5
from t0repro.progress import count_progress

_IN_FLIGHT = 2  # batches dispatched before the oldest one's tokens are waited for


def generate_tokens(
    params: dict,
    model: T5,
    inputs: Sequence[Int[np.ndarray, " length"]],
    config: DecodingConfig,
    *,
    length: int,
    batch_size: int = 32,
    inputs_length: int | None = None,
    seed: int = 0,
    fill_with_first: int = 0,
) -> list[list[int]]:
    """Token ids that the model gives for each input, up to and with EOS; zeros only within.

    Args:
      params: the model's parameters.
      model: the model.
      inputs: token ids of each example; zeros at the end are padding.
      config: greedy, sampling or beam search.
      length: tokens that an output has room for.
      batch_size: rows that are decoded together.
      inputs_length: tokens of an input beyond this are cut off.
      seed: Seed for sampling.
      fill_with_first: how many copies of the first input follow the last one in a beam search; its
        last batch is filled with empty rows otherwise.
    """
    rows = [_unpadded(tokens, inputs_length) for tokens in inputs]
    outputs: list[list[int]] = [[] for _ in rows]
    batches = _batches(rows, batch_size)
    if config.beam_size > 1:
        count = len(rows)
        rows += rows[:1] * fill_with_first
        rows += [np.zeros(0, np.int32)] * (-len(rows) % batch_size)
        batches = _consecutive(count, batch_size)
    limits = _search_limits(rows, config, batch_size)
    key = jax.random.key(seed)

    def started() -> Iterator[tuple[np.ndarray, Any]]:
        """Each batch's members and its tokens, which the device may still be computing."""
        for number, members in enumerate(batches):
            # A batch that is not full repeats its first row, which costs no further step.
            full = np.concatenate([members, np.full(batch_size - len(members), members[0])])
            padded = _padded([rows[member] for member in full])
            batch_key = jax.random.fold_in(key, number)
            steps = limits[full]
            decoded = generate(
                model, params, padded, config, length=length, search_steps=steps, key=batch_key
            )
            yield members, decoded.tokens

    with count_progress(len(outputs), "decoding", "examples", "decoded") as advance:
        for members, tokens in _in_flight(started()):
            real = members[members < len(outputs)]
            for member, row in zip(real, tokens, strict=False):
                outputs[member] = np.trim_zeros(row, "b").tolist()
            advance(len(real))
    return outputs


def _in_flight(
    started: Iterator[tuple[np.ndarray, Any]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Fetches each batch after the next one has been started, so that the device never waits."""
    waiting: deque[tuple[np.ndarray, Any]] = deque()
    for batch in started:
        waiting.append(batch)
        if len(waiting) >= _IN_FLIGHT:
            members, tokens = waiting.popleft()
            yield members, np.asarray(tokens)
    for members, tokens in waiting:
        yield members, np.asarray(tokens)


def texts_of(tokens: Sequence[Sequence[int]], vocabulary: Any) -> list[str]:
    """The text of generated tokens, as Mesh TensorFlow makes it on a CPU.

    Args:
      tokens: of each example.
      vocabulary: a seqio vocabulary. Its `decode_tf` is used, which handles ids beyond the
        vocabulary (the model's is padded) differently, and `decode` where it has none.
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


def _search_limits(rows: Sequence[np.ndarray], config: DecodingConfig, batch_size: int) -> Any:
    """Steps of each row's beam search: int32 [rows]."""
    lengths = np.array([np.count_nonzero(row) for row in rows], np.int64)
    limits = [
        search_limit(int(lengths[start : start + batch_size].max()), config)
        for start in range(0, len(rows), batch_size)
    ]
    return np.repeat(np.array(limits, np.int32), batch_size)[: len(rows)]


def _consecutive(count: int, batch_size: int) -> Iterator[np.ndarray]:
    """Indices of one batch after the other, until all of the first `count` rows are in one."""
    for start in range(0, count, batch_size):
        yield np.arange(start, start + batch_size)


def _batches(rows: Sequence[np.ndarray], batch_size: int) -> Iterator[np.ndarray]:
    """Indices of rows of similar length, the longest first, so that memory fails at once."""
    order = np.argsort([-_rounded(len(row)) for row in rows], kind="stable")
    start = 0
    while start < len(order):
        length = _rounded(len(rows[order[start]]))
        end = start + 1
        while end < min(len(order), start + batch_size):
            # A few rows of the next length fill a batch up; far shorter ones wait for their own.
            if _rounded(len(rows[order[end]])) * 2 < length:
                break
            end += 1
        yield order[start:end]
        start = end


def _padded(rows: Sequence[np.ndarray]) -> Int[np.ndarray, "batch length"]:
    batch = np.zeros((len(rows), _rounded(max(len(row) for row in rows))), np.int32)
    for target, row in zip(batch, rows, strict=True):
        target[: len(row)] = row
    return batch


def _rounded(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, ...: few lengths to compile for, little padding."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def _unpadded(tokens: Any, length: int | None) -> np.ndarray:
    return np.trim_zeros(np.asarray(tokens, np.int32)[:length], "b")
