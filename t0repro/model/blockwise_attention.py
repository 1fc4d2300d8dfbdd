"""Attention a block of queries at a time, in JAX, so that XLA compiles it for every platform.

The full matrix of weights is never materialized, in either pass. The weights of one layer are as
large as [batch, heads, length, keys], and the backward pass saves several such arrays per layer.
Here only a block of their rows exists at a time, and the backward pass recomputes it from two
numbers per query, as FlashAttention does (Dao et al., 2022). It is written in JAX, so XLA compiles
it for every platform, and it has the gradient of T5's learned position bias, which most platform-
specific kernels lack.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from t0repro.model.attention_mask import AttentionMask, mask_bias
from t0repro.model.full_attention import expand_offsets, log_normalizer, sum_over_rows
from t0repro.model.matmuls import einsum
from t0repro.model.shapes import Array, Float


def blockwise_attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "heads offsets"] | None,
    mask: AttentionMask,
    blocks: int,
) -> Float[Array, "batch heads length d_kv"]:
    """Like `attention`, without dropout, in this many blocks of queries.

    Every array of `mask` must be present, at full size.
    """
    length = query.shape[2]
    padding = -length % blocks
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padding), (0, 0)))
    query_segments, key_segments, query_order, key_order = mask
    query_arrays: Any = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, padding))), (query_segments, query_order)
    )
    if position_bias is not None:  # later queries have lower offsets
        position_bias = jnp.pad(position_bias, ((0, 0), (padding, 0)))
    mask_arrays = (query_arrays, (key_segments, key_order))
    attended: Any = _attend(blocks, query, key, value, position_bias, mask_arrays)
    return attended[:, :, :length]


def _logits(query: Array, key: Array, position_bias: Array | None, mask_arrays: Any) -> Array:
    """The logits of a block of queries, rounded; the position bias is a matrix here."""
    (query_segments, query_order), (key_segments, key_order) = mask_arrays
    mask = AttentionMask(query_segments, key_segments, query_order, key_order)
    bias = mask_bias(mask.matrix())
    if position_bias is not None:
        bias = position_bias[None] + bias
    logits = einsum("bhqd,bhkd->bhqk", query, key) + bias.astype(query.dtype)
    # Their softmax is computed in float32: a rounded log_z would scale all weights of a query.
    return logits.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    blocks: int, query: Array, key: Array, value: Array, bias: Array | None, mask_arrays: Any
) -> Array:
    return _forward(blocks, query, key, value, bias, mask_arrays)[0]


def _forward(
    blocks: int, query: Array, key: Array, value: Array, bias: Array | None, mask_arrays: Any
) -> tuple[Array, Any]:
    def attend_block(index: Array) -> tuple[Array, Array, Array]:
        logits = _logits(*_slice_block(index, blocks, query, key, bias, mask_arrays))
        log_z = log_normalizer(logits)
        weights = jnp.exp(logits - log_z)
        output = einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
        return output, log_z, jnp.sum(weights, axis=-1, keepdims=True)

    output, log_z, total = map(_join, jax.lax.map(attend_block, jnp.arange(blocks)))
    return output, (query, key, value, bias, mask_arrays, log_z, total)


def _backward(blocks: int, residuals: Any, d_y: Array) -> tuple[Any, ...]:
    query, key, value, bias, mask_arrays, *query_arrays = residuals

    def backprop_block(sums: Any, index: Array) -> tuple[Any, Array]:
        inputs = _slice_block(index, blocks, query, key, bias, mask_arrays)
        log_z, total, dy = (_block(x, index, blocks, 2) for x in (*query_arrays, d_y))
        weights = jnp.exp(_logits(*inputs) - log_z)
        d_weights = einsum("bhqd,bhkd->bhqk", dy, value).astype(weights.dtype)
        products = weights * d_weights
        # If a query sees nothing, its weights are all 1 (see the module's text), so divide by
        # their total; for other queries the total is 1.
        d_logits = products - weights * (jnp.sum(products, axis=-1, keepdims=True) / total)
        d_logits = d_logits.astype(query.dtype)
        d_key, d_value, d_bias = sums
        d_key += einsum("bhqk,bhqd->bhkd", d_logits, inputs[0])
        d_value += einsum("bhqk,bhqd->bhkd", weights.astype(dy.dtype), dy)
        d_query = einsum("bhqk,bhkd->bhqd", d_logits, key)
        if d_bias is not None:
            matrix = sum_over_rows(d_logits)
            rows = matrix.shape[1]
            _, add_up = jax.vjp(lambda x: _matrix(x, index, blocks, rows), d_bias)
            d_bias += add_up(matrix)[0]
        return (d_key, d_value, d_bias), d_query

    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)  # noqa: E731
    sums = jax.tree.map(zeros, (key, value, bias))
    sums, d_query = jax.lax.scan(backprop_block, sums, jnp.arange(blocks))
    inputs = (query, key, value, bias)
    gradients = jax.tree.map(lambda x, like: x.astype(like.dtype), (_join(d_query), *sums), inputs)
    return (*gradients, None)


_attend.defvjp(_forward, _backward)


def _slice_block(
    index: Array, blocks: int, query: Array, key: Array, bias: Array | None, mask_arrays: Any
) -> tuple[Array, Array, Array | None, Any]:
    """The arguments of `_logits` for the block of this number."""
    query_arrays, key_arrays = mask_arrays
    query = _block(query, index, blocks, 2)
    query_arrays = [_block(x, index, blocks, 1) for x in query_arrays]
    matrix = None if bias is None else _matrix(bias, index, blocks, query.shape[2])
    return query, key, matrix, (query_arrays, key_arrays)


def _matrix(bias: Array, index: Array, blocks: int, rows: int) -> Array:
    """The position bias of a block of queries, [heads, rows, keys], from that of all offsets."""
    # The last block has the lowest offsets.
    start, trailing = (blocks - 1 - index) * rows, (blocks - 1) * rows
    window = jax.lax.dynamic_slice_in_dim(bias, start, bias.shape[1] - trailing, axis=1)
    return expand_offsets(window, rows)


def _block(x: Array, index: Array, blocks: int, axis: int) -> Array:
    """The block of this number from an array with an axis of queries."""
    rows = x.shape[axis] // blocks
    return jax.lax.dynamic_slice_in_dim(x, index * rows, rows, axis=axis)


def _join(x: Array) -> Array:
    """Blocks [blocks, batch, heads, rows, *] as one array [batch, heads, length, *]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[4])
