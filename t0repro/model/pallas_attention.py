"""What the Pallas kernels of attention have in common, for TPUs and for GPUs.

Each has a forward and a backward pass on one device's rows and heads (`Kernels`). Here are the
shards of all devices, the gradient, and the blocks that a pass can leave out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from t0repro.model.attention_mask import AttentionMask
from t0repro.model.shapes import Array
from t0repro.partitioning.devices import shard_kernel, sum_over_shards
from t0repro.partitioning.flops import ATTENDED

ABSENT = -3e38  # the logit of a key that only pads a block; its weight is 0 for blind queries too


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of positions: of a row's queries and keys, and of those of a block."""

    length: int
    keys: int
    block: int
    key_block: int

    @property
    def blocks(self) -> int:
        """Blocks of queries, the last of which may be padded."""
        return -(-self.length // self.block)

    @property
    def key_blocks(self) -> int:
        """Blocks of keys, likewise."""
        return -(-self.keys // self.key_block)

    @property
    def offsets(self) -> int:
        """One more than the offsets of all keys from all queries, in full blocks."""
        return self.blocks * self.block + self.key_blocks * self.key_block

    def queries(self, x: Array, axis: int = -1) -> Array:
        """Pads an axis of queries to full blocks."""
        return _pad(x, axis, self.blocks * self.block)

    def pad_keys(self, x: Array, axis: int = -1) -> Array:
        """Pads an axis of keys to full blocks."""
        return _pad(x, axis, self.key_blocks * self.key_block)


def _pad(x: Array, axis: int, size: int) -> Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Both passes of attention on one device.

    Attributes:
      forward: of query, key, value, position bias and what `pack_mask` gives; the result, and for
        each query log_z and the total of its weights, [batch, heads, 2, queries].
      backward: of all these and the result's gradient; the gradients of the first four arguments.
      axes: logical axes of query, key, value and result, up to that of heads.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Any, ...]]
    axes: tuple[str, ...]


def pack_mask(mask: AttentionMask, batch: int) -> tuple[Array, Array]:
    """Segments, and order if it matters, of queries and of keys: int32 [batch, 1 or 2, positions].

    Args:
      mask: which query sees which key.
      batch: rows.
    """
    query_segments, key_segments, query_order, key_order = mask
    if query_order is None or key_order is None:
        query_order = key_order = None

    def join(*arrays: Array | None) -> Array:
        rows = [jnp.broadcast_to(x, (batch, x.shape[1])) for x in arrays if x is not None]
        return jnp.stack(rows, axis=1).astype(jnp.int32)

    return join(query_segments, query_order), join(key_segments, key_order)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    kernels: Kernels,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    query_ids: Array,
    key_ids: Array,
) -> Array:
    """Attention by these kernels, on each device's rows and heads, which must divide evenly."""
    return _forward(kernels, query, key, value, bias, query_ids, key_ids)[0]


def _forward(kernels: Kernels, *operands: Any) -> tuple[Array, Any]:
    learned, seen, sums = _axes(kernels)
    run = shard_kernel(kernels.forward, (*learned, *seen), (learned[0], sums))
    y, totals = run(*operands)
    y, totals = checkpoint_name(y, ATTENDED), checkpoint_name(totals, ATTENDED)
    return y, (*operands, y, totals)


def _backward(kernels: Kernels, residuals: Any, d_y: Array) -> tuple[Any, ...]:
    def run(*arrays: Any) -> tuple[Any, ...]:
        *gradients, d_bias = kernels.backward(*arrays)
        if d_bias is not None:
            d_bias = sum_over_shards(d_bias, "batch")
        return *gradients, d_bias

    learned, seen, sums = _axes(kernels)
    axes = (*learned, *seen, learned[0], sums, learned[0])
    return (*shard_kernel(run, axes, learned)(*residuals, d_y), None, None)


attend.defvjp(_forward, _backward)


def _axes(kernels: Kernels) -> tuple[Any, Any, Any]:
    """Logical axes of query, key, value and bias; of what they see; of log_z and total."""
    return (*[kernels.axes] * 3, ("heads",)), (("batch",), ("batch",)), ("batch", "heads")


def find_needed_blocks(query_ids: Array, key_ids: Array, sizes: Sizes) -> Array:
    """Whether a block's weights are not all 0: bool [batch, blocks, key blocks].

    An invisible key's weight is exactly 0, unless its query is blind.
    """
    query_ids, key_ids = sizes.queries(query_ids), sizes.pad_keys(key_ids)
    visible = query_ids[:, 0, :, None] == key_ids[:, 0, None]
    if query_ids.shape[1] > 1:
        visible &= query_ids[:, 1, :, None] >= key_ids[:, 1, None]
    is_query = jnp.arange(query_ids.shape[2])[:, None] < sizes.length
    is_key = jnp.arange(key_ids.shape[2]) < sizes.keys
    visible &= is_query & is_key
    # [batch, queries, key blocks]: XLA fuses all before it into this reduction.
    seen = jnp.any(visible.reshape(*visible.shape[:2], sizes.key_blocks, sizes.key_block), axis=3)
    blind = is_query & ~jnp.any(seen, axis=2, keepdims=True)
    return jnp.any((seen | blind).reshape(-1, sizes.blocks, sizes.block, sizes.key_blocks), axis=2)
