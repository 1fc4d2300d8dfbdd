"""Mesh TensorFlow's optimizers: Adafactor, Adam with weight decay, momentum and plain descent.

Source: mesh_tensorflow/optimize.py. Adafactor has a module of its own (t0repro.training.adafactor);
the others are here. All of them update float32 parameters from float32 gradients, and leave the
parameters that a configuration calls frozen as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from t0repro.config.run_config import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    MomentumConfig,
    OptimizerConfig,
)
from t0repro.training import adafactor
from t0repro.training.slots import Slots

# From parameter, slots, gradient and the parameter's path to the new parameter and slots.
Update = Callable[[jax.Array, Slots, jax.Array, str], tuple[jax.Array, Slots]]


def slot_shapes(
    shape: tuple[int, ...], config: OptimizerConfig, path: str = ""
) -> dict[str, tuple[int, ...]]:
    """The shape of each slot that a parameter of this shape, at this path, has."""
    if path in config.frozen:
        return {}
    if isinstance(config, AdafactorConfig):
        return adafactor.slot_shapes(shape, config)
    if isinstance(config, AdamWeightDecayConfig):
        return {"adam_m": shape, "adam_v": shape}
    return {"momentum_v": shape} if isinstance(config, MomentumConfig) else {}


def initial_slots(parameters: Any, config: OptimizerConfig) -> Any:
    """Zero slots for each parameter: the tree of parameters with a Slots in place of each array."""

    def zeros(path: str, parameter: jax.Array) -> Slots:
        shapes = slot_shapes(parameter.shape, config, path)
        return Slots(**{name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()})

    flat = _flatten(parameters)
    slots = {path: zeros(path, parameter) for path, parameter in flat.items()}
    return flax.traverse_util.unflatten_dict(slots, sep="/")


def apply_gradients(
    parameters: Any,
    slots: Any,
    gradients: Any,
    *,
    step: jax.Array,
    learning_rate: jax.Array,
    config: OptimizerConfig,
) -> tuple[Any, Any]:
    """New parameters and new slots after one update.

    Args:
      parameters: a tree of float32 arrays.
      slots: the same tree with Slots for leaves.
      gradients: the same tree of float32 arrays.
      step: the global step before the update.
      learning_rate: of this update.
      config: the optimizer's options.
    """
    update = _update(config, step, learning_rate)
    flat, flat_gradients, flat_slots = map(_flatten, (parameters, gradients, slots))
    pairs = {
        path: (parameter, flat_slots[path])
        if path in config.frozen
        else update(parameter, flat_slots[path], flat_gradients[path].astype(jnp.float32), path)
        for path, parameter in flat.items()
    }
    new_parameters = {path: parameter for path, (parameter, _) in pairs.items()}
    new_slots = {path: slot for path, (_, slot) in pairs.items()}
    return (
        flax.traverse_util.unflatten_dict(new_parameters, sep="/"),
        flax.traverse_util.unflatten_dict(new_slots, sep="/"),
    )


def _flatten(tree: Any) -> dict[str, Any]:
    """A nested dictionary's arrays, or Slots, by their paths."""
    flat: Any = flax.traverse_util.flatten_dict(
        tree, is_leaf=lambda _, value: isinstance(value, Slots), sep="/"
    )
    return flat


def _update(config: OptimizerConfig, step: jax.Array, learning_rate: jax.Array) -> Update:
    """The update of one parameter, with all that is the same for every parameter."""
    if isinstance(config, AdafactorConfig):
        return adafactor.make_update(config, step, learning_rate)
    if isinstance(config, AdamWeightDecayConfig):
        return _adam_update(config, learning_rate)
    if isinstance(config, MomentumConfig):
        return _momentum_update(config, learning_rate)
    return lambda parameter, slots, gradient, path: (parameter - gradient * learning_rate, slots)


def _adam_update(config: AdamWeightDecayConfig, learning_rate: jax.Array) -> Update:
    """Adam; its moments begin at zero and are not corrected for that."""

    def update(
        parameter: jax.Array, slots: Slots, gradient: jax.Array, path: str
    ) -> tuple[jax.Array, Slots]:
        assert slots.adam_m is not None and slots.adam_v is not None
        m = config.beta_1 * slots.adam_m + (1.0 - config.beta_1) * gradient
        v = config.beta_2 * slots.adam_v + (1.0 - config.beta_2) * jnp.square(gradient)
        change = m / (jnp.sqrt(v) + config.epsilon)
        if config.weight_decay_rate and path not in config.exclude_from_weight_decay:
            change = change + config.weight_decay_rate * parameter
        return parameter - learning_rate * change, Slots(adam_m=m, adam_v=v)

    return update


def _momentum_update(config: MomentumConfig, learning_rate: jax.Array) -> Update:
    """Momentum: the velocity that is subtracted is the one before this step's gradient.

    Mesh TensorFlow assigns the new velocity and subtracts the variable's value, which is the one
    before. On a CPU it does not order the two: each parameter moves, by chance, by either.
    """

    def update(
        parameter: jax.Array, slots: Slots, gradient: jax.Array, path: str
    ) -> tuple[jax.Array, Slots]:
        assert slots.momentum_v is not None
        velocity = gradient * learning_rate + slots.momentum_v * config.momentum
        return parameter - slots.momentum_v, Slots(momentum_v=velocity)

    return update
