"""The layout of T5X's partitioner, and what a run does otherwise than T5X with equal results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config.model import Layout
from t0repro.config.t5x.calls import Call

# T5X's rules for axes that are sharded here too: (logical axis, mesh axis). The rule ("embed",
# "data"), for parameters, means full sharding.
_KNOWN = {
    ("batch", "data"),
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("joined_kv", "model"),
}
_FULLY_SHARDED = ("embed", "data")
_MESH_AXES = ("data", "model", "replica")
_NOT_DONE = "not done here; it would change memory and speed, not results"


def read_layout(partitioner: Call) -> Layout:
    """The layout of a PjitPartitioner; its data axis follows the number of devices.

    Raises:
      UserError: for sizes or rules that T5X would refuse too, with the place that set them.
    """
    _check(partitioner)
    name = next(iter(_sizes(partitioner)), None)
    ici, dcn = partitioner["ici_mesh_shape"] or {}, partitioner["dcn_mesh_shape"] or {}
    by_shape = name in ("ici_mesh_shape", "dcn_mesh_shape")
    rules = partitioner["logical_axis_rules"]
    return Layout(
        data=_along("data", ici, dcn) * _along("replica", ici, dcn) if by_shape else None,
        model=_sizes(partitioner)[name] if name else 1,
        # Two dimensions mean that parameters are sharded along data as well.
        fully_sharded=(isinstance(rules, Call) and rules["parameter_partitioning_dims"] == 2)
        or _FULLY_SHARDED in _pairs(rules),
    )


def list_differences(program: Call) -> Iterator[str]:
    """A line for each argument that takes effect differently here, with equal results."""
    partitioner = program["partitioner"]
    used, *unused = [*_sizes(partitioner), None]
    for name in unused:
        if name is not None:
            value = partitioner[name]
            what = f" = {value!r} has no effect: {used} wins, as in T5X"
            yield partitioner.note(name, what)
    rules = partitioner["logical_axis_rules"]
    if isinstance(rules, Call) and rules["activation_partitioning_dims"] == 2:
        yield rules.note("activation_partitioning_dims", f" = 2: {_NOT_DONE}")
    call, argument = _place_of_rules(partitioner)
    for rule in _pairs(rules):
        if rule[1] is not None and rule not in _KNOWN | {_FULLY_SHARDED}:
            yield call.note(argument, f": the rule {rule!r}: {_NOT_DONE}")
    if program.arguments.get("use_hardware_rng"):
        what = " = True: JAX's default generator is used, with the same numbers on every device"
        yield program.note("use_hardware_rng", what)


def _sizes(partitioner: Call) -> dict[str, int]:
    """The number of devices that share a model, by argument; the first argument counts.

    T5X reads both mesh shapes or neither, then the submesh, then the number of partitions.
    """
    ici, dcn = partitioner["ici_mesh_shape"], partitioner["dcn_mesh_shape"]
    submesh = partitioner["model_parallel_submesh"]
    along = _along("model", ici or {}, dcn or {})
    shapes = {
        name: along for name, shape in (("ici_mesh_shape", ici), ("dcn_mesh_shape", dcn)) if shape
    }
    sizes = {
        "model_parallel_submesh": math.prod(submesh) if submesh else None,
        "num_partitions": partitioner["num_partitions"],
    }
    others = {name: size for name, size in sizes.items() if size is not None}
    if len(shapes) == 2:
        return {"ici_mesh_shape": along, **others}
    # T5X reads no single mesh shape, so one counts only if nothing else is given.
    return {**others, **shapes}


def _check(partitioner: Call) -> None:
    submesh = partitioner["model_parallel_submesh"]
    # T5X takes a submesh of TPUs by their coordinates, and of other devices by their hosts.
    if submesh and (len(submesh) not in (2, 4) or min(submesh) < 1):
        partitioner.refuse(
            "model_parallel_submesh",
            "a submesh has sizes of at least 1: x, y, z and cores of TPUs, or else hosts and"
            " devices of a host.",
            "Bind four sizes, such as (2, 1, 1, 1), or two, such as (1, 2).",
        )
    for name in ("ici_mesh_shape", "dcn_mesh_shape"):
        shape = partitioner[name] or {}
        if not set(shape) <= set(_MESH_AXES) or min(shape.values(), default=1) < 1:
            partitioner.refuse(
                name,
                f"a mesh has sizes of at least 1 along {', '.join(_MESH_AXES)}.",
                "Bind {'data': 4, 'model': 2}, say.",
            )
    rules = partitioner["logical_axis_rules"]
    if isinstance(rules, Call):
        for name in ("activation_partitioning_dims", "parameter_partitioning_dims"):
            if rules[name] not in (1, 2):
                rules.refuse(name, "it must be 1 or 2.", "Bind 1 or 2.")
    for axis, along in _pairs(rules):
        if along not in (None, *_MESH_AXES):
            call, argument = _place_of_rules(partitioner)
            why = f"a mesh has no axis {along!r}."
            fix = f"Choose one of {', '.join(_MESH_AXES)}, or None."
            call.refuse(argument, why, fix, value=(axis, along))


def _along(axis: str, *meshes: Mapping[str, int]) -> int:
    """Devices along an axis, within slices and across them."""
    return math.prod(mesh.get(axis, 1) for mesh in meshes)


def _pairs(rules: Any) -> list[tuple[str, str | None]]:
    """The rules that a user adds to T5X's own, with one mesh axis each."""
    given = rules["additional_rules"] if isinstance(rules, Call) else rules
    return [
        (axis, part)
        for axis, along in given or ()
        # JAX takes several mesh axes for one axis of an array.
        for part in ([along] if along is None or isinstance(along, str) else along)
    ]


def _place_of_rules(partitioner: Call) -> tuple[Call, str]:
    """The call and the argument that give the rules which a user adds to T5X's own."""
    rules = partitioner["logical_axis_rules"]
    if isinstance(rules, Call):
        return rules, "additional_rules"
    return partitioner, "logical_axis_rules"
