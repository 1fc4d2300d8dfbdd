"""Attention with T5's position bias, behind one function; the machine decides what computes it.

    full      matmuls over the full matrix of weights: the reference, and the choice for small ones
    blocks    a block of queries at a time, in JAX (t0repro.model.blockwise_attention): anywhere
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

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from t0repro.model import cpu_attention
from t0repro.model.shapes import Array, Bool, Float, Int
from t0repro.partitioning import memory
from t0repro.partitioning.rules import parts_of

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
    from t0repro.model.blockwise_attention import blockwise_attention  # which imports the reference

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
    least = min(length, -(-size // memory.ATTENTION_BLOCK_BYTES))
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
    bias = visibility_bias(visibility.matrix())
    if position_bias is not None:
        bias = along_diagonals(position_bias, query.shape[2])[None] + bias
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key) + bias.astype(query.dtype)
    weights = dropped(attention_weights(logits).astype(value.dtype))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value)


def visibility_bias(visible: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Float32 bias for attention logits: 0 where visible, -1e9 elsewhere."""
    return jnp.where(visible, jnp.float32(0.0), jnp.float32(INVISIBLE))


def attention_weights(
    logits: Float[Array, "batch heads query key"],
) -> Float[Array, "batch heads query key"]:
    """Softmax over the last axis, as exp(logits - log_z), which is Mesh TensorFlow's form."""
    return jnp.exp(logits - log_normalizer(logits))


def log_normalizer(logits: Float[Array, "*rows keys"]) -> Float[Array, "*rows 1"]:
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
