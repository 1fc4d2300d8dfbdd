"""T5X's metrics of parameters, gradients and updates (t5x.trainer.WeightMetricsComputer)."""

from __future__ import annotations

from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp


def weight_metrics(gradients: Any, before: Any, after: Any) -> dict[str, jax.Array]:
    """Float32 scalars by T5X's names, such as `weight_rms/decoder/decoder_norm/scale`.

    Args:
      gradients: gradients of all parameters.
      before: parameters before the update.
      after: parameters after it, whose size is measured.
    """
    updates = jax.tree.map(jnp.subtract, after, before)
    squares = [jnp.vdot(gradient, gradient) for gradient in jax.tree.leaves(gradients)]
    return {
        **_by_parameter("weight_rms", after, _rms),
        **_by_parameter("weight_gradient_rms", gradients, _rms),
        **_by_parameter("weight_update_rms", updates, _rms),
        **_by_parameter("weight_max", after, lambda x: jnp.max(jnp.abs(x))),
        "weight_gradient_norm": jnp.sqrt(jnp.sum(jnp.stack(squares))),
    }


def _by_parameter(name: str, tree: Any, measure: Any) -> dict[str, jax.Array]:
    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    return {f"{name}/{path}": measure(value) for path, value in flat.items()}


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))
