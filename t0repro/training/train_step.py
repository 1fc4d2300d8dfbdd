"""One update: sums the microbatches' gradients in float32, then applies the optimizer.

An update may measure the parameters, gradients and updates too (`WeightMetricsComputer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from t0repro.errors import UserError
from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import T5, Batch
from t0repro.model.towers import (
    Towers,
    added_up,
    by_layer,
    stacks_in,
    sums_like,
    with_sums,
    zero_sums,
)
from t0repro.parameters.naming import LAYERS
from t0repro.partitioning.devices import DATA, Partitioning, constrain, sums_over_groups
from t0repro.training.metric_classes import (
    Average,
    AverageOfMeasured,
    AveragePerStep,
    LastValue,
    Metric,
    merge_metrics,
)
from t0repro.training.models import BaseModel, T5Model, is_own, summed_towers
from t0repro.training.optimizers import Optimizer, Schedule
from t0repro.training.train_state import TrainState, stacked_layers
from t0repro.words import counted

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]
_DATA_SPEC = PartitionSpec(DATA)


# ---- T5X's functions ----------------------------------------------------------------------------


def accumulate_grads_microbatched(
    model: BaseModel,
    train_state: TrainState,
    batch: Batch,
    dropout_rng: Array | None,
    num_microbatches: int | None,
    data_partition_spec: PartitionSpec = _DATA_SPEC,
    *,
    t5x_dropout_compat: bool = False,
    partitioning: Partitioning | None = None,
) -> tuple[Any, dict[str, Any], Any]:
    """Computes a batch's gradients, one microbatch at a time: (gradients, metrics, mutables).

    Losses and gradients of the microbatches are summed, in float32 if there are several. A model
    whose loss depends on the full batch overrides `BaseModel.whole_batch`. With n microbatches,
    microbatch m has the rows m, m + n, m + 2n, ... of the batch, as in mtf.serialize_training_step.

    On several devices, one all-reduce sums the gradients after the last microbatch. Fully sharded
    runs reduce them after each microbatch, since no device has room for all gradients.

    Args:
      model: the model.
      train_state: gives the parameters and the flax mutables.
      batch: what `model.features` returned, on devices.
      dropout_rng: PRNG key of this step, into which each microbatch's number is folded; None for no
        dropout.
      num_microbatches: number of equal parts; None or 1 for the batch as a whole.
      data_partition_spec: accepted for T5X's sake and ignored: the device mesh in scope shards the
        rows.
      t5x_dropout_compat: repeats T5X, which gives all microbatches of a step the same key, and so
        the same masks, and cuts the batch into contiguous slices.
      partitioning: the devices, if there are several.

    Raises:
      UserError: if the batch cannot be split into that many equal parts.
    """
    del data_partition_spec
    count = num_microbatches or 1
    rows = next(iter(batch.values())).shape[0]
    if rows % count:
        raise UserError(
            f"A batch of {counted(rows, 'row')} has no {count} equal microbatches.",
            where="utils.run.batch_size",
            fix="Choose a batch size that is a multiple of the number of microbatches.",
        )
    # Compute this before the split: the loss's divisor belongs to all microbatches together.
    batch, loss_fn = model.whole_batch(batch)
    towers = summed_towers(model, loss_fn)
    if train_state.frozen is not None:
        # If few parameters are trained, the sums of their gradients are small and need not pass
        # through the scans.
        loss_fn, towers = _of_adapter(model, loss_fn, train_state), {}
    keys = microbatch_keys(dropout_rng, count, t5x_dropout_compat)
    gradients_of = _gradients_function(loss_fn, train_state.flax_mutables or None)
    if count == 1:
        return gradients_of(train_state.params, batch, keys(0), train_state.flax_mutables)

    params, mutables, specs = train_state.params, train_state.flax_mutables, None
    if partitioning is not None:
        shardings = partitioning.shardings(params)
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def of_parts(params: Any, parts: Any) -> tuple[Any, Any, Any]:
        return _scanned(gradients_of, params, parts, keys, mutables, towers, specs)

    parts = split_into_microbatches(batch, count, contiguous=t5x_dropout_compat)
    together = partitioning is None or partitioning.fully_sharded or partitioning.data == 1
    # An adapter's gradients are too small to be worth adding up across devices only once.
    together = together or train_state.frozen is not None
    if together or not _adds_up(of_parts, params, parts):
        totals, metrics, after = of_parts(params, parts)
    else:
        assert partitioning is not None
        totals, metrics, after = sums_over_groups(of_parts, params, parts, partitioning.data, specs)
    return sums_like(params, totals, towers), metrics, after


def apply_grads(
    train_state: TrainState,
    grad_accum: Any,
    metrics: Mapping[str, Any],
    learning_rate: jax.Array | float,
    weight_metrics_computer: WeightMetricsComputer | None = None,
    other_state_variables: Mapping[str, Any] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Updates the state with gradients: (state, metrics with those of the update).

    Args:
      train_state: the state before the update.
      grad_accum: gradients of all parameters.
      metrics: metrics of the batch; left as they are.
      learning_rate: learning rate of this update.
      weight_metrics_computer: measures parameters, gradients and updates; None for nothing.
      other_state_variables: `flax_mutables` after the batch, if there are any.
    """
    new_state = train_state.apply_gradient(
        grad_accum, learning_rate=learning_rate, **(other_state_variables or {})
    )
    rate = jnp.asarray(learning_rate, jnp.float32)
    metrics = {
        **metrics,
        "learning_rate": Average(rate, jnp.float32(1.0)),
        "learning_rate/current": LastValue(rate),
    }
    if weight_metrics_computer is not None:
        metrics |= weight_metrics_computer.compute_metrics(grad_accum, train_state, new_state)
    return new_state, metrics


def eval_step(model: BaseModel, train_state: TrainState, batch: Batch) -> dict[str, Any]:
    """The metrics of one batch of an evaluation."""
    mutables = train_state.flax_mutables
    extra = () if mutables is None else (mutables,)
    return model.eval_fn(parameters_of(model, train_state), batch, *extra)[1]


def parameters_of(model: BaseModel, train_state: TrainState) -> Any:
    """What a model is applied to: an adapter's parameters joined to the base's, if it has one."""
    if train_state.frozen is None:
        return train_state.params
    assert isinstance(model, T5Model)
    return train_state.parameters_of(model.module.config)


def _of_adapter(model: BaseModel, loss_fn: Callable, train_state: TrainState) -> Callable:
    """The loss as a function of the adapter's parameters alone."""

    def loss(own: Any, *arguments: Any) -> Any:
        return loss_fn(parameters_of(model, train_state.replace(params=own)), *arguments)

    return loss


def train_with_lr(
    train_state: TrainState,
    batch: Batch,
    learning_rate: jax.Array | float,
    dropout_rng: Array | None,
    model: BaseModel,
    num_microbatches: int | None,
    weight_metrics_computer: WeightMetricsComputer | None = None,
    data_partition_spec: PartitionSpec = _DATA_SPEC,
    *,
    t5x_dropout_compat: bool = False,
    hold_if_not_finite: bool = False,
    partitioning: Partitioning | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """One update at a learning rate: (state, metrics). See `accumulate_grads_microbatched`.

    With `hold_if_not_finite`, a loss, a gradient or an updated parameter that is NaN or infinite
    leaves the state as it was, step included; the metric `update_held` is then 1.
    """
    gradients, metrics, mutables = accumulate_grads_microbatched(
        model,
        train_state,
        batch,
        dropout_rng,
        num_microbatches,
        data_partition_spec,
        t5x_dropout_compat=t5x_dropout_compat,
        partitioning=partitioning,
    )
    others = {} if mutables is None else {"flax_mutables": mutables}
    new_state, metrics = apply_grads(
        train_state, gradients, metrics, learning_rate, weight_metrics_computer, others
    )
    if not hold_if_not_finite:
        return new_state, metrics
    # Check entry by entry, since a sum of finite numbers may overflow. Check parameters too: an
    # optimizer that squares a large gradient may overflow by itself.
    looked_at = jax.tree.leaves((gradients, metrics.get("loss"), new_state.params))
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in looked_at]))
    # The base is the same in both, and large.
    new_state, before = new_state.replace(frozen=None), train_state.replace(frozen=None)
    held = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, before)
    held = held.replace(frozen=train_state.frozen)
    return held, {**metrics, "update_held": LastValue(1.0 - finite.astype(jnp.float32))}


# ---- Microbatches -------------------------------------------------------------------------------


def split_into_microbatches(
    batch: Batch, count: int, *, contiguous: bool = False
) -> dict[str, jax.Array]:
    """Reshapes each feature [batch, length] to [count, batch / count, length].

    Microbatches are strided or, with `contiguous`, consecutive slices of the batch.
    """

    # Row r goes to microbatch r modulo count, as in mtf.serialize_training_step.
    def parts(x: jax.Array) -> jax.Array:
        if contiguous:
            return x.reshape(count, x.shape[0] // count, *x.shape[1:])
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return {
        name: constrain(parts(jnp.asarray(x)), *(None, "batch", *[None] * (x.ndim - 1)))
        for name, x in batch.items()
    }


def microbatch_keys(
    key: Array | None, count: int = 1, t5x_dropout_compat: bool = False
) -> Callable[[Any], Array | None]:
    """The dropout key of a microbatch, by its number."""
    if key is None:
        return lambda index: None
    if not t5x_dropout_compat:
        return lambda index: jax.random.fold_in(key, index)
    # T5X splits the step's key again for each microbatch, but keeps the key that it split.
    repeated = key if count == 1 else jax.random.split(key)[1]
    return lambda index: repeated


def _gradients_function(loss_fn: Callable, mutables: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """(params, batch, key, mutables) -> (gradients, metrics, mutables)."""
    function = jax.value_and_grad(loss_fn, has_aux=True)

    def without(params: Any, part: Batch, key: Any, _: Any) -> tuple[Any, Any, Any]:
        (_, metrics), gradients = function(params, part, key)
        return gradients, metrics, None

    def with_mutables(params: Any, part: Batch, key: Any, before: Any) -> tuple[Any, Any, Any]:
        (_, (metrics, after)), gradients = function(params, part, key, before)
        return gradients, metrics, after

    return without if mutables is None else with_mutables


def _scanned(
    gradients_of: Callable,
    params: Any,
    parts: Any,
    keys: Callable,
    mutables: Any,
    towers: Towers,
    specs: Any,
) -> tuple[Any, Any, Any]:
    """Adds up the microbatches' gradients in float32, and merges their metrics in order.

    The gradient sums of `towers` are stacked, see `zero_sums`.
    """

    def add(carry: tuple, item: tuple) -> tuple[tuple, None]:
        totals, merged, before = carry
        part, index = item
        given = with_sums(params, totals, towers)
        gradients, metrics, after = gradients_of(given, part, keys(index), before)
        later = merge_metrics(merged, metrics)
        # The scan starts from zeros, which not every metric can merge with: the first microbatch's
        # metrics replace them.
        merged = jax.tree.map(lambda one, two: jnp.where(index == 0, one, two), metrics, later)
        return (added_up(totals, gradients, towers), merged, after), None

    first = jax.tree.map(lambda x: x[0], parts)
    _, metrics, _ = jax.eval_shape(gradients_of, params, first, keys(0), mutables)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
    start = (zero_sums(params, towers, specs), nothing, mutables)
    count = next(iter(parts.values())).shape[0]
    return jax.lax.scan(add, start, (parts, jnp.arange(count)))[0]


def _adds_up(of_parts: Callable, params: Any, parts: Any) -> bool:
    """Whether all metrics are sums, so that each group of devices can process its rows alone."""
    _, metrics, mutables = jax.eval_shape(of_parts, params, parts)
    kinds = [metric for metric in metrics.values() if jax.tree.leaves(metric)]
    return mutables is None and all(getattr(metric, "additive", False) for metric in kinds)


# ---- T5's loss, gradients and step without a trainer --------------------------------------------


def loss_and_gradients(
    model: T5,
    params: dict,
    batch: Batch,
    *,
    num_microbatches: int = 1,
    dropout_key: Array | None = None,
) -> tuple[Float[Array, ""], dict]:
    """The loss of T5 on a batch and its float32 gradients."""
    state = TrainState(step=jnp.int32(0), params=params, slots=None)
    gradients, metrics, _ = accumulate_grads_microbatched(
        T5Model(model, measured=False), state, batch, dropout_key, num_microbatches
    )
    return metrics["loss"].total, gradients


def make_train_step(
    model: T5,
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    num_microbatches: int = 1,
    dropout_key: Array | None = None,
    partitioning: Partitioning | None = None,
) -> TrainStep:
    """Returns a function to jit: (state, batch) -> (next state, {"loss", "learning_rate"}).

    The loss is computed with the parameters before the update. The step and the microbatch's index
    are folded into the dropout key, so that no two masks of a run share a key.

    Args:
      model: the network; its configuration has the options of the loss.
      optimizer: from t0repro.training.optimizers; it must have made the state's slots.
      schedule: maps the step before an update to its learning rate.
      num_microbatches: number of equal parts into which the batch is split.
      dropout_key: PRNG key for dropout; unused if the model's dropout rate is zero.
      partitioning: the devices, if there are several.
    """
    trained = T5Model(model, optimizer, measured=False)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        # Fold in the global step, so that a resumed run samples what it would have sampled.
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, state.step)
        new_state, metrics = train_with_lr(
            state.replace(optimizer=optimizer),
            batch,
            schedule(state.step),
            key,
            trained,
            num_microbatches,
            partitioning=partitioning,
        )
        values = {"loss": metrics["loss"].total, "learning_rate": metrics["learning_rate"].total}
        # Part of the tree's structure: with another one, jit would compile the next step again.
        return new_state.replace(optimizer=state.optimizer), values

    return train_step


def jitted_train_step(
    train_step: TrainStep, state: TrainState, partitioning: Partitioning | None
) -> Any:
    """The train step under jit; it reuses the state's buffers and leaves each part where it is.

    Args:
      train_step: from `make_train_step`.
      state: a state, or its shapes.
      partitioning: the devices; None for one. Lower the result in its `active` context.
    """
    # Donated: the new state takes the place of the old one in memory.
    if partitioning is None:
        return jax.jit(train_step, donate_argnums=0)
    # Also for one device: precompiling targets a mesh of devices that are not attached.
    shardings = (partitioning.shardings(state), NamedSharding(partitioning.mesh, PartitionSpec()))
    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)


# ---- The state that a step takes, with the layers of deep towers stacked -------------------------

# A deep tower is one scanned body, and one operation updates all layers of a stack. So the compiled
# step does not grow with depth, and no step copies layers into stacks. Code that reads a state by
# parameter names gets it by layer (`single_layers`, t0repro.training.train_state); checkpoints
# always are by layer.


def with_stacks(model: BaseModel, state: TrainState) -> TrainState:
    """The state with stacked layers (`stacked_layers`), unless the model is a user's own.

    Such a model may read parameters by name.

    Args:
      model: what the state is for.
      state: by layer, with its values or their shapes; arrays that get stacked are deleted.
    """
    if not is_own(model) or type(model.module) is not T5:
        return state
    return stacked_layers(model.module.config, state)


# ---- T5X's metrics of parameters, gradients and updates (t5x.trainer.WeightMetricsComputer) ------


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
        return _by_parameter(name, tree, lambda x: jnp.sqrt(jnp.mean(jnp.square(x))))

    @staticmethod
    def _make_max_metrics(name: str, tree: Any) -> dict[str, Metric]:
        """The largest size of an entry of each array of a tree, by `name` and its path."""
        return _by_parameter(name, tree, lambda x: jnp.max(jnp.abs(x)))

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
            values, count = self._measured(gradients, before, after), jnp.float32(1.0)
        else:
            measures = new_train_state.step % self._every == 0
            shapes = jax.eval_shape(self._measured, gradients, before, after)
            # `cond` rather than `where`, which would compute both: steps between measurements cost
            # nothing.
            values = jax.lax.cond(
                measures,
                self._measured,
                lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
                *(gradients, before, after),
            )
            count = measures.astype(jnp.float32)
        return {name: AverageOfMeasured(value, count) for name, value in values.items()}

    def _measured(self, gradients: Any, before: Any, after: Any) -> dict[str, jax.Array]:
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


def _by_parameter(name: str, tree: Any, measure: Callable) -> dict[str, Metric]:
    """A measure of every parameter; of each layer separately if layers are stacked."""

    def measured(path: Any, value: jax.Array) -> jax.Array:
        return (jax.vmap(measure) if DictKey(LAYERS) in path else measure)(value)

    values = by_layer(jax.tree_util.tree_map_with_path(measured, tree), stacks_in(tree))
    flat: Any = flax.traverse_util.flatten_dict(values, sep="/")
    return {f"{name}/{path}": AveragePerStep(value) for path, value in flat.items()}


def _sum_of_squares(tree: Any) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.vdot(x, x) for x in jax.tree.leaves(tree)]))


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
