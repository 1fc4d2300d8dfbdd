"""Attention with T5's position bias, behind one function; the machine decides what computes it.

    full      matmuls over the full matrix of weights (t0repro.model.full_attention): the reference,
              and the choice for small ones
    blocks    a block of queries at a time, in JAX (t0repro.model.blockwise_attention): anywhere
    tpu       a Pallas kernel (t0repro.model.tpu_attention): on TPUs from v4 on
    gpu       Pallas kernels (t0repro.model.gpu_attention): on NVIDIA GPUs from A100 on
    cpu       a kernel in C++ (t0repro.model.cpu_attention): on CPUs

The position bias depends only on the offset of a key from its query, so it is passed as [heads,
offsets], and so is its gradient. A few numbers per position (`AttentionMask`) determine which query
sees which key. Only the reference expands either to [batch, heads, query, key].

The last three are kernels, which first show on the device that they agree with the reference
(t0repro.model.kernel_check).

Mesh TensorFlow's softmax differs from the usual one for a query that sees nothing, as with empty
inputs: near -1e9, float32 is too coarse for log_z to include the logarithm of the number of keys,
so each weight is 1 rather than 1 over that number. All implementations do the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from t0repro.errors import UserError
from t0repro.model import cpu_attention
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.blockwise_attention import blockwise_attention
from t0repro.model.full_attention import full_matrix
from t0repro.model.kernel_check import is_sound
from t0repro.model.shapes import Array, Float
from t0repro.partitioning import memory
from t0repro.partitioning.devices import count_shards, device_to_trace_for

KERNEL_FROM = 1 << 23
"""Bytes of attention logits on a device from which a layer uses a kernel.

A CPU keeps fewer in its cache.
"""

VARIABLE = "T0REPRO_ATTENTION"
"""The environment's choice, which `--attention` sets: full, blocks, or kernel without its check."""

KernelName = Literal["cpu", "tpu", "gpu"]
Implementation = Literal["full", "blocks"] | KernelName


def attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "*rows heads offsets"] | None,
    mask: AttentionMask,
    apply_dropout: Callable[[Array], Array] = lambda x: x,
    dtype: DTypeLike | None = None,
) -> Float[Array, "batch heads length d_kv"]:
    """The values, weighted by the softmax of query x key + position_bias.

    Gradients are those of query, key, value and position_bias.

    Args:
      query: not scaled here.
      key: of the query's dtype.
      value: its dtype is that of the weights and of the result.
      position_bias: by the offset key - query, from 1 - length to keys - 1. A single query may have
        one in each row.
      mask: which query sees which key.
      apply_dropout: applies dropout to [batch, heads, query, key] with one mask for all queries.
      dtype: of logits and softmax; None for the query's.
    """
    (batch, heads, length, _), keys = query.shape, key.shape[2]
    dtype = jnp.dtype(dtype or query.dtype)
    float32 = dtype == value.dtype == jnp.float32
    way = choose_implementation(batch, heads, length, keys, float32=float32)
    # A CPU multiplies bfloat16 arrays faster, to float32 logits too; its kernel widens them itself.
    if way == "blocks" or device_to_trace_for().platform != "cpu":
        query, key = query.astype(dtype), key.astype(dtype)
    if way == "full":
        return full_matrix(query, key, value, position_bias, mask, apply_dropout, dtype)
    # Scaling a key's value has the same effect as scaling its weights.
    scale = apply_dropout(jnp.ones((batch, heads, 1, keys), value.dtype))
    value = value * scale.swapaxes(2, 3)
    if way == "blocks":
        mask = mask.broadcast(batch, length, keys)
        blocks = number_of_blocks(batch, heads, length, keys)
        return blockwise_attention(query, key, value, position_bias, mask, blocks)
    return _kernel(way)(query, key, value, position_bias, mask)


def choose_implementation(
    batch: int, heads: int, length: int, keys: int, *, float32: bool
) -> Implementation:
    """Chooses the implementation for attention of this size on the device mesh, or JAX's device.

    Args:
      batch: rows.
      heads: heads.
      length: queries of a row.
      keys: keys of a row.
      float32: whether queries, keys and values all are.

    Raises:
      UserError: if a kernel is asked for and none computes this.
    """
    requested = os.environ.get(VARIABLE)
    if requested == "full":
        return "full"
    size = 4 * batch * heads * length * keys // count_shards("batch", "heads")
    # A single query, as in decoding, has no block of queries to share the reads.
    if requested != "blocks" and size >= KERNEL_FROM and length > 1:
        way = _find_kernel(batch, heads, length, keys, float32=float32)
        if way is None and requested == "kernel":
            raise UserError(
                f"No attention kernel computes {length} queries and {keys} keys of {batch} rows and"
                f" {heads} heads in {'float32' if float32 else 'bfloat16'} on"
                f" {device_to_trace_for().device_kind}.",
                where="--attention kernel",
                fix="Leave it out, or give --attention blocks.",
            )
        if way is not None and (requested == "kernel" or _is_sound(way, float32=float32)):
            return way
    return "blocks" if number_of_blocks(batch, heads, length, keys) > 1 else "full"


def _find_kernel(
    batch: int, heads: int, length: int, keys: int, *, float32: bool
) -> KernelName | None:
    device = device_to_trace_for()
    # XLA cannot shard a kernel across devices: they shard themselves, evenly.
    rows, others = divmod(batch, count_shards("batch"))
    even = others == heads % count_shards("heads") == 0
    # Not where an outer axis of groups is sharded, as in training.
    mesh = jax.sharding.get_abstract_mesh()
    shards_all = mesh.empty or count_shards("batch", "heads") == mesh.size
    if device.platform == "cpu" and even and shards_all and cpu_attention.is_available():
        return "cpu"
    # After the CPU's, because they import Pallas.
    from t0repro.model import gpu_attention, tpu_attention

    fits = tpu_attention.fits(rows, length, keys)
    if tpu_attention.supports(device.device_kind) and even and fits:
        return "tpu"
    return "gpu" if gpu_attention.supports(device) and even else None


def _is_sound(way: KernelName, *, float32: bool) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    spans = not mesh.empty and mesh.size > jax.local_device_count()
    return is_sound(way, _kernel(way), device_to_trace_for(), float32=float32, spans=spans)


def _kernel(way: KernelName) -> Callable[..., Array]:
    if way == "cpu":
        return cpu_attention.attention
    from t0repro.model import gpu_attention, tpu_attention

    return {"tpu": tpu_attention, "gpu": gpu_attention}[way].attention


def number_of_blocks(batch: int, heads: int, length: int, keys: int) -> int:
    """The number of query blocks that keeps within ATTENTION_BLOCK_BYTES; 1 for the full matrix.

    Prefers a number that divides the length, up to twice the least possible one.
    """
    # 4 bytes each: logits are float32, whatever the activations are.
    size = 4 * batch * heads * length * keys // count_shards("batch", "heads")
    least = min(length, -(-size // memory.ATTENTION_BLOCK_BYTES))
    return next((n for n in range(least, 2 * least) if length % n == 0), least)
