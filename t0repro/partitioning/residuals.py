"""Bytes that a backward pass keeps of its forward pass, counted by tracing; nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Var

# Other shapes of the same values, for which a compiler allocates no array.
_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def residual_bytes(loss: Callable[[Any, Any], Any], parameters: Any, drawn: Any) -> int:
    """Bytes of the residuals of a loss that depend on `drawn`.

    Residuals that depend on the parameters alone do not count, because the program holds
    parameters anyway; nor does what is offloaded to the host's memory.

    Args:
      loss: Maps parameters and `drawn` to a scalar loss and auxiliary values.
      parameters: Their shapes; the loss is differentiated by them.
      drawn: Shapes of what changes from step to step: the batch and the dropout key.
    """

    def residuals(drawn: Any, parameters: Any) -> list[jax.Array]:
        backward = jax.vjp(lambda p: loss(p, drawn), parameters, has_aux=True)[1]
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(drawn, parameters).jaxpr
    count = len(jax.tree.leaves(drawn))
    dependent = _dependent(jaxpr, [index < count for index in range(len(jaxpr.invars))])
    made_by = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}

    def viewed(variable: Any) -> Any:
        """The array that one is a view of, so that two views of it count once."""
        while variable in made_by and made_by[variable].primitive.name in _VIEWS:
            variable = made_by[variable].invars[0]
        return variable

    kept = {viewed(x) for x in jaxpr.outvars if isinstance(x, Var) and x in dependent}
    # The batch itself is an argument of the program.
    arrays = [x.aval for x in kept.difference(jaxpr.invars) if not _on_host(x.aval)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def bytes_per_device(tree: Any) -> int:
    """Bytes of a device's shards of all arrays of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _on_host(array: Any) -> bool:
    """Whether an array is offloaded to the host's memory (`recompute = 'offload'`)."""
    return array.memory_space == jax.memory.Space.Host


def _dependent(jaxpr: Any, given: Sequence[bool]) -> set[Var]:
    """The variables of a jaxpr that depend on the inputs that are given."""
    found = {variable for variable, known in zip(jaxpr.invars, given, strict=True) if known}
    for equation in jaxpr.eqns:
        inputs = [isinstance(x, Var) and x in found for x in equation.invars]
        outputs = _outputs(equation, inputs)
        found.update(x for x, known in zip(equation.outvars, outputs, strict=True) if known)
    return found


def _outputs(equation: Any, inputs: list[bool]) -> list[bool]:
    """Which outputs of an equation depend on its inputs that do.

    Looks into loops and calls, because a loop over layers returns kernels beside activations.
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
        start = equation.params["num_consts"]
        # What a turn of the loop hands to the next may make more of that turn depend on the batch.
        stop = start + equation.params["num_carry"]
        while any(new := [b and not a for a, b in zip(inputs[start:stop], outputs, strict=False)]):
            merged = [a or b for a, b in zip(inputs[start:stop], new, strict=True)]
            inputs = [*inputs[:start], *merged, *inputs[stop:]]
            outputs = _results(body, inputs)
    return outputs


def _results(jaxpr: Any, given: Sequence[bool]) -> list[bool]:
    dependent = _dependent(jaxpr, given)
    return [isinstance(x, Var) and x in dependent for x in jaxpr.outvars]
