"""T5X's metrics of parameters, gradients and updates (t5x.trainer.WeightMetricsComputer)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from t0repro.model.layer_stacks import count_stacked_layers, unstack
from t0repro.parameters.naming import LAYERS
from t0repro.training.metric_classes import (
    AverageOfMeasured,
    AveragePerStep,
    Metric,
)
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

    @staticmethod
    def _make_rms_metrics(name: str, tree: Any) -> dict[str, Metric]:
        """The RMS of each array of a tree, by `name` and its path."""
        return _measure_each(name, tree, lambda x: jnp.sqrt(jnp.mean(jnp.square(x))))

    @staticmethod
    def _make_max_metrics(name: str, tree: Any) -> dict[str, Metric]:
        """The largest size of an entry of each array of a tree, by `name` and its path."""
        return _measure_each(name, tree, lambda x: jnp.max(jnp.abs(x)))

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
            values, count = self._measure(gradients, before, after), jnp.float32(1.0)
        else:
            measures = new_train_state.step % self._every == 0
            shapes = jax.eval_shape(self._measure, gradients, before, after)
            # `cond` rather than `where`, which would compute both: steps between measurements cost
            # nothing.
            values = jax.lax.cond(
                measures,
                self._measure,
                lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
                *(gradients, before, after),
            )
            count = measures.astype(jnp.float32)
        return {name: AverageOfMeasured(value, count) for name, value in values.items()}

    def _measure(self, gradients: Any, before: Any, after: Any) -> dict[str, jax.Array]:
        """Float32 scalars by T5X's names, such as `weight_rms/decoder/decoder_norm/scale`."""
        # The parameters' actual change, after float32 rounding.
        updates = jax.tree.map(jnp.subtract, after, before)
        of_parameters: dict[str, Any] = {
            **self._make_rms_metrics("weight_rms", after),
            **self._make_rms_metrics("weight_gradient_rms", gradients),
            **self._make_rms_metrics("weight_update_rms", updates),
            # Infinite or NaN where a weight was zero, as in T5X.
            **self._make_rms_metrics(
                "weight_update_divided_by_weight_rms", jax.tree.map(jnp.divide, updates, before)
            ),
            **self._make_max_metrics("weight_max", after),
        }
        return {name: metric.total for name, metric in of_parameters.items()} | {
            "weight_gradient_norm": jnp.sqrt(_sum_of_squares(gradients)),
            "weight_rms_all": jnp.sqrt(_sum_of_squares(after) / _size(after)),
            "weight_update_rms_all": jnp.sqrt(_sum_of_squares(updates) / _size(after)),
        }


def _measure_each(name: str, tree: Any, measure: Callable) -> dict[str, Metric]:
    """A measure of every parameter; of each layer separately if layers are stacked."""

    def measure_array(path: Any, value: jax.Array) -> jax.Array:
        return (jax.vmap(measure) if DictKey(LAYERS) in path else measure)(value)

    values = unstack(
        jax.tree_util.tree_map_with_path(measure_array, tree), count_stacked_layers(tree)
    )
    flat: Any = flax.traverse_util.flatten_dict(values, sep="/")
    return {f"{name}/{path}": AveragePerStep(value) for path, value in flat.items()}


def _sum_of_squares(tree: Any) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.vdot(x, x) for x in jax.tree.leaves(tree)]))


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
