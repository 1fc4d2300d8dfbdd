"""The floating-point operations of a traced function, counted on its matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def count_flops(jaxpr: Any) -> int:
    """Operations of all matrix products of a jaxpr, two for each multiply-add.

    Loops of known length count as often as they run, a loop until a condition once. What is
    recomputed in the backward pass counts again. Everything but matrix products is left out; in a
    T5 that is a few percent.

    Args:
      jaxpr: of the whole computation, on all devices together.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
        else:
            # A scan's body is one jaxpr that runs `length` times.
            times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
            total += times * sum(count_flops(inner) for inner in _inner(equation.params))
    return total


def _dot(equation: Any) -> int:
    """Twice the size of the result, times that of the axes summed over."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    )


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation calls; of the branches of a condition, all."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            # Some primitives hold a jaxpr, others a closed one around it.
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
