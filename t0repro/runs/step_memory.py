"""What a train step holds of gradients and activations on one device, counted on shapes.

A compiler tells one figure for everything that a program needs beside its arguments. The account
here says what of it is due to the model, so that one sees what to cut. It is made by tracing;
nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from t0repro.config.run_config import ModelConfig, RunConfig
from t0repro.model.t5 import T5, parameter_shapes
from t0repro.partitioning.devices import Partitioning
from t0repro.training.models import T5Model

# The same values in another shape, for which a compiler makes no other array.
_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


@dataclasses.dataclass(frozen=True)
class Account:
    """Bytes on a device, by shapes.

    Attributes:
      gradients: of the gradients when the last microbatch is done, one float32 array for each
        parameter, divided like it.
      activations: of what the forward pass of one microbatch keeps for its backward pass.
    """

    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes of both, if they are held at the same time."""
        return self.gradients + self.activations

    def divided(self, temporaries: int) -> dict[str, int]:
        """What a compiler's figure consists of: gradients, activations and the rest, temporaries.

        The figure is of the moment when most is held, where the account may exceed it: with one
        microbatch, gradients take the place of activations that are not needed any more, and an
        update may consume each as it comes; and a compiler may compute again what is cheap instead
        of keeping it, or keep it in the chip's own memory, as libtpu does in small models. So each
        byte counts once, first for the gradients, with which every backward pass ends, then for
        activations.

        Args:
          temporaries: bytes that the compiler says are needed beside the arguments.
        """
        gradients = min(self.gradients, temporaries)
        activations = min(self.activations, temporaries - gradients)
        rest = temporaries - gradients - activations
        return {"gradients": gradients, "activations": activations, "temporaries": rest}


def account(
    config: RunConfig,
    partitioning: Partitioning,
    features: Mapping[str, tuple[int, int]],
) -> Account:
    """Counts the gradients and activations of a device.

    Args:
      config: a training.
      partitioning: its devices.
      features: the shapes [rows, length] of the features of a whole batch.
    """
    parameters = parameter_shapes(T5(config.model, config.dtypes))
    gradients = bytes_per_device(partitioning.divided(parameters))  # float32, like the parameters
    return Account(gradients, kept_activations(config, partitioning, features))


def bytes_per_device(tree: Any) -> int:
    """Bytes of a device's part of all arrays of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def kept_activations(
    config: RunConfig, partitioning: Partitioning, features: Mapping[str, tuple[int, int]]
) -> int:
    """Bytes of one device's residuals of a microbatch's loss that depend on the batch.

    Traced for one device's rows and its share of the model, outside of any mesh. Thus what the
    model decides by the size of a device's arrays (attention in blocks, logits in parts) is as in
    the step, whose arrays are larger by as much as the mesh divides them.
    """
    model = T5(_share(config.model, partitioning.model), config.dtypes)
    parts = config.num_microbatches * partitioning.data
    batch = {
        name: jax.ShapeDtypeStruct((-(-rows // parts), length), jnp.int32)
        for name, (rows, length) in features.items()
    }
    # Dropout's masks are as large as the batch and belong to it, though only the key decides them.
    drawn = (batch, jax.eval_shape(lambda: jax.random.key(0)))

    def residuals(drawn: Any, parameters: Any) -> list[jax.Array]:
        batch, loss = T5Model(model, measured=False).whole_batch(drawn[0])
        backward = jax.vjp(lambda p: loss(p, batch, drawn[1]), parameters, has_aux=True)[1]
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(drawn, parameter_shapes(model)).jaxpr
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


def _share(model: ModelConfig, parts: int) -> ModelConfig:
    """The model of which a device computes the heads, the d_ff and the vocabulary that it holds.

    Each divides, or the devices would not have been arranged so (`devices.check_divides`).
    """
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // parts,
        d_ff=model.d_ff // parts,
        vocab_size=model.vocab_size // parts,
    )


def _on_host(array: Any) -> bool:
    """Whether an array is offloaded to the host's memory (`recompute = 'offload'`)."""
    return array.memory_space == jax.memory.Space.Host


# ---- What depends on the batch ------------------------------------------------------------------


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
