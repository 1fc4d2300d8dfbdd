"""T5X's partitioner as a Layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from t0repro.config.run_config import Layout
from t0repro.config.t5x.records import AxisRules, PjitPartitioner
from t0repro.errors import UserError

# T5X's rules that divide what is divided here too: (logical axis, axis of the mesh). The rule
# ("embed", "data"), of parameters, is full sharding.
_KNOWN = {
    ("batch", "data"),
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("joined_kv", "model"),
}
_FULLY_SHARDED = ("embed", "data")


def layout_of(partitioner: PjitPartitioner, where: str | None = None) -> Layout:
    """The layout of a PjitPartitioner; its data follows the number of devices.

    Args:
      partitioner: the record of T5X's class.
      where: where it was configured, for messages.

    Raises:
      UserError: for sizes that contradict each other, and for rules that divide other axes.
    """
    ici, dcn = partitioner.ici_mesh_shape or {}, partitioner.dcn_mesh_shape or {}
    submesh = partitioner.model_parallel_submesh
    given = {
        "num_partitions": partitioner.num_partitions,
        "model_parallel_submesh": submesh and math.prod(submesh),
        "ici_mesh_shape": _along("model", ici, dcn) if ici or dcn else None,
    }
    sizes = {name: size for name, size in given.items() if size is not None}
    if len(sizes) > 1:
        raise UserError(
            f"PjitPartitioner has {' and '.join(sizes)}, of which each says how many devices share"
            " a model.",
            where=where,
            fix="Keep one of them.",
        )
    return Layout(
        data=_along("data", ici, dcn) * _along("replica", ici, dcn) if ici or dcn else None,
        model=next(iter(sizes.values()), 1),
        fully_sharded=_fully_sharded(partitioner.logical_axis_rules, where),
    )


def _along(axis: str, *meshes: Mapping[str, int]) -> int:
    """Devices along an axis, within slices and across them."""
    return math.prod(mesh.get(axis, 1) for mesh in meshes)


def _fully_sharded(rules: Any, where: str | None) -> bool:
    """Whether the rules divide parameters along the data axis."""
    if rules is None:
        return False
    whole, pairs = False, rules
    if isinstance(rules, AxisRules):
        # Two dimensions mean that parameters are divided along data as well.
        whole, pairs = rules.parameter_partitioning_dims == 2, rules.additional_rules or ()
        if rules.activation_partitioning_dims != 1:
            raise UserError(
                f"activation_partitioning_dims is {rules.activation_partitioning_dims}; activations"
                " are divided by rows and by heads, d_ff or vocabulary, and along no other axis.",
                where=where,
                fix="Remove it: it changes memory and speed, not results.",
            )
    return whole or _FULLY_SHARDED in set(_checked(pairs, where))


def _checked(
    pairs: Iterable[tuple[str, str | None]], where: str | None
) -> Iterable[tuple[str, str]]:
    """Rules that divide something, after checking that it is divided so here."""
    for axis, along in pairs:
        if along is None:
            continue
        if (axis, along) not in _KNOWN | {_FULLY_SHARDED}:
            raise UserError(
                f"The rule ({axis!r}, {along!r}) divides what is not divided here.",
                where=where,
                fix="Remove it: it changes memory and speed, not results.",
            )
        yield axis, along
