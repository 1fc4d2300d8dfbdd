"""Attention by matmuls over the full matrix of weights: the reference for all implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from t0repro.model.attention_mask import AttentionMask, mask_bias
from t0repro.model.matmuls import einsum
from t0repro.model.shapes import Array, Float
from t0repro.partitioning.devices import device_to_trace_for


def full_matrix(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "*rows heads offsets"] | None,
    mask: AttentionMask,
    apply_dropout: Callable[[Array], Array] = lambda x: x,
    dtype: DTypeLike | None = None,
) -> Float[Array, "batch heads length d_kv"]:
    """Computes `attention` by matmuls over the full matrix of weights."""
    bias = mask_bias(mask.matrix())
    if position_bias is not None:
        # In decoding, each row's one query may have a position, and so a bias, of its own.
        if position_bias.ndim == 3:
            bias = position_bias[:, :, None] + bias
        else:
            # In float32, as their gradients add up over all queries.
            by_offset = position_bias.astype(jnp.float32)
            matrix = expand_offsets(by_offset, query.shape[2])
            of_rows: Array = _repeat_for_rows(matrix, query.shape[0])
            bias = of_rows + bias
    logits = einsum("bhqd,bhkd->bhqk", query, key, dtype)
    logits = logits + bias.astype(logits.dtype)
    weights = apply_dropout(attention_weights(logits).astype(value.dtype))
    return einsum("bhqk,bhkd->bhqd", weights, value)


def attention_weights(
    logits: Float[Array, "batch heads query key"],
) -> Float[Array, "batch heads query key"]:
    """Softmax over the last axis, as exp(logits - log_z), which is Mesh TensorFlow's form.

    Logits of another dtype than float32 are T5X's, and so is the form: in bfloat16 log_z may be off
    by several percent, and with it every weight of a query.
    """
    if logits.dtype != jnp.float32:
        return jax.nn.softmax(logits)
    return jnp.exp(logits - log_normalizer(logits))


def log_normalizer(logits: Float[Array, "*rows keys"]) -> Float[Array, "*rows 1"]:
    """The logarithm of the sum of exp(logits) over the last axis."""
    # The maximum cancels out, so its gradient need not be computed.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1, keepdims=True)) + maximum


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat_for_rows(
    matrix: Float[Array, "heads query key"], rows: int
) -> Float[Array, "rows heads query key"]:
    return jnp.broadcast_to(matrix, (rows, *matrix.shape))


_repeat_for_rows.defvjp(
    lambda matrix, rows: (_repeat_for_rows(matrix, rows), None),
    lambda _rows, _residuals, d_result: (sum_over_rows(d_result),),
)


def sum_over_rows(x: Float[Array, "rows heads query key"]) -> Float[Array, "heads query key"]:
    """The float32 sum over the first axis."""
    if device_to_trace_for().platform != "cpu":
        return jnp.sum(x, axis=0, dtype=jnp.float32)
    # A matmul with ones: XLA on CPU takes ten to thirty times as long for the sum, and even longer
    # for one that it fuses with the sum over the queries of an offset.
    ones = jnp.ones(x.shape[0], x.dtype)
    return jnp.einsum("b,bhqk->hqk", ones, x, preferred_element_type=jnp.float32)


def expand_offsets(
    by_offset: Float[Array, "heads offsets"], queries: int
) -> Float[Array, "heads queries keys"]:
    """The matrices [queries, keys] whose entries depend only on key - query.

    Looking up queries x keys offsets would need a gather, whose gradient is a scatter: slow, and
    padded to sixteen times its size on a TPU. Instead, each row is the previous row shifted by one:

        by_offset       a b c d e        of the offsets -2 to 2
        repeated        a b c d e 0 a b c d e 0 a b c ...
        rows of five    a b c d e | 0 a b c d | e 0 a b c
        last three          c d e       b c d       a b c

    Args:
      by_offset: values of the offsets 1 - queries to keys - 1.
      queries: number of queries.
    """
    heads, offsets = by_offset.shape
    padded = jnp.pad(by_offset, ((0, 0), (0, 1)))
    repeated = jnp.tile(padded, (1, queries))[:, : queries * offsets]
    return repeated.reshape(heads, queries, offsets)[:, :, queries - 1 :]
