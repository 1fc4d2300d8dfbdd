"""Attention on TPUs from v4 on, in a Pallas kernel that adds T5's position bias itself.

As in FlashAttention (Dao et al., 2022), a block of weights exists only on the chip, and the
backward pass recomputes it from two numbers per query. T5 adds to this:

    the position bias    is read by offset, and so is its gradient written
    blocks of no use     whose keys none of their queries sees are neither read nor computed
    blind queries        that see nothing get weights of 1, as with Mesh TensorFlow

Arrays have positions last, [batch, heads, d_kv, length]. A TPU pads the last axis to 128, so that
heads of 64 would otherwise take twice their memory. Blocks of logits are [keys, queries]: a sum
over keys is then one over rows, which costs a TPU less than one along rows.

The bias of a block depends only on query - key, so each row is the row above, shifted by one. Once
per head, the kernel makes 128 such rows of the whole bias, `slanted`. Rows 128 further down are the
same rows, read 128 columns further left, which needs no shift:

    by query - key       a b c d e f g
    slanted, 3 rows      a b c d e f g        a block's first 3 keys:    c d e f
                         . a b c d e f                                   b c d e
                         . . a b c d e                                   a b c d

The gradient is added up in an array of the same form and summed along its diagonals at the end of
the head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from t0repro.model.attention_mask import INVISIBLE, AttentionMask
from t0repro.model.pallas_attention import (
    ABSENT,
    Kernels,
    Sizes,
    attend,
    find_needed_blocks,
    pack_mask,
)
from t0repro.model.shapes import Array, Float
from t0repro.partitioning.flops import KERNEL_MATMULS

_FORWARD, _BACKWARD = KERNEL_MATMULS
_LANES = 128  # columns of a TPU's registers; shifting by a multiple of this is free
_SUBLANES = 8  # their rows
_OFFSETS = 6144  # padded queries and keys together for which the slanted rows fit on all chips
_STEPS = 1 << 15  # blocks of all rows: a number of each is in the memory for scalars

_COLUMNS = (((0,), (0,)), ((), ()))  # [d, keys], [d, queries] -> [keys, queries]
_ROWS = (((1,), (1,)), ((), ()))  # [d, queries], [keys, queries] -> [d, keys]
_PLAIN = (((1,), (0,)), ((), ()))  # [d, keys], [keys, queries] -> [d, queries]


def supports(device_kind: str) -> bool:
    """Whether the kernel compiles for devices of this kind, by JAX's name."""
    # libtpu refuses its bfloat16 matmuls for v3.
    return device_kind.startswith("TPU") and device_kind not in ("TPU v2", "TPU v3")


def fits(batch: int, length: int, keys: int) -> bool:
    """Whether a device's rows of this many queries and keys fit into its on-chip memory."""
    sizes = _sizes(length, keys)
    steps = batch * sizes.blocks * sizes.key_blocks
    return sizes.offsets <= _OFFSETS and steps <= _STEPS


def attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "heads offsets"] | None,
    mask: AttentionMask,
    *,
    interpret: bool = False,
) -> Float[Array, "batch heads length d_kv"]:
    """Like t0repro.model.attention.attention, without dropout; only if it `fits`.

    Matmuls are of the value's dtype, to which XLA rounds their operands on a TPU too, and add up in
    float32, the dtype of logits and softmax.

    Batch and heads must divide evenly across the device mesh. `interpret` runs without a TPU.
    """
    batch, _, length, depth = query.shape
    # bfloat16 has two rows in each row of a register, and so 16 of them.
    padding = ((0, 0), (0, 0), (0, -depth % (2 * _SUBLANES)), (0, 0))
    query, key = query.astype(value.dtype), key.astype(value.dtype)
    operands = (jnp.pad(x.swapaxes(2, 3), padding) for x in (query, key, value))
    sizes = _sizes(length, key.shape[2])
    forward = functools.partial(_run_forward, sizes, interpret)
    backward = functools.partial(_run_backward, sizes, interpret)
    kernels = Kernels(forward, backward, ("batch", "heads"))
    attended: Any = attend(kernels, *operands, position_bias, *pack_mask(mask, batch))
    return attended[:, :, :depth].swapaxes(2, 3)


def _sizes(length: int, keys: int) -> Sizes:
    return Sizes(length, keys, _block(length), _block(keys))


def _block(size: int) -> int:
    """Positions of a block: 128 to 512, which should neither pad much nor make many blocks."""
    registers = -(-size // _LANES)
    # A further block is taken to cost as much as 64 further positions.
    return _LANES * min(range(4, 0, -1), key=lambda n: -(-registers // n) * (n + 0.5))


def _run_forward(sizes: Sizes, interpret: bool, *operands: Any) -> tuple[Array, Array]:
    """The result, and log_z and the total of weights of all queries: [batch, heads, 2, queries]."""
    query, key, value, bias, query_ids, key_ids = operands
    batch, heads, depth, _ = query.shape

    def query_index(h: Any, b: Any, i: Any, j: Any, read: Any) -> tuple[Any, ...]:
        return b, h, 0, i

    def key_index(h: Any, b: Any, i: Any, j: Any, read: Any) -> tuple[Any, ...]:
        return b, h, 0, read[(b * sizes.blocks + i) * sizes.key_blocks + j]

    length = sizes.blocks * sizes.block
    results = [
        (
            pl.BlockSpec((1, 1, rows, sizes.block), query_index),
            jax.ShapeDtypeStruct((batch, heads, rows, length), dtype),
        )
        for rows, dtype in ((depth, value.dtype), (2, jnp.float32))
    ]
    scratch = [(depth, sizes.block), (1, sizes.block), (1, sizes.block)]
    y, sums = _call(
        functools.partial(_forward_kernel, sizes, bias is not None),
        _FORWARD,
        (heads, batch, sizes.blocks, sizes.key_blocks),
        _blocks_to_read(find_needed_blocks(query_ids, key_ids, sizes)),
        _operands(operands, sizes, query_index, key_index),
        results,
        scratch if bias is None else [*scratch, (_LANES, sizes.offsets)],
        interpret,
    )
    return y[..., : sizes.length], sums


def _run_backward(sizes: Sizes, interpret: bool, *residuals: Any) -> tuple[Any, ...]:
    """The gradients of query, key, value and position bias."""
    *arguments, y, sums, d_y = residuals
    query, key, value, bias, query_ids, key_ids = arguments
    batch, heads, depth, _ = query.shape
    # The mean of the weights' gradients, weighted by them. Its sum over keys is one over d_kv: the
    # sum of weights x (d_y . value) is d_y . y. The total differs from 1 for blind queries only.
    product = jnp.sum(d_y.astype(jnp.float32) * y.astype(jnp.float32), axis=2)
    log_z, total = sums[:, :, 0], sums[:, :, 1]
    row_stats = jnp.stack([log_z, sizes.queries(product) / total], axis=2)

    def query_index(h: Any, b: Any, j: Any, i: Any, read: Any) -> tuple[Any, ...]:
        return b, h, 0, read[(b * sizes.key_blocks + j) * sizes.blocks + i]

    def key_index(h: Any, b: Any, j: Any, i: Any, read: Any) -> tuple[Any, ...]:
        return b, h, 0, j

    operands = _operands(arguments, sizes, query_index, key_index)
    for_queries, for_keys = operands[0][0], operands[1][0]
    operands += [
        (for_queries, sizes.queries(d_y)),
        (pl.BlockSpec((1, 1, 2, sizes.block), query_index), row_stats),
    ]
    queries, keys = operands[0][1], operands[1][1]
    all_queries = pl.BlockSpec((1, 1, *queries.shape[2:]), lambda h, b, *_: (b, h, 0, 0))
    results = [(all_queries, queries), (for_keys, keys), (for_keys, keys)]
    scratch = [queries.shape[2:], *[(depth, sizes.key_block)] * 2]
    if bias is not None:
        d_bias = jax.ShapeDtypeStruct((heads, 1, sizes.offsets), jnp.float32)
        results.append((_bias_spec(sizes), d_bias))
        scratch += [(_LANES, sizes.offsets)] * 2
    results = [(spec, jax.ShapeDtypeStruct(x.shape, x.dtype)) for spec, x in results]
    d_query, d_key, d_value, *d_bias = _call(
        functools.partial(_backward_kernel, sizes, bias is not None),
        _BACKWARD,
        (heads, batch, sizes.key_blocks, sizes.blocks),
        _blocks_to_read(find_needed_blocks(query_ids, key_ids, sizes).swapaxes(1, 2)),
        operands,
        results,
        scratch,
        interpret,
    )
    learned = d_query[..., : sizes.length], d_key[..., : sizes.keys], d_value[..., : sizes.keys]
    if bias is None:
        return *learned, None
    return *learned, _index_by_offset(d_bias[0][:, 0], sizes).astype(bias.dtype)


def _blocks_to_read(needed: Array) -> Array:
    """Which block to have in memory at each step of the last axis of [batch, steps, blocks], flat.

    A needed block is computed in its own step. Any other step keeps the last needed block before
    it, or has the first one already, so that nothing is copied for it.
    """
    steps = jnp.arange(needed.shape[2], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(needed, steps, -1), axis=2)
    first = jnp.argmax(needed, axis=2, keepdims=True).astype(jnp.int32)
    return jnp.where(last < 0, first, last).reshape(-1)


def _index_by_distance(bias: Array, sizes: Sizes) -> Array:
    """The position bias [heads, sizes.offsets] by query - key instead of key - query."""
    before = sizes.key_blocks * sizes.key_block - sizes.keys + 1
    after = sizes.offsets - before - bias.shape[1]
    return jnp.pad(bias[:, ::-1].astype(jnp.float32), ((0, 0), (before, after)))


def _index_by_offset(x: Array, sizes: Sizes) -> Array:
    """The inverse of `_index_by_distance`."""
    before = sizes.key_blocks * sizes.key_block - sizes.keys + 1
    return x[:, before : before + sizes.length + sizes.keys - 1][:, ::-1]


def _operands(arrays: Sequence[Any], sizes: Sizes, query_index: Any, key_index: Any) -> list[Any]:
    """What both kernels read, in full blocks: (its blocks, the array) of each.

    The functions give the indices of a step's queries and keys in [batch, heads, 1, blocks].
    """
    query, key, value, bias, *ids = arrays

    def operand(x: Array, index: Any, block: int) -> tuple[Any, Array]:
        if x.ndim == 4:
            return pl.BlockSpec((1, 1, x.shape[2], block), index), x
        flat = lambda *step: (index(*step)[0], 0, index(*step)[3])  # noqa: E731
        return pl.BlockSpec((1, x.shape[1], block), flat), x

    operands = [
        operand(sizes.queries(query), query_index, sizes.block),
        operand(sizes.pad_keys(key), key_index, sizes.key_block),
        operand(sizes.pad_keys(value), key_index, sizes.key_block),
        operand(sizes.queries(ids[0]), query_index, sizes.block),
        operand(sizes.pad_keys(ids[1]), key_index, sizes.key_block),
    ]
    if bias is not None:
        operands.append((_bias_spec(sizes), _index_by_distance(bias, sizes)[:, None]))
    return operands


def _bias_spec(sizes: Sizes) -> Any:
    return pl.BlockSpec((1, 1, sizes.offsets), lambda h, *_: (h, 0, 0))


def _call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    read: Array,
    operands: Sequence[tuple[Any, Array]],
    results: Sequence[tuple[Any, Any]],
    scratch: Sequence[tuple[int, ...]],
    interpret: bool,
) -> Any:
    """Calls a kernel on arguments and for results, each with its blocks; scratch is float32."""
    arrays = [x for _, x in operands]
    (batch, heads, depth, length), keys = arrays[0].shape, arrays[1].shape[3]
    flops = 2 * KERNEL_MATMULS[name] * batch * heads * depth * length * keys
    shapes = [x for _, x in results]
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*arrays, *shapes))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec for spec, _ in operands],
            out_specs=[spec for spec, _ in results],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=shapes,
        # A chip with two cores divides the heads between them.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name=name,
    )(read, *arrays)


def _forward_kernel(sizes: Sizes, biased: bool, read: Any, *refs: Any) -> None:
    query, key, value, seen, keys_seen, *others = refs
    bias: Any = others.pop(0) if biased else None
    slanted: Any = others.pop() if biased else None
    y, sums, result, maximum, total = others
    b, i, j = map(pl.program_id, (1, 2, 3))

    if biased:
        pl.when((b == 0) & (i == 0) & (j == 0))(lambda: _slant(bias[0], slanted))

    @pl.when(j == 0)
    def _() -> None:
        maximum[...] = jnp.full(maximum.shape, ABSENT)
        total[...] = jnp.zeros(total.shape)
        result[...] = jnp.zeros(result.shape)

    @pl.when(read[(b * sizes.blocks + i) * sizes.key_blocks + j] == j)
    def _() -> None:
        logits = _logits(query[0, 0], key[0, 0], seen[0], keys_seen[0], slanted, i, j, sizes)
        largest = jnp.maximum(maximum[...], jnp.max(logits, axis=0, keepdims=True))
        weights = jnp.exp(logits - largest)
        before = jnp.exp(maximum[...] - largest)
        total[...] = before * total[...] + jnp.sum(weights, axis=0, keepdims=True)
        result[...] = before * result[...] + _matmul(_PLAIN, value[0, 0], weights)
        maximum[...] = largest

    @pl.when(j == sizes.key_blocks - 1)
    def _() -> None:
        log_z = jnp.log(total[...]) + maximum[...]
        scale = jnp.exp(maximum[...] - log_z)  # 1 for a blind query, otherwise 1 / total
        y[0, 0] = (result[...] * scale).astype(y.dtype)
        sums[0, 0, 0:1] = log_z
        sums[0, 0, 1:2] = total[...] * scale


def _backward_kernel(sizes: Sizes, biased: bool, read: Any, *refs: Any) -> None:
    query, key, value, seen, keys_seen, *others = refs
    bias: Any = others.pop(0) if biased else None
    d_slanted: Any = others.pop() if biased else None
    slanted: Any = others.pop() if biased else None
    d_y, row_stats, d_query, d_key, d_value, *d_bias, query_sum, key_sum, value_sum = others
    b, j, i = map(pl.program_id, (1, 2, 3))
    first, last = (i == 0) & (j == 0), (i == sizes.blocks - 1) & (j == sizes.key_blocks - 1)

    if biased:

        @pl.when(first & (b == 0))
        def _() -> None:
            _slant(bias[0], slanted)
            d_slanted[...] = jnp.zeros(d_slanted.shape)

    @pl.when(first)
    def _() -> None:
        query_sum[...] = jnp.zeros(query_sum.shape)

    @pl.when(i == 0)
    def _() -> None:
        key_sum[...] = jnp.zeros(key_sum.shape)
        value_sum[...] = jnp.zeros(value_sum.shape)

    @pl.when(read[(b * sizes.key_blocks + j) * sizes.blocks + i] == i)
    def _() -> None:
        q, k, dy = query[0, 0], key[0, 0], d_y[0, 0]
        logits = _logits(q, k, seen[0], keys_seen[0], slanted, i, j, sizes)
        weights = jnp.exp(logits - row_stats[0, 0, 0:1])
        d_weights = _matmul(_COLUMNS, value[0, 0], dy)
        d_logits = weights * (d_weights - row_stats[0, 0, 1:2])
        value_sum[...] += _matmul(_ROWS, dy, weights)
        key_sum[...] += _matmul(_ROWS, q, d_logits)
        queries = pl.ds(pl.multiple_of(i * sizes.block, _LANES), sizes.block)
        query_sum[:, queries] += _matmul(_PLAIN, k, d_logits)
        if biased:
            for group, columns in enumerate(_columns(i, j, sizes)):
                rows = slice(group * _LANES, (group + 1) * _LANES)
                d_slanted[:, columns] += d_logits[rows]

    @pl.when(i == sizes.blocks - 1)
    def _() -> None:
        d_key[0, 0] = key_sum[...].astype(d_key.dtype)
        d_value[0, 0] = value_sum[...].astype(d_value.dtype)

    @pl.when(last)
    def _() -> None:
        d_query[0, 0] = query_sum[...].astype(d_query.dtype)

    if biased:

        @pl.when(last & (b == pl.num_programs(1) - 1))
        def _() -> None:
            d_bias[0][0] = _sum_along_diagonals(d_slanted)


def _matmul(axes: Any, x: Array, y: Array) -> Array:
    """A matmul in the dtype of x that adds up in float32."""
    return jax.lax.dot_general(x, y.astype(x.dtype), axes, preferred_element_type=jnp.float32)


def _logits(
    query: Array,
    key: Array,
    query_ids: Array,
    key_ids: Array,
    slanted: Any,
    i: Array,
    j: Array,
    sizes: Sizes,
) -> Array:
    """The logits of query block i and key block j, [keys, queries], float32."""
    # The keys' rows [1, keys] as columns; a transposed register then serves 128 queries.
    down = [jnp.broadcast_to(x, (_LANES, sizes.key_block)).T for x in _rows(key_ids)]
    down = [jnp.concatenate([x] * (sizes.block // _LANES), axis=1) for x in down]
    segments, *order = _rows(query_ids)
    visible = segments == down[0]
    if order:
        visible &= order[0] >= down[1]
    bias = jnp.where(visible, 0.0, INVISIBLE)
    if slanted is not None:
        rows = [slanted[:, columns] for columns in _columns(i, j, sizes)]
        bias = jnp.concatenate(rows, axis=0) + bias
    logits = _matmul(_COLUMNS, key, query) + bias
    if sizes.keys % sizes.key_block == 0:
        return logits
    at = j * sizes.key_block + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    return jnp.where(at < sizes.keys, logits, ABSENT)


def _rows(x: Array) -> list[Array]:
    return [x[row : row + 1] for row in range(x.shape[0])]


def _columns(i: Array, j: Array, sizes: Sizes) -> list[Any]:
    """The slanted columns of query block i, for each 128 keys of key block j."""
    zero = (sizes.key_blocks - j) * sizes.key_block + i * sizes.block
    starts = range(0, sizes.key_block, _LANES)
    return [pl.ds(pl.multiple_of(zero - start, _LANES), sizes.block) for start in starts]


def _slant(row: Array, slanted: Any) -> None:
    """Writes 128 rows, each shifted right by one more column than the row above it."""
    x = jnp.broadcast_to(row, (_SUBLANES, row.shape[1]))
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    # By the bits of a row's number: chips before v5 shift all rows alike.
    for bit in (1, 2, 4):
        x = jnp.where(at & bit != 0, pltpu.roll(x, bit, 1), x)
    slanted[0:_SUBLANES] = x
    for rows in (8, 16, 32, 64):
        slanted[rows : 2 * rows] = pltpu.roll(slanted[0:rows], rows, 1)


def _sum_along_diagonals(slanted: Any) -> Array:
    """Sums 128 rows, each shifted back by `_slant`'s number of columns: [1, columns]."""
    x = slanted[...]
    columns = x.shape[1]
    for rows in (64, 32, 16, 8):
        x = x[:rows] + pltpu.roll(x[rows:], columns - rows, 1)
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for bit in (1, 2, 4):
        x = jnp.where(at & bit != 0, pltpu.roll(x, columns - bit, 1), x)
    return jnp.sum(x, axis=0, keepdims=True)
