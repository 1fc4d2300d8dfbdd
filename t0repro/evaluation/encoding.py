"""Encodes token ids in blocks of fixed shapes, so that no result depends on what shares a batch.

A text of n tokens is padded to the next length class and computed in a block of as many rows as
that class always has. The program for a shape computes each row alike wherever it stands in the
block, so a text's outputs have the same bits whatever the batch, its order and its other texts. On
several devices each has blocks of that same shape; the CPU's attention kernel, which long texts
use, runs on a single device only, and rounds otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.evaluation.opened import Checkpoint
from t0repro.model.matmuls import FIXED_KERNELS
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import count_data_shards, fetch, use_devices_of

Pool = Literal["mean", "first"]

SHORTEST = 32
# Tokens of a block on one device. With 1,024 a CPU is within 5% of its best (T5 1.1 small, 512
# tokens), and a single short text costs a quarter of what 4,096 would; accelerators need more.
TOKENS_PER_BLOCK = {"cpu": 1024, "gpu": 16384, "tpu": 16384}
_BLOCKS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Block:
    """Texts that are computed together.

    Attributes:
      texts: Their numbers, at most `rows` of them.
      rows: Rows of the block on all devices, padding included.
      length: Tokens of a row, padding included.
    """

    texts: Sequence[int]
    rows: int
    length: int


def class_length(tokens: int) -> int:
    """The padded length of a text: the next of 32, 48, 64, 96, 128, 192 and so on."""
    length = SHORTEST
    while length < tokens:
        # 2^k is followed by 3 * 2^(k - 1), and that by 2^(k + 1).
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return length


def make_blocks(lengths: Sequence[int], parts: int) -> list[Block]:
    """Groups texts by length class, each class in blocks of one shape, the longest first.

    Args:
      lengths: Number of tokens of each text.
      parts: Number of devices that share a block's rows.
    """
    tokens = TOKENS_PER_BLOCK.get(jax.default_backend(), TOKENS_PER_BLOCK["cpu"])
    classes: dict[int, list[int]] = {}
    for text, length in enumerate(lengths):
        classes.setdefault(class_length(length), []).append(text)
    blocks = []
    for length, texts in sorted(classes.items(), reverse=True):
        rows = max(1, tokens // length) * parts
        blocks += [
            Block(texts[start : start + rows], rows, length) for start in range(0, len(texts), rows)
        ]
    return blocks


def encode_ids(
    checkpoint: Checkpoint,
    ids: Sequence[Int[np.ndarray, " length"]],
    pool: Pool | None = None,
    batch_size: int | None = None,
) -> Iterator[tuple[int, Float[np.ndarray, ...]]]:
    """Yields each text's number and its encoder outputs, in the order in which they are computed.

    Args:
      checkpoint: From `opened.open_encoder`, or a whole model.
      ids: Token ids of each text, at least one.
      pool: "mean" averages a text's outputs over its tokens, "first" takes the first token's;
        None yields [length, d_model].
      batch_size: Rows that are on the devices at once; rounded up to whole blocks.
    """
    waiting: deque[tuple[Block, jax.Array]] = deque()
    blocks = make_blocks([len(each) for each in ids], count_data_shards(checkpoint.params))
    for block in blocks:
        tokens, segments = np.zeros((2, block.rows, block.length), np.int32)
        for row, text in enumerate(block.texts):
            tokens[row, : len(ids[text])] = ids[text]
            segments[row, : len(ids[text])] = 1
        with use_devices_of(checkpoint.params):
            outputs = _encode(checkpoint.model, checkpoint.params, tokens, segments, pool)
        waiting.append((block, outputs))
        most = _BLOCKS_IN_FLIGHT if batch_size is None else -(-batch_size // block.rows)
        while len(waiting) >= most:
            yield from _texts_of(*waiting.popleft(), ids)
    while waiting:
        yield from _texts_of(*waiting.popleft(), ids)


def _texts_of(
    block: Block, outputs: jax.Array, ids: Sequence[np.ndarray]
) -> Iterator[tuple[int, np.ndarray]]:
    values = fetch(outputs)
    for row, text in enumerate(block.texts):
        # A copy, so that a caller who keeps one text does not keep the block.
        yield text, (values[row] if values.ndim == 2 else values[row, : len(ids[text])]).copy()


@functools.partial(jax.jit, static_argnums=(0, 4), compiler_options=FIXED_KERNELS)
def _encode(
    model: T5,
    params: dict,
    tokens: Int[Array, "rows length"],
    segments: Int[Array, "rows length"],
    pool: Pool | None,
) -> Float[Array, "rows ..."]:
    """The encoder's outputs of rows, or their pooled outputs, in the activation dtype.

    `segments` is 1 at tokens and 0 at padding; id 0 may also be a token, as in MADLAD-400.
    """
    tokens, segments = jnp.asarray(tokens), jnp.asarray(segments)
    outputs = model.apply({"params": params}, tokens, segments, method=T5.encode)
    assert isinstance(outputs, jax.Array)
    if pool is None:
        return outputs
    if pool == "first":
        return outputs[:, 0]
    # Outputs at padding are zero. A row without tokens fills a block; nobody reads it.
    counts = jnp.maximum(jnp.sum(segments, axis=1, keepdims=True), 1)
    total = jnp.sum(outputs.astype(jnp.float32), axis=1)
    return (total / counts).astype(outputs.dtype)
