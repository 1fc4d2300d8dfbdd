"""Attention with T5's position bias, behind one function; the machine decides what computes it.

    full      matmuls over the full matrix of weights: the reference, and the choice for small ones
    blocks    a block of queries at a time, in JAX, at the end of this file: anywhere
    tpu       a Pallas kernel (t0repro.model.tpu_attention): on TPUs from v4 on
    gpu       Pallas kernels (t0repro.model.gpu_attention): on NVIDIA GPUs from A100 on
    cpu       a kernel in C++ (t0repro.model.cpu_attention): float32, on one CPU

The position bias depends only on the offset of a key from its query, so it is passed as [heads,
offsets], and so is its gradient. A few numbers per position (`Visibility`) determine which query
sees which key. Only the reference expands either to [batch, heads, query, key].

Mesh TensorFlow's softmax differs from the usual one for a query that sees nothing, as with empty
inputs: near -1e9, float32 is too coarse for log_z to include the logarithm of the number of keys,
so each weight is 1 rather than 1 over that number. All implementations do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from t0repro.model import cpu_attention
from t0repro.model.shapes import Array, Bool, Float, Int
from t0repro.partitioning import costs
from t0repro.partitioning.devices import parts_of

# What Mesh TensorFlow adds to the logits of positions that are not visible
# (attention.visibility_mask_to_attention_bias).
INVISIBLE = -1e9

KERNEL_FROM = 1 << 23
"""Bytes of attention logits on a device from which a layer uses a kernel.

A CPU keeps fewer in its cache.
"""

Implementation = Literal["full", "blocks", "cpu", "tpu", "gpu"]


class Visibility(NamedTuple):
    """Which query sees which key: of its own segment, those whose order is at most its own.

    With packed rows, for example, and in a decoder:

        segments   1 1 1 2 2 0     padding, segment 0, sees only padding
        order      0 1 2 3 4 5     a query sees itself and what is before it

    Attributes:
      query_segments: int32.
      key_segments: int32.
      query_order: int32; None if order does not matter.
      key_order: int32; None likewise.
    """

    query_segments: Int[Array, "#batch #length"]
    key_segments: Int[Array, "#batch keys"]
    query_order: Int[Array, "#batch #length"] | None = None
    key_order: Int[Array, "#batch keys"] | None = None

    def matrix(self) -> Bool[Array, "#batch 1 #length keys"]:
        """Whether each query (third axis) sees each key (fourth axis)."""
        visible = self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :]
        if self.query_order is None or self.key_order is None:
            return visible
        return visible & (self.query_order[:, None, :, None] >= self.key_order[:, None, None, :])

    def for_all(self, batch: int, length: int, keys: int) -> Visibility:
        """The visibility with all four arrays present, in these sizes."""
        query_order, key_order = self.query_order, self.key_order
        if query_order is None or key_order is None:
            query_order = key_order = jnp.zeros((1, 1), jnp.int32)
        sizes = (length, keys, length, keys)
        arrays = (self.query_segments, self.key_segments, query_order, key_order)
        return Visibility(
            *(
                jnp.broadcast_to(x.astype(jnp.int32), (batch, size))
                for x, size in zip(arrays, sizes, strict=True)
            )
        )


def attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "heads offsets"] | None,
    visibility: Visibility,
    dropped: Callable[[Array], Array] = lambda x: x,
) -> Float[Array, "batch heads length d_kv"]:
    """The values, weighted by the softmax of query x key + position_bias.

    Gradients are those of query, key, value and position_bias.

    Args:
      query: not scaled here. Its dtype is that of logits and softmax.
      key: of the query's dtype.
      value: its dtype is that of the weights and of the result.
      position_bias: by the offset key - query, from 1 - length to keys - 1.
      visibility: which query sees which key.
      dropped: applies dropout to [batch, heads, query, key] with one mask for all queries.
    """
    (batch, heads, length, _), keys = query.shape, key.shape[2]
    float32 = query.dtype == key.dtype == value.dtype == jnp.float32
    way = implementation(batch, heads, length, keys, float32=float32)
    if way == "full":
        return full_matrix(query, key, value, position_bias, visibility, dropped)
    # Scaling a key's value has the same effect as scaling its weights.
    scale = dropped(jnp.ones((batch, heads, 1, keys), value.dtype))
    value = value * scale.swapaxes(2, 3)
    if way == "tpu":
        from t0repro.model import tpu_attention

        return tpu_attention.attention(query, key, value, position_bias, visibility)
    if way == "gpu":
        from t0repro.model import gpu_attention

        return gpu_attention.attention(query, key, value, position_bias, visibility)
    visibility = visibility.for_all(batch, length, keys)
    if way == "cpu":
        return cpu_attention.attention(query, key, value, position_bias, visibility)

    blocks = number_of_blocks(batch, heads, length, keys)
    return blockwise_attention(query, key, value, position_bias, visibility, blocks)


def implementation(
    batch: int, heads: int, length: int, keys: int, *, float32: bool
) -> Implementation:
    """Chooses the implementation for attention of this size on the device mesh, or JAX's device.

    Args:
      batch: rows.
      heads: heads.
      length: queries of a row.
      keys: keys of a row.
      float32: whether queries, keys and values all are.
    """
    device = _device()
    size = 4 * batch * heads * length * keys // parts_of("batch", "heads")
    # A single query, as in decoding, has no block of queries to share the reads.
    if size >= KERNEL_FROM and length > 1:
        # XLA cannot shard a kernel across devices. Those of TPUs and GPUs shard themselves, evenly.
        mesh = jax.sharding.get_abstract_mesh()
        alone = mesh.empty or mesh.size == 1
        if device.platform == "cpu" and alone and float32 and cpu_attention.available():
            return "cpu"
        # After the CPU's, because they import Pallas.
        from t0repro.model import gpu_attention, tpu_attention

        rows, others = divmod(batch, parts_of("batch"))
        even = others == heads % parts_of("heads") == 0
        fits = tpu_attention.fits(rows, length, keys)
        if tpu_attention.supports(device.device_kind) and even and fits:
            return "tpu"
        if gpu_attention.supports(device) and even:
            return "gpu"
    return "blocks" if number_of_blocks(batch, heads, length, keys) > 1 else "full"


def _device() -> Any:
    """A device like those on which the code being traced will run."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def number_of_blocks(batch: int, heads: int, length: int, keys: int) -> int:
    """The number of query blocks that keeps within ATTENTION_BLOCK_BYTES; 1 for the full matrix.

    Prefers a number that divides the length, up to twice the least possible one.
    """
    # 4 bytes each: logits are float32, whatever the activations are.
    size = 4 * batch * heads * length * keys // parts_of("batch", "heads")
    least = min(length, -(-size // costs.ATTENTION_BLOCK_BYTES))
    return next((n for n in range(least, 2 * least) if length % n == 0), least)


# ---- The oracle ----------------------------------------------------------------------------------


def full_matrix(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "heads offsets"] | None,
    visibility: Visibility,
    dropped: Callable[[Array], Array] = lambda x: x,
) -> Float[Array, "batch heads length d_kv"]:
    """Computes `attention` by matmuls over the full matrix of weights."""
    bias = _visibility_bias(visibility.matrix())
    if position_bias is not None:
        bias = along_diagonals(position_bias, query.shape[2])[None] + bias
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key) + bias.astype(query.dtype)
    weights = dropped(attention_weights(logits).astype(value.dtype))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value)


def _visibility_bias(visible: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Float32 bias for attention logits: 0 where visible, -1e9 elsewhere."""
    return jnp.where(visible, jnp.float32(0.0), jnp.float32(INVISIBLE))


def attention_weights(
    logits: Float[Array, "batch heads query key"],
) -> Float[Array, "batch heads query key"]:
    """Softmax over the last axis, as exp(logits - log_z), which is Mesh TensorFlow's form."""
    return jnp.exp(logits - _log_normalizer(logits))


def _log_normalizer(logits: Float[Array, "*rows keys"]) -> Float[Array, "*rows 1"]:
    """The logarithm of the sum of exp(logits) over the last axis."""
    # The maximum cancels out, so its gradient need not be computed.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1, keepdims=True)) + maximum


def along_diagonals(
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


# ---- A block of queries at a time ----------------------------------------------------------------
#
# The full matrix of weights is never materialized, in either pass. The weights of one layer are as
# large as [batch, heads, length, keys], and the backward pass saves several such arrays per layer.
# Here only a block of their rows exists at a time, and the backward pass recomputes it from two
# numbers per query, as FlashAttention does (Dao et al., 2022). It is written in JAX, so XLA
# compiles it for every platform, and it has the gradient of T5's learned position bias, which most
# platform-specific kernels lack.


def blockwise_attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "heads offsets"] | None,
    visibility: Visibility,
    blocks: int,
) -> Float[Array, "batch heads length d_kv"]:
    """Like `attention`, without dropout, in this many blocks of queries.

    Every array of `visibility` must be present, at full size.
    """
    length = query.shape[2]
    padding = -length % blocks
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padding), (0, 0)))
    query_segments, key_segments, query_order, key_order = visibility
    of_queries: Any = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, padding))), (query_segments, query_order)
    )
    if position_bias is not None:  # later queries have lower offsets
        position_bias = jnp.pad(position_bias, ((0, 0), (padding, 0)))
    seen = (of_queries, (key_segments, key_order))
    attended: Any = _attend(blocks, query, key, value, position_bias, seen)
    return attended[:, :, :length]


def _logits(query: Array, key: Array, position_bias: Array | None, seen: Any) -> Array:
    """The logits of a block of queries; the position bias is a matrix here."""
    (query_segments, query_order), (key_segments, key_order) = seen
    visibility = Visibility(query_segments, key_segments, query_order, key_order)
    bias = _visibility_bias(visibility.matrix())
    if position_bias is not None:
        bias = position_bias[None] + bias
    return jnp.einsum("bhqd,bhkd->bhqk", query, key) + bias.astype(query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    blocks: int, query: Array, key: Array, value: Array, bias: Array | None, seen: Any
) -> Array:
    return _forward(blocks, query, key, value, bias, seen)[0]


def _forward(
    blocks: int, query: Array, key: Array, value: Array, bias: Array | None, seen: Any
) -> tuple[Array, Any]:
    def of_block(index: Array) -> tuple[Array, Array, Array]:
        logits = _logits(*_of_block(index, blocks, query, key, bias, seen))
        log_z = _log_normalizer(logits)
        weights = jnp.exp(logits - log_z)
        y = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
        return y, log_z, jnp.sum(weights, axis=-1, keepdims=True)

    y, log_z, total = map(_join, jax.lax.map(of_block, jnp.arange(blocks)))
    return y, (query, key, value, bias, seen, log_z, total)


def _backward(blocks: int, kept: Any, d_y: Array) -> tuple[Any, ...]:
    query, key, value, bias, seen, *of_queries = kept

    def of_block(sums: Any, index: Array) -> tuple[Any, Array]:
        given = _of_block(index, blocks, query, key, bias, seen)
        log_z, total, dy = (_block(x, index, blocks, 2) for x in (*of_queries, d_y))
        weights = jnp.exp(_logits(*given) - log_z)
        d_weights = jnp.einsum("bhqd,bhkd->bhqk", dy, value).astype(weights.dtype)
        products = weights * d_weights
        # If a query sees nothing, its weights are all 1 (see the module's text), so divide by
        # their total; for other queries the total is 1.
        d_logits = products - weights * (jnp.sum(products, axis=-1, keepdims=True) / total)
        d_key, d_value, d_bias = sums
        d_key += jnp.einsum("bhqk,bhqd->bhkd", d_logits, given[0])
        d_value += jnp.einsum("bhqk,bhqd->bhkd", weights.astype(dy.dtype), dy)
        d_query = jnp.einsum("bhqk,bhkd->bhqd", d_logits, key)
        if d_bias is not None:
            # A matmul with ones: XLA on CPU takes thirty times as long for a sum over the first
            # axis.
            ones = jnp.ones(d_logits.shape[0], d_logits.dtype)
            matrix = jnp.einsum("b,bhqk->hqk", ones, d_logits).astype(jnp.float32)
            rows = matrix.shape[1]
            _, add_up = jax.vjp(lambda x: _matrix(x, index, blocks, rows), d_bias)
            d_bias += add_up(matrix)[0]
        return (d_key, d_value, d_bias), d_query

    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)  # noqa: E731
    sums = jax.tree.map(zeros, (key, value, bias))
    sums, d_query = jax.lax.scan(of_block, sums, jnp.arange(blocks))
    given = (query, key, value, bias)
    found = jax.tree.map(lambda x, like: x.astype(like.dtype), (_join(d_query), *sums), given)
    return (*found, None)


_attend.defvjp(_forward, _backward)


def _of_block(
    index: Array, blocks: int, query: Array, key: Array, bias: Array | None, seen: Any
) -> tuple[Array, Array, Array | None, Any]:
    """The arguments of `_logits` for the block of this number."""
    of_queries, of_keys = seen
    query = _block(query, index, blocks, 2)
    of_queries = [_block(x, index, blocks, 1) for x in of_queries]
    matrix = None if bias is None else _matrix(bias, index, blocks, query.shape[2])
    return query, key, matrix, (of_queries, of_keys)


def _matrix(bias: Array, index: Array, blocks: int, rows: int) -> Array:
    """The position bias of a block of queries, [heads, rows, keys], from that of all offsets."""
    # The last block has the lowest offsets.
    start, others = (blocks - 1 - index) * rows, (blocks - 1) * rows
    window = jax.lax.dynamic_slice_in_dim(bias, start, bias.shape[1] - others, axis=1)
    return along_diagonals(window, rows)


def _block(x: Array, index: Array, blocks: int, axis: int) -> Array:
    """The block of this number from an array with an axis of queries."""
    rows = x.shape[axis] // blocks
    return jax.lax.dynamic_slice_in_dim(x, index * rows, rows, axis=axis)


def _join(x: Array) -> Array:
    """Blocks [blocks, batch, heads, rows, *] as one array [batch, heads, length, *]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[4])
