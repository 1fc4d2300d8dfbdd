"""The bytes that a backward pass keeps of its forward pass, from a trace.

Counted by tracing; nothing is compiled.
"""

from __future__ import annotations

import dataclasses
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
    arguments = [_Array(x.aval, index < count) for index, x in enumerate(jaxpr.invars)]
    kept = {array for array in _results(jaxpr, arguments) if array.depends}
    # The batch itself is an argument of the program; `recompute = 'offload'` saves to host memory.
    arrays = [array.aval for array in kept.difference(arguments)]
    arrays = [x for x in arrays if x.memory_space != jax.memory.Space.Host]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def bytes_per_device(tree: Any) -> int:
    """Bytes of a device's shards of all arrays of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Array:
    """An array that a jaxpr reads or makes, and whether it depends on the marked inputs."""

    aval: Any
    depends: bool


def _results(jaxpr: Any, arguments: Sequence[_Array]) -> list[_Array]:
    """The arrays that a jaxpr returns: of a view the array that it shows, also out of a call.

    Layers that share a trace are calls of one body, which jax inlines before 0.11.
    """
    arrays = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(variables: Sequence[Any]) -> list[_Array]:
        return [
            arrays[x] if isinstance(x, Var) and x in arrays else _Array(x.aval, False)
            for x in variables
        ]

    for equation in jaxpr.eqns:
        inputs = read(equation.invars)
        if equation.primitive.name in _VIEWS:
            made = inputs[:1]
        elif equation.primitive.name == "jit":
            made = _results(equation.params["jaxpr"].jaxpr, inputs)
        else:
            depends = _outputs(equation, [array.depends for array in inputs])
            made = [_Array(x.aval, is_) for x, is_ in zip(equation.outvars, depends, strict=True)]
        arrays.update(zip(equation.outvars, made, strict=True))
    return read(jaxpr.outvars)


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
    outputs = _dependence(body, inputs)
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
            outputs = _dependence(body, inputs)
    return outputs


def _count_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many values a scan's body has as they are outside of it, and not in slices."""
    return sum(x.aval.ndim == y.aval.ndim for x, y in zip(outside, inside, strict=True))


def _dependence(jaxpr: Any, given: Sequence[bool]) -> list[bool]:
    arguments = [_Array(x.aval, known) for x, known in zip(jaxpr.invars, given, strict=True)]
    return [array.depends for array in _results(jaxpr, arguments)]
