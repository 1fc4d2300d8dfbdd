"""Attention on NVIDIA GPUs from compute capability 8.0 on, in Pallas kernels for Triton.

As in FlashAttention-2 (Dao, 2023), a program computes a block of queries in a loop over keys, so
that a block of weights exists only in registers; the backward pass recomputes it from two numbers
per query. T5 adds to this:

    the position bias    is read by offset, from the row of its head, which stays in the cache
    blocks of no use     whose keys none of their queries sees are outside of the loops' bounds
    blind queries        that see nothing get weights of 1, as with Mesh TensorFlow

Nothing is added atomically, so results are the same in each run. The backward pass has a kernel for
query, one for key and value, and one for the bias, each with its own order of blocks. The bias's
gradient depends only on the offset, which is the same at each place of all blocks on a diagonal:

    query blocks     0 1 2 .         A program adds up the blocks of one number, from all rows of
    (down) and       . 0 1 2         the batch, in registers. It writes the sum of one block, whose
    key blocks       . . 0 1         own diagonals XLA sums.

Arrays are [batch, length, heads, d_kv], the order of projections, which XLA need not copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

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
_SMALLEST = 16  # rows and columns of a matmul on tensor cores
_STEP = 32  # queries of a step for key and value, whose two sums leave few registers
_GROUPS = 4  # parts of a batch whose gradients of the bias are summed by themselves

_ROW_BY_ROW = (((1,), (1,)), ((), ()))  # [rows, d], [columns, d] -> [rows, columns]
_PLAIN = (((1,), (0,)), ((), ()))  # [rows, columns], [columns, d] -> [rows, d]


def supports(device: Any) -> bool:
    """Whether the kernels compile for a device; if it is abstract, for those here of its kind."""
    if device.platform not in ("gpu", "cuda"):
        return False
    if not hasattr(device, "compute_capability"):
        local_devices = (x for x in jax.devices() if x.device_kind == device.device_kind)
        device = next(local_devices, None)
    # AMD's have names instead of numbers.
    major = getattr(device, "compute_capability", "").split(".")[0]
    return major.isdigit() and int(major) >= 8


def attention(
    query: Float[Array, "batch heads length d_kv"],
    key: Float[Array, "batch heads keys d_kv"],
    value: Float[Array, "batch heads keys d_kv"],
    position_bias: Float[Array, "heads offsets"] | None,
    mask: AttentionMask,
    *,
    interpret: bool = False,
) -> Float[Array, "batch heads length d_kv"]:
    """Like t0repro.model.attention.attention, without dropout.

    Matmuls are of the value's dtype and add up in float32, the dtype of logits and softmax. As in
    XLA's own matmuls on these GPUs, operands of float32 are rounded to TF32 unless
    `jax.default_matmul_precision` says otherwise.

    Batch and heads must divide evenly across the device mesh. `interpret` runs without a GPU.
    """
    batch, _, length, depth = query.shape
    padding = ((0, 0), (0, 0), (0, 0), (0, _power_of_two(depth) - depth))
    query, key = query.astype(value.dtype), key.astype(value.dtype)
    operands = [jnp.pad(x.swapaxes(1, 2), padding) for x in (query, key, value)]
    # The diagonals are those of square blocks.
    # Positions of a block, whose logits and results fit into the registers of four warps.
    size = 64 >> (operands[0].dtype.itemsize > 2) + (operands[0].shape[3] > 128)
    size = min(size, _power_of_two(max(length, key.shape[2])))
    sizes = Sizes(length, key.shape[2], size, size)
    forward = functools.partial(_run_forward, sizes, interpret)
    backward = functools.partial(_run_backward, sizes, interpret)
    kernels = Kernels(forward, backward, ("batch", "length", "heads"))
    attended: Any = attend(kernels, *operands, position_bias, *pack_mask(mask, batch))
    return attended[..., :depth].swapaxes(1, 2)


def _power_of_two(size: int) -> int:
    """The least one that is not below a size or what Triton multiplies."""
    return max(_SMALLEST, pl.next_power_of_2(size))


def _run_forward(sizes: Sizes, interpret: bool, *operands: Any) -> tuple[Array, Array]:
    """The result, and log_z and the total of weights of all queries: [batch, heads, 2, queries]."""
    query, key, value, bias, query_ids, key_ids = _pad_to_blocks(sizes, *operands)
    batch, length, heads, _ = query.shape
    y, sums = _call(
        functools.partial(_forward_kernel, sizes),
        (sizes.blocks, heads, batch),
        KERNEL_MATMULS[_FORWARD],
        [
            _bounds(find_needed_blocks(query_ids, key_ids, sizes)),
            _vectors(query, sizes.block),
            _vectors(key),
            _vectors(value),
            _bias(bias),
            _numbers(query_ids, sizes.block),
            _numbers(key_ids),
        ],
        [
            _vectors(jax.ShapeDtypeStruct(query.shape, value.dtype), sizes.block),
            _sums(jax.ShapeDtypeStruct((batch, heads, 2, length), jnp.float32), sizes.block),
        ],
        interpret,
    )
    return y[:, : sizes.length], sums


def _run_backward(sizes: Sizes, interpret: bool, *residuals: Any) -> tuple[Any, ...]:
    """The gradients of query, key, value and position bias."""
    *operands, y, sums, d_y = residuals
    query, key, value, bias, query_ids, key_ids = _pad_to_blocks(sizes, *operands)
    batch, _, heads, _ = query.shape
    # The mean of the weights' gradients, weighted by them. Its sum over keys is one over d_kv: the
    # sum of weights x (d_y . value) is d_y . y. The total differs from 1 for blind queries only.
    product = jnp.sum(d_y.astype(jnp.float32) * y.astype(jnp.float32), axis=3).swapaxes(1, 2)
    log_z, total = sums[:, :, 0], sums[:, :, 1]
    # A query that only pads a block has weights of 0.
    log_z = jnp.where(jnp.arange(log_z.shape[2]) < sizes.length, log_z, -ABSENT)
    row_stats = jnp.stack([log_z, sizes.queries(product) / total], axis=2)
    d_y = sizes.queries(d_y, 1)
    blocks = find_needed_blocks(query_ids, key_ids, sizes)
    call = functools.partial(_call, interpret=interpret)

    # KERNEL_MATMULS counts matmuls of the full matrices. The others here compute weights or their
    # gradients again.
    (d_query,) = call(
        functools.partial(_query_kernel, sizes),
        (sizes.blocks, heads, batch),
        1,
        [
            _bounds(blocks),
            _vectors(query, sizes.block),
            _vectors(key),
            _vectors(value),
            _bias(bias),
            _numbers(query_ids, sizes.block),
            _numbers(key_ids),
            _vectors(d_y, sizes.block),
            _sums(row_stats, sizes.block),
        ],
        [_vectors(query, sizes.block)],
    )
    d_key, d_value = call(
        functools.partial(_key_kernel, sizes),
        (sizes.key_blocks, heads, batch),
        KERNEL_MATMULS[_BACKWARD] - 1,
        [
            _bounds(blocks.swapaxes(1, 2)),
            _vectors(query),
            _vectors(key, sizes.key_block),
            _vectors(value, sizes.key_block),
            _bias(bias),
            _numbers(query_ids),
            _numbers(key_ids, sizes.key_block),
            _vectors(d_y),
            _sums(row_stats),
        ],
        [_vectors(key, sizes.key_block), _vectors(value, sizes.key_block)],
    )
    learned = d_query[:, : sizes.length], d_key[:, : sizes.keys], d_value[:, : sizes.keys]
    if bias is None:
        return *learned, None
    diagonals = sizes.blocks + sizes.key_blocks - 1
    groups = next(n for n in range(min(batch, _GROUPS), 0, -1) if batch % n == 0)
    rows = batch // groups
    summed = (groups, heads, diagonals, sizes.block, sizes.key_block)
    (d_blocks,) = call(
        functools.partial(_bias_kernel, sizes, rows),
        (diagonals, heads, groups),
        0,
        [
            _bounds(_arrange_by_diagonal(blocks), rows),
            *(_vectors(x, rows=rows) for x in (query, key, value)),
            _bias(bias),
            _numbers(query_ids, rows=rows),
            _numbers(key_ids, rows=rows),
            _vectors(d_y, rows=rows),
            _sums(row_stats, rows=rows),
        ],
        [
            (
                pl.BlockSpec((None, None, None, *summed[3:]), lambda n, h, b: (b, h, n, 0, 0)),
                jax.ShapeDtypeStruct(summed, jnp.float32),
            )
        ],
    )
    d_bias = _sum_along_diagonals(jnp.sum(d_blocks, axis=0))
    start = sizes.blocks * sizes.block - sizes.length
    d_bias = d_bias[:, start : start + sizes.length + sizes.keys - 1]
    return *learned, d_bias.astype(operands[3].dtype)


def _pad_to_blocks(sizes: Sizes, *operands: Any) -> tuple[Any, ...]:
    query, key, value, bias, query_ids, key_ids = operands
    if bias is not None:
        before = sizes.blocks * sizes.block - sizes.length
        after = sizes.offsets - before - bias.shape[1]
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (before, after)))
    vectors = sizes.queries(query, 1), sizes.pad_keys(key, 1), sizes.pad_keys(value, 1)
    return *vectors, bias, sizes.queries(query_ids), sizes.pad_keys(key_ids)


def _arrange_by_diagonal(blocks: Array) -> Array:
    """[batch, blocks, key blocks] by diagonals, [batch, diagonals, blocks]; elsewhere False."""
    count, key_blocks = blocks.shape[1:]
    at = jnp.arange(1 - count, key_blocks)[:, None] + jnp.arange(count)
    inside = (at >= 0) & (at < key_blocks)
    return blocks[:, jnp.arange(count), jnp.clip(at, 0, key_blocks - 1)] & inside


def _sum_along_diagonals(blocks: Array) -> Array:
    """Sums by offset, [heads, offsets], of one block of each diagonal [heads, diagonals, n, n]."""
    heads, diagonals, size, _ = blocks.shape
    # The last row first, each shifted by one more than the row before it, as in
    # t0repro.model.full_attention.expand_offsets.
    shifted = jnp.pad(blocks[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, size)))
    shifted = shifted.reshape(heads, diagonals, -1)[..., :-size]
    sums = jnp.sum(shifted.reshape(heads, diagonals, size, 2 * size - 1), axis=2)
    # Half of a block's offsets are also those of the next diagonal.
    first, second = sums[..., :size], jnp.pad(sums[..., size:], ((0, 0), (0, 0), (0, 1)))
    none = jnp.zeros((heads, 1, size))
    sums = jnp.concatenate([first, none], axis=1) + jnp.concatenate([none, second], axis=1)
    return sums.reshape(heads, -1)


# Each has its blocks and the array. A program has a number n, of a block of queries or keys or of a
# diagonal; a head; and a row b, or as many `rows` as are given.


def _vectors(x: Any, block: int = 0, rows: int | None = None) -> tuple[Any, Any]:
    """[batch, positions, heads, d_kv], of the program's block or of all positions."""
    shape = (rows, block or x.shape[1], None, x.shape[3])
    return pl.BlockSpec(shape, lambda n, h, b: (b, n if block else 0, h, 0)), x


def _numbers(x: Any, block: int = 0, rows: int | None = None) -> tuple[Any, Any]:
    """[batch, 1 or 2, positions], likewise."""
    shape = (rows, x.shape[1], block or x.shape[2])
    return pl.BlockSpec(shape, lambda n, h, b: (b, 0, n if block else 0)), x


def _sums(x: Any, block: int = 0, rows: int | None = None) -> tuple[Any, Any]:
    """[batch, heads, 2, queries], likewise."""
    shape = (rows, None, 2, block or x.shape[3])
    return pl.BlockSpec(shape, lambda n, h, b: (b, h, 0, n if block else 0)), x


def _bias(x: Any) -> tuple[Any, Any]:
    """[heads, offsets]."""
    if x is None:
        return None, None
    return pl.BlockSpec((None, x.shape[1]), lambda n, h, b: (h, 0)), x


def _bounds(blocks: Array, rows: int | None = None) -> tuple[Any, Any]:
    """The first block and the one after the last that is True: int32 [batch, n, 2]."""
    first = jnp.argmax(blocks, axis=2)
    last = blocks.shape[2] - jnp.argmax(blocks[..., ::-1], axis=2)
    bounds = jnp.where(jnp.any(blocks, axis=2), jnp.stack([first, last]), 0)
    spec = pl.BlockSpec((rows, None, 2), lambda n, h, b: (b, n, 0))
    return spec, jnp.moveaxis(bounds, 0, 2).astype(jnp.int32)


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    matmuls: int,
    operands: Sequence[tuple[Any, Any]],
    results: Sequence[tuple[Any, Any]],
    interpret: bool,
) -> Any:
    """Calls a kernel that counts as these matmuls, on arguments and for results."""
    query, key = operands[1][1], operands[2][1]
    batch, length, heads, depth = query.shape
    flops = 2 * matmuls * batch * heads * depth * length * key.shape[1]
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec for spec, _ in operands],
        out_specs=[spec for spec, _ in results],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in results],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0),
        interpret=interpret,
    )(*(x for _, x in operands))


def _forward_kernel(sizes: Sizes, bounds: Any, *refs: Any) -> None:
    query, key, value, bias, query_ids, key_ids, y, sums = refs
    first = pl.program_id(0) * sizes.block
    q, q_ids = query[...], _rows(query_ids, slice(None))

    def add(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        result, maximum, total = carry
        keys = pl.ds(j * sizes.key_block, sizes.key_block)
        k_ids = _rows(key_ids, keys)
        logits = _logits(sizes, q, key[keys], q_ids, k_ids, bias, first, keys.start)
        largest = jnp.maximum(maximum, jnp.max(logits, axis=1))
        weights = jnp.exp(logits - largest[:, None])
        before = jnp.exp(maximum - largest)
        total = before * total + jnp.sum(weights, axis=1)
        result = before[:, None] * result + _matmul(_PLAIN, weights, value[keys])
        return result, largest, total

    start = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[0], ABSENT), jnp.zeros(q.shape[0]))
    result, maximum, total = jax.lax.fori_loop(bounds[0], bounds[1], add, start)
    log_z = jnp.log(total) + maximum
    scale = jnp.exp(maximum - log_z)  # 1 for a blind query, otherwise 1 / total
    y[...] = (result * scale[:, None]).astype(y.dtype)
    sums[0, :] = log_z
    sums[1, :] = total * scale


def _query_kernel(sizes: Sizes, bounds: Any, *refs: Any) -> None:
    query, key, value, bias, query_ids, key_ids, d_y, row_stats, d_query = refs
    first = pl.program_id(0) * sizes.block
    q, dy, q_ids = query[...], d_y[...], _rows(query_ids, slice(None))
    log_z, mean = row_stats[0, :], row_stats[1, :]

    def add(j: Array, total: Array) -> Array:
        keys = pl.ds(j * sizes.key_block, sizes.key_block)
        k, k_ids = key[keys], _rows(key_ids, keys)
        logits = _logits(sizes, q, k, q_ids, k_ids, bias, first, keys.start)
        weights = jnp.exp(logits - log_z[:, None])
        d_weights = _matmul(_ROW_BY_ROW, dy, value[keys])
        return total + _matmul(_PLAIN, weights * (d_weights - mean[:, None]), k)

    total = jax.lax.fori_loop(bounds[0], bounds[1], add, jnp.zeros(q.shape, jnp.float32))
    d_query[...] = total.astype(d_query.dtype)


def _key_kernel(sizes: Sizes, bounds: Any, *refs: Any) -> None:
    query, key, value, bias, query_ids, key_ids, d_y, row_stats, d_key, d_value = refs
    first, step = pl.program_id(0) * sizes.key_block, min(sizes.block, _STEP)
    steps = sizes.block // step
    k, v, block_ids = key[...], value[...], _rows(key_ids, slice(None))

    # Blocks are [keys, queries], so that no matmul needs weights transposed.
    def add(number: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        queries = pl.ds(number * step, step)
        q, dy, q_ids = query[queries], d_y[queries], _rows(query_ids, queries)
        logits = _logits(sizes, q, k, q_ids, block_ids, bias, queries.start, first, by_key=True)
        weights = jnp.exp(logits - row_stats[0, queries][None])
        d_weights = _matmul(_ROW_BY_ROW, v, dy)
        d_logits = weights * (d_weights - row_stats[1, queries][None])
        return totals[0] + _matmul(_PLAIN, d_logits, q), totals[1] + _matmul(_PLAIN, weights, dy)

    zeros = jnp.zeros(k.shape, jnp.float32)
    totals = jax.lax.fori_loop(bounds[0] * steps, bounds[1] * steps, add, (zeros, zeros))
    d_key[...] = totals[0].astype(d_key.dtype)
    d_value[...] = totals[1].astype(d_value.dtype)


def _bias_kernel(sizes: Sizes, rows: int, bounds: Any, *refs: Any) -> None:
    query, key, value, bias, query_ids, key_ids, d_y, row_stats, d_block = refs
    diagonal = pl.program_id(0) + 1 - sizes.blocks

    def add_row(b: Array, total: Array) -> Array:
        def add(i: Array, total: Array) -> Array:
            queries = pl.ds(i * sizes.block, sizes.block)
            keys = pl.ds((i + diagonal) * sizes.key_block, sizes.key_block)
            block_ids = _rows(query_ids, queries, b), _rows(key_ids, keys, b)
            places = queries.start, keys.start
            logits = _logits(sizes, query[b, queries], key[b, keys], *block_ids, bias, *places)
            weights = jnp.exp(logits - row_stats[b, 0, queries][:, None])
            d_weights = _matmul(_ROW_BY_ROW, d_y[b, queries], value[b, keys])
            return total + weights * (d_weights - row_stats[b, 1, queries][:, None])

        return jax.lax.fori_loop(bounds[b, 0], bounds[b, 1], add, total)

    zeros = jnp.zeros((sizes.block, sizes.key_block), jnp.float32)
    d_block[...] = jax.lax.fori_loop(0, rows, add_row, zeros)


def _matmul(axes: Any, x: Array, y: Array) -> Array:
    """A matmul in the dtype of y that adds up in float32."""
    return jax.lax.dot_general(x.astype(y.dtype), y, axes, preferred_element_type=jnp.float32)


def _rows(x: Any, positions: Any, *row: Any) -> list[Array]:
    """Segments, and order if it matters, at these positions: [positions] each."""
    return [x[(*row, number, positions)] for number in range(x.shape[-2])]


def _logits(
    sizes: Sizes,
    query: Array,
    key: Array,
    query_ids: Sequence[Array],
    key_ids: Sequence[Array],
    bias: Any,
    first_query: Any,
    first_key: Any,
    *,
    by_key: bool = False,
) -> Array:
    """The logits of some queries and keys, float32 [queries, keys], or [keys, queries]."""
    queries, keys = (0, 1) if not by_key else (1, 0)
    left, right = (query, key) if not by_key else (key, query)
    expand = lambda x, axis: jnp.expand_dims(x, 1 - axis)  # noqa: E731
    visible = expand(query_ids[0], queries) == expand(key_ids[0], keys)
    if len(query_ids) > 1:
        visible &= expand(query_ids[1], queries) >= expand(key_ids[1], keys)
    added = jnp.where(visible, 0.0, INVISIBLE)
    place = functools.partial(jax.lax.broadcasted_iota, jnp.int32, added.shape)
    if bias is not None:
        # The padded row starts with the offset of the first key from the last query.
        zero = first_key - first_query + sizes.blocks * sizes.block - 1
        added = bias[zero + place(keys) - place(queries)] + added
    logits = _matmul(_ROW_BY_ROW, left, right) + added
    if sizes.keys % sizes.key_block == 0:
        return logits
    return jnp.where(first_key + place(keys) < sizes.keys, logits, ABSENT)
