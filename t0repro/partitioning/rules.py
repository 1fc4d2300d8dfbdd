"""The one table that maps array axes to mesh axes.

The device mesh has two axes, `data` and `model`. Each axis of an array has a logical name, and the
table gives the mesh axis along which it is sharded:

    logical axis   of                                             sharded along
    batch          activations                                    data
    heads          attention kernels, queries, keys and values    model
    mlp            the feed-forward layer                         model
    vocab          the embedding, the logits                      model
    embed          parameters and slots, if fully sharded         data

Everything else is replicated on every device: norms, lengths, buckets of the position bias. XLA
derives the communication from this (GSPMD, https://arxiv.org/abs/2105.04663).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from t0repro.parameters import naming

DATA, MODEL = "data", "model"
RULES = {"batch": DATA, "heads": MODEL, "mlp": MODEL, "vocab": MODEL}
FULLY_SHARDED = {**RULES, "embed": DATA}

# The logical axis of each size in the table of parameters (t0repro.parameters.naming).
_LOGICAL = {
    "d_model": "embed",
    "d_ff": "mlp",
    "joined_kv": "heads",
    "num_heads": "heads",
    "vocab_size": "vocab",
    "relative_attention_num_buckets": "buckets",
}


def parameter_axes(path: str) -> tuple[str, ...]:
    """The logical axes of the parameter at a path of T5X's tree; () if there is none."""
    found = naming.find_row(path, "t5x") or naming.find_row(path, "t5x", decoder_only=True)
    return tuple(_LOGICAL[size] for size in found[0].axes) if found else ()


def parameter_spec(path: str, *, fully_sharded: bool) -> PartitionSpec:
    """The sharding of the parameter at a path; vectors are replicated."""
    axes = parameter_axes(path)
    rules = FULLY_SHARDED if fully_sharded else RULES
    return PartitionSpec(*map(rules.get, axes)) if len(axes) > 1 else PartitionSpec()


def slot_spec(spec: PartitionSpec, slot: str, shape: Sequence[int]) -> PartitionSpec:
    """The sharding of an optimizer slot: its parameter's, without the axis it averages over.

    Args:
      spec: the parameter's sharding.
      slot: the slot's name, as in t0repro.parameters.naming.SLOT_NAMES.
      shape: the parameter's shape.
    """
    if slot not in ("v_row", "v_col"):
        return spec
    dropped = naming.t5x_dropped_axes(shape)[slot]
    return PartitionSpec(*(name for axis, name in enumerate(spec) if axis != dropped))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shards an array of a jitted computation by the table, across the device mesh in scope.

    Without a device mesh (`jax.set_mesh`), as on one device, it returns the array itself. An axis
    that does not divide evenly is not sharded.

    Args:
      x: an activation; or a parameter, which this gathers in a fully sharded run.
      axes: the logical name of each axis of x, or None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    rules = _rules_in_scope()
    names = [rules.get(axis) if axis else None for axis in axes]
    divided = [
        name if name and size % mesh.shape[name] == 0 else None
        for name, size in zip(names, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*divided))


def activation_spec(*axes: str) -> PartitionSpec:
    """The sharding of an activation with these axes, all of which divide evenly."""
    return PartitionSpec(*map(_rules_in_scope().get, axes))


def sum_over_shards(x: jax.Array, axis: str) -> jax.Array:
    """The sum of x over the shards of a logical axis, in a `shard_map`; elsewhere x itself."""
    mesh, name = jax.sharding.get_abstract_mesh(), _rules_in_scope().get(axis)
    return jax.lax.psum(x, name) if name in mesh.manual_axes else x


def parts_of(*axes: str) -> int:
    """Number of shards of an activation with these axes on the device mesh in scope."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _rules_in_scope()
    return math.prod(mesh.shape[name] for axis in axes if (name := rules.get(axis)) in mesh.shape)


def _rules_in_scope() -> dict[str, str]:
    """The table; code traced in `sums_over_groups` sees only one group's rows."""
    # Inside `sums_over_groups`, the mesh axis `data` already shards the groups.
    return {axis: name for axis, name in RULES.items() if axis != "batch" or _groups() == 1}


# ---- Each part of a batch by itself -------------------------------------------------------------

_GROUP = "group"


def sums_over_groups(
    function: Callable[..., Any], params: Any, batches: Any, groups: int, specs: Any
) -> Any:
    """Sums a function over parts of a batch, with a single all-reduce across devices at the end.

    XLA would all-reduce gradients at the end of every microbatch. Here each group of devices along
    `data` temporarily has its own parameters: the same values with one more axis, sharded along
    `data`, which costs no memory and no communication. So nothing is summed across the groups until
    the function has processed all of its microbatches.

    Args:
      function: (params, batches of one group) -> a tree of sums.
      params: the parameters.
      batches: arrays [microbatches, rows, ...], sharded by rows.
      groups: the size of the mesh axis `data`.
      specs: each parameter's sharding.
    """

    def own(p: jax.Array, spec: PartitionSpec) -> jax.Array:
        copies = jnp.broadcast_to(p, (groups, *p.shape))
        return jax.lax.with_sharding_constraint(copies, PartitionSpec(DATA, *spec))

    def by_group(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        return jax.lax.with_sharding_constraint(x, PartitionSpec(None, DATA))

    # Tells constraints inside the function that the new axis is the mesh axis `data`.
    mapped = jax.vmap(function, in_axes=(0, 1), axis_name=_GROUP, spmd_axis_name=DATA)
    sums = mapped(jax.tree.map(own, params, specs), jax.tree.map(by_group, batches))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def for_all_groups(
    draw: Callable[[tuple[int, ...]], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """Random values of a shape [rows, ...], equal whether or not the rows are in groups.

    Args:
      draw: samples values of a shape.
      shape: the requested shape, that of one group's rows in `sums_over_groups`.
    """
    groups = _groups()
    if groups == 1:
        return draw(shape)
    # Sample for all rows and take this group's, so that grouping does not change the mask.
    whole = draw((groups * shape[0], *shape[1:])).reshape(groups, *shape)
    return _of_group(whole, jax.lax.axis_index(_GROUP))


@custom_vmap
def _of_group(whole: jax.Array, group: jax.Array) -> jax.Array:
    return whole[group]


@_of_group.def_vmap
def _of_all_groups(size: int, batched: Any, whole: jax.Array, group: jax.Array) -> Any:
    """All groups' parts together are the whole array; without this rule it would be a gather."""
    del size, batched, group
    return whole, True


def _groups() -> int:
    """Number of groups if traced inside `sums_over_groups`, else 1."""
    try:
        # JAX raises a NameError for an axis that no vmap around this code has.
        return jax.lax.axis_size(_GROUP)
    except NameError:
        return 1
