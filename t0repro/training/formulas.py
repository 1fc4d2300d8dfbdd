"""What an optimizer's formula is given and returns, and the formulas of Adam, momentum and descent.

Source: mesh_tensorflow/optimize.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from t0repro.config.optimizer import AdamWeightDecayConfig, MomentumConfig, SgdConfig


@flax.struct.dataclass
class Slots:
    """One parameter's optimizer state, float32; unused slots are None.

    Attributes:
      v_row: Adafactor's factored second moment without the longest axis.
      v_col: Adafactor's factored second moment without the second longest axis.
      v: Adafactor's second moment of a parameter that is not factored, of its shape.
      m: Adafactor's momentum, of the parameter's shape, when beta1 is not zero.
      adam_m: Adam's first moment, of the parameter's shape.
      adam_v: Adam's second moment, of the parameter's shape.
      momentum_v: the velocity of gradient descent with momentum, of the parameter's shape.
    """

    # To jax, None is an empty subtree: unused slots take no memory and are not updated.
    v_row: jax.Array | None = None
    v_col: jax.Array | None = None
    v: jax.Array | None = None
    m: jax.Array | None = None
    adam_m: jax.Array | None = None
    adam_v: jax.Array | None = None
    momentum_v: jax.Array | None = None


class Gradient(NamedTuple):
    """The inputs of one parameter's update.

    Attributes:
      value: the gradient, float32.
      parameter: the parameter before the update.
      slots: its slots before the update.
      path: its path in T5X's tree; options name exceptions by this path.
      step: the global step before the update.
      learning_rate: learning rate of this update.
    """

    value: jax.Array
    parameter: jax.Array
    slots: Slots
    path: str
    step: jax.Array
    learning_rate: jax.Array


def _adam(gradient: Gradient, config: AdamWeightDecayConfig) -> tuple[jax.Array, Slots]:
    """Adam without bias correction: its moments start at zero."""
    slots, value = gradient.slots, gradient.value
    assert slots.adam_m is not None and slots.adam_v is not None
    m = config.beta_1 * slots.adam_m + (1.0 - config.beta_1) * value
    v = config.beta_2 * slots.adam_v + (1.0 - config.beta_2) * jnp.square(value)
    change = m / (jnp.sqrt(v) + config.epsilon)
    # After the division by the moments, so that the decay does not depend on them.
    if config.weight_decay_rate and gradient.path not in config.exclude_from_weight_decay:
        change = change + config.weight_decay_rate * gradient.parameter
    return -(gradient.learning_rate * change), Slots(adam_m=m, adam_v=v)


def _momentum(gradient: Gradient, config: MomentumConfig) -> tuple[jax.Array, Slots]:
    """Momentum, subtracting the velocity from before this step's gradient."""
    before = gradient.slots.momentum_v
    assert before is not None
    velocity = gradient.value * gradient.learning_rate + before * config.momentum
    # Mesh TensorFlow assigns the new velocity and subtracts the variable's value, in its graph the
    # old one. On CPU the two are not ordered, so by chance a parameter moves by either.
    return -before, Slots(momentum_v=velocity)


def _descent(gradient: Gradient, config: SgdConfig) -> tuple[jax.Array, Slots]:
    del config
    return -(gradient.value * gradient.learning_rate), Slots()


# Each returns the change to add to the parameter, and its new slots.
FORMULAS: Mapping[type, Callable[[Gradient, Any], tuple[jax.Array, Slots]]] = {
    AdamWeightDecayConfig: _adam,
    MomentumConfig: _momentum,
    SgdConfig: _descent,
}
