"""A traced program's FLOPs, counted on matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

ATTENDED = "attended"
"""The name of an attention kernel's results, by which rematerialization can save them."""
KERNEL_MATMULS = {"t0repro_attention": 2, "t0repro_attention_gradients": 4}
"""How many matmuls over queries x keys x depth each attention kernel represents."""


def count_flops(jaxpr: Any) -> int:
    """FLOPs of all matmuls in a jaxpr, two for each multiply-add.

    Loops of known length count as often as they run, a loop until a condition once. Matmuls
    rematerialized in the backward pass count again, except inside an attention kernel, which counts
    like whole-matrix attention. Everything else is left out; in a T5 that is a few percent.

    Args:
      jaxpr: of the whole computation, on all devices together.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
        elif matmuls := KERNEL_MATMULS.get(equation.params.get("target_name")):
            total += matmuls * _kernel(equation)
        elif equation.primitive.name == "pallas_call":
            # Its jaxpr has one block's matmuls.
            total += equation.params["cost_estimate"].flops
        else:
            inner = sum(count_flops(inner) for inner in _inner(equation.params))
            total += _times(equation) * inner
    return total


def _times(equation: Any) -> int:
    """How often the jaxpr of an equation runs, on all devices together."""
    if equation.primitive.name == "scan":
        return equation.params["length"]
    if equation.primitive.name == "shard_map":
        # Its jaxpr is what a single device computes.
        mesh = equation.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in equation.params["newly_manual_axes"])
    return 1


def _dot(equation: Any) -> int:
    """Twice the size of the result, times the size of the contracted axes; 0 for a vector's."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, right = (operand.aval.shape for operand in equation.invars)
    if min(len(left), len(right)) == 1:  # a sum, written as a matmul with ones
        return 0
    return (
        2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    )


def _kernel(equation: Any) -> int:
    """FLOPs of one matmul of an attention kernel, whose first arguments are queries and keys."""
    (batch, length, heads, depth), keys = (x.aval.shape for x in equation.invars[:2])
    return 2 * batch * heads * length * keys[1] * depth


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation calls; for a condition, those of all branches."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            # Some primitives hold a jaxpr, others a closed one around it.
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
