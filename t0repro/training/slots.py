"""What an optimizer keeps for one parameter, and what it is given to update it."""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax


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
    """What one parameter's update is computed from.

    Attributes:
      value: the gradient, float32.
      parameter: the parameter before the update.
      slots: its slots before the update.
      path: its path in T5X's tree; options list exceptions by it.
      step: the global step before the update.
      learning_rate: learning rate of this update.
    """

    value: jax.Array
    parameter: jax.Array
    slots: Slots
    path: str
    step: jax.Array
    learning_rate: jax.Array
