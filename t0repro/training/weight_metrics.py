"""T5X's metrics of parameters, gradients and updates (t5x.trainer.WeightMetricsComputer)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from t0repro.model.towers import Towers, by_layer, stacks_in
from t0repro.parameters.naming import LAYERS
from t0repro.training.metric_classes import AverageOfMeasured, Metric
from t0repro.training.train_state import TrainState


class WeightMetricsComputer:
    """Measures every parameter: `weight_rms/<path>`, `weight_gradient_rms/...`, and so on.

    Over the whole model there are `weight_gradient_norm`, `weight_rms_all` and
    `weight_update_rms_all`. Means are over the steps that were measured.

    Args:
      every: steps between measurements. Each reads all parameters, gradients and updates once more.
    """

    def __init__(self, every: int = 1):
        self._every = every

    def compute_metrics(
        self, gradients: Any, old_train_state: TrainState, new_train_state: TrainState
    ) -> dict[str, Metric]:
        """Metrics by name, float32 scalars on the device.

        Args:
          gradients: gradients of all parameters.
          old_train_state: the state before the update.
          new_train_state: the state after it, whose parameters are measured.
        """
        before, after = old_train_state.params, new_train_state.params
        if self._every == 1:
            values, count = weight_metrics(gradients, before, after), jnp.float32(1.0)
        else:
            measures = new_train_state.step % self._every == 0
            shapes = jax.eval_shape(weight_metrics, gradients, before, after)
            # `cond` rather than `where`, which would compute both: steps between measurements cost
            # nothing.
            values = jax.lax.cond(
                measures,
                weight_metrics,
                lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
                *(gradients, before, after),
            )
            count = measures.astype(jnp.float32)
        return {name: AverageOfMeasured(value, count) for name, value in values.items()}


def weight_metrics(gradients: Any, before: Any, after: Any) -> dict[str, jax.Array]:
    """Float32 scalars by T5X's names, such as `weight_rms/decoder/decoder_norm/scale`."""
    # The parameters' actual change, after float32 rounding.
    updates = jax.tree.map(jnp.subtract, after, before)
    towers = stacks_in(after)
    return {
        **_by_parameter("weight_rms", after, _rms, towers),
        **_by_parameter("weight_gradient_rms", gradients, _rms, towers),
        **_by_parameter("weight_update_rms", updates, _rms, towers),
        # Infinite or NaN where a weight was zero, as in T5X.
        **_by_parameter(
            "weight_update_divided_by_weight_rms",
            jax.tree.map(jnp.divide, updates, before),
            _rms,
            towers,
        ),
        **_by_parameter("weight_max", after, lambda x: jnp.max(jnp.abs(x)), towers),
        "weight_gradient_norm": jnp.sqrt(_sum_of_squares(gradients)),
        "weight_rms_all": jnp.sqrt(_sum_of_squares(after) / _size(after)),
        "weight_update_rms_all": jnp.sqrt(_sum_of_squares(updates) / _size(after)),
    }


def _by_parameter(name: str, tree: Any, measure: Callable, towers: Towers) -> dict[str, jax.Array]:
    """A measure of every parameter; of each layer separately if layers are stacked."""

    def measured(path: Any, value: jax.Array) -> jax.Array:
        return (jax.vmap(measure) if DictKey(LAYERS) in path else measure)(value)

    values = by_layer(jax.tree_util.tree_map_with_path(measured, tree), towers)
    flat: Any = flax.traverse_util.flatten_dict(values, sep="/")
    return {f"{name}/{path}": value for path, value in flat.items()}


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _sum_of_squares(tree: Any) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.vdot(x, x) for x in jax.tree.leaves(tree)]))


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
