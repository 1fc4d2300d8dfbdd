"""The bytes that a backward pass keeps of its forward pass, from a trace.

Counted by tracing; nothing is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Var

# Other views of the same values, for which a compiler allocates no array.
_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def residual_bytes(loss: Callable[[Any, Any], Any], parameters: Any, inputs: Any) -> int:
    """Bytes of a loss's residuals that depend on `inputs`, which change at each step.

    Residuals that depend only on the parameters do not count, because the program holds parameters
    anyway; nor do those offloaded to host memory.

    Args:
      loss: Maps parameters and `inputs` to a scalar loss and auxiliary values.
      parameters: Their shapes; the loss is differentiated by them.
      inputs: Shapes of the inputs that change at each step: the batch and the dropout key.
    """

    def residuals(inputs: Any, parameters: Any) -> list[jax.Array]:
        backward = jax.vjp(lambda p: loss(p, inputs), parameters, has_aux=True)[1]
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(inputs, parameters).jaxpr
    count = len(jax.tree.leaves(inputs))
    dependent = _dependent(jaxpr, [index < count for index in range(len(jaxpr.invars))])
    made_by = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}

    def is_view(variable: Any) -> Any:
        """The array that a view shows, so that two views of it count once."""
        while variable in made_by and made_by[variable].primitive.name in _VIEWS:
            variable = made_by[variable].invars[0]
        return variable

    kept = {is_view(x) for x in jaxpr.outvars if isinstance(x, Var) and x in dependent}
    # The batch itself is an argument of the program; `recompute = 'offload'` saves to host memory.
    arrays = [x.aval for x in kept.difference(jaxpr.invars)]
    arrays = [x for x in arrays if x.memory_space != jax.memory.Space.Host]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def bytes_per_device(tree: Any) -> int:
    """Bytes of a device's shards of all arrays of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _dependent(jaxpr: Any, given: Sequence[bool]) -> set[Var]:
    """The variables of a jaxpr that depend on the given inputs."""
    found = {variable for variable, known in zip(jaxpr.invars, given, strict=True) if known}
    for equation in jaxpr.eqns:
        inputs = [isinstance(x, Var) and x in found for x in equation.invars]
        outputs = _outputs(equation, inputs)
        found.update(x for x, known in zip(equation.outvars, outputs, strict=True) if known)
    return found


def _outputs(equation: Any, inputs: list[bool]) -> list[bool]:
    """Which outputs of an equation depend on its marked inputs.

    Looks into loops and calls, because a scan over layers returns kernels as well as activations.
    """
    inner = [
        getattr(value, "jaxpr", value)
        for value in equation.params.values()
        if hasattr(getattr(value, "jaxpr", value), "eqns")
    ]
    if not any(inputs) or len(inner) != 1 or len(inner[0].invars) != len(inputs):
        return [any(inputs)] * len(equation.outvars)
    (body,) = inner
    outputs = _results(body, inputs)
    if equation.primitive.name == "scan":
        # A scan takes constants, carried values and slices of arrays, and returns carried values
        # and slices. Outside of its body a slice has one more axis; jax names the counts
        # differently from 0.11 on.
        carried = _count_whole(equation.outvars, body.outvars)
        stop = _count_whole(equation.invars, body.invars)
        start = stop - carried
        # Carried values may make more of the next iteration depend on the batch.
        while any(new := [b and not a for a, b in zip(inputs[start:stop], outputs, strict=False)]):
            merged = [a or b for a, b in zip(inputs[start:stop], new, strict=True)]
            inputs = [*inputs[:start], *merged, *inputs[stop:]]
            outputs = _results(body, inputs)
    return outputs


def _count_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many values a scan's body has as they are outside of it, and not in slices."""
    return sum(x.aval.ndim == y.aval.ndim for x, y in zip(outside, inside, strict=True))


def _results(jaxpr: Any, given: Sequence[bool]) -> list[bool]:
    dependent = _dependent(jaxpr, given)
    return [isinstance(x, Var) and x in dependent for x in jaxpr.outvars]
