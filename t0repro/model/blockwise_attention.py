"""Attention that never holds its full matrix: a block of queries at a time, in both passes.

The weights of one layer are as large as [batch, heads, length, keys], and the backward pass keeps
several such arrays of every layer. Here only a block of their rows exists at a time, and the
backward pass recomputes it from two numbers for each query, as FlashAttention does (Dao et al.,
2022). It is written in JAX, so XLA compiles it for every platform, and it has the gradient of T5's
learned position bias, which kernels for one platform mostly lack.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from t0repro.model.shapes import Array, Float
from t0repro.partitioning import memory
from t0repro.partitioning.rules import parts_of


def number_of_blocks(batch: int, heads: int, length: int, keys: int) -> int:
    """How many blocks of queries keep within ATTENTION_BLOCK_BYTES: 1 if the whole matrix does.

    Among numbers up to twice the least one, the first that divides the length, if one does.
    """
    # 4 bytes each: logits are float32, whatever the activations are.
    size = 4 * batch * heads * length * keys // parts_of("batch", "heads")
    least = min(length, -(-size // memory.ATTENTION_BLOCK_BYTES))
    return next((n for n in range(least, 2 * least) if length % n == 0), least)


def blockwise_attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "1 heads length keys"] | None,
    visibility: Float[Array, "#batch #heads #length keys"],
    blocks: int,
) -> Float[Array, "batch heads length d_kv"]:
    """The values, weighted by the softmax of query x key + position_bias + visibility.

    Equal, up to rounding, to the same products and `layers.attention_weights` of whole matrices.
    Gradients are those of query, key, value and position_bias; visibility has none.
    """
    length = query.shape[2]
    visibility = jnp.broadcast_to(visibility, (*visibility.shape[:2], length, visibility.shape[3]))
    padding = -length % blocks
    by_query = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))),
        (query, position_bias, visibility),
    )
    attended: Any = _attend(blocks, by_query, key, value)
    return attended[:, :, :length]


def log_normalizer(logits: Float[Array, "*rows keys"]) -> Float[Array, "*rows 1"]:
    """The logarithm of the sum of exp(logits) over the last axis."""
    # The maximum cancels out, so its gradient need not be computed.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1, keepdims=True)) + maximum


def _logits(by_query: Any, key: Array) -> Array:
    query, position_bias, visibility = by_query
    bias = visibility if position_bias is None else position_bias + visibility
    return jnp.einsum("bhqd,bhkd->bhqk", query, key) + bias.astype(query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: int, by_query: Any, key: Array, value: Array) -> Array:
    return _forward(blocks, by_query, key, value)[0]


def _forward(blocks: int, by_query: Any, key: Array, value: Array) -> tuple[Array, Any]:
    def of_block(index: Array) -> tuple[Array, Array, Array]:
        logits = _logits(_block(by_query, index, blocks), key)
        log_z = log_normalizer(logits)
        weights = jnp.exp(logits - log_z)
        y = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
        return y, log_z, jnp.sum(weights, axis=-1, keepdims=True)

    y, log_z, total = map(_join, jax.lax.map(of_block, jnp.arange(blocks)))
    return y, (by_query, key, value, log_z, total)


def _backward(blocks: int, kept: Any, d_y: Array) -> tuple[Any, Array, Array]:
    by_query, key, value, *of_queries = kept

    def of_block(sums: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], Any]:
        block, log_z, total, dy = _block((by_query, *of_queries, d_y), index, blocks)
        query, position_bias, _ = block
        weights = jnp.exp(_logits(block, key) - log_z)
        d_weights = jnp.einsum("bhqd,bhkd->bhqk", dy, value).astype(weights.dtype)
        products = weights * d_weights
        # Weights of a query that sees nothing are all 1 (layers.attention_weights); of others their
        # total is 1.
        d_logits = products - weights * (jnp.sum(products, axis=-1, keepdims=True) / total)
        d_key, d_value = sums
        d_key += jnp.einsum("bhqk,bhqd->bhkd", d_logits, query)
        d_value += jnp.einsum("bhqk,bhqd->bhkd", weights.astype(dy.dtype), dy)
        d_query = jnp.einsum("bhqk,bhkd->bhqd", d_logits, key)
        d_position_bias = None
        if position_bias is not None:
            # As a product: XLA on CPU takes thirty times as long for a sum over the first axis.
            ones = jnp.ones(d_logits.shape[0], d_logits.dtype)
            d_position_bias = jnp.einsum("b,bhqk->hqk", ones, d_logits)[None]
        return (d_key, d_value), (d_query, d_position_bias)

    sums = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    (d_key, d_value), by_block = jax.lax.scan(of_block, sums, jnp.arange(blocks))
    query, position_bias, _ = by_query
    d_query, d_position_bias = jax.tree.map(
        lambda x, like: _join(x).astype(like.dtype), by_block, (query, position_bias)
    )
    d_by_query = (d_query, d_position_bias, None)  # none of the visibility's
    return d_by_query, d_key.astype(key.dtype), d_value.astype(value.dtype)


_attend.defvjp(_forward, _backward)


def _block(tree: Any, index: Array, blocks: int) -> Any:
    """The block of this number of arrays [batch, heads, length, *]."""

    def of_array(x: Array) -> Array:
        rows = x.shape[2] // blocks
        return jax.lax.dynamic_slice_in_dim(x, index * rows, rows, axis=2)

    return jax.tree.map(of_array, tree)


def _join(x: Array) -> Array:
    """Blocks [blocks, batch, heads, rows, *] as one array [batch, heads, length, *]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[4])
