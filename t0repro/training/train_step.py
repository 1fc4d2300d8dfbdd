"""One update: sums the microbatches' gradients in float32, then applies the optimizer.

An update may measure the parameters, gradients and updates too (t0repro.training.weight_metrics).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.errors import UserError
from t0repro.model.features import Batch
from t0repro.model.gradient_accumulators import (
    add_grads,
    attach_accumulators,
    detach_accumulators,
    init_accumulators,
)
from t0repro.model.layer_stacks import Towers
from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import DATA, Partitioning, constrain, sum_over_groups
from t0repro.training.metric_classes import (
    Average,
    LastValue,
    merge_metrics,
)
from t0repro.training.models import find_summed_towers, is_builtin
from t0repro.training.optimizers import Optimizer
from t0repro.training.schedules import Schedule
from t0repro.training.t5_model import BaseModel, T5Model
from t0repro.training.train_state import TrainState, stack_state
from t0repro.training.weight_metrics import WeightMetricsComputer
from t0repro.words import counted

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]
_DATA_SPEC = PartitionSpec(DATA)


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
      data_partition_spec: that of the partitioner, by whose first axis the rows are sharded.
      t5x_dropout_compat: repeats T5X, which gives all microbatches of a step the same key, and so
        the same masks, and cuts the batch into contiguous slices.
      partitioning: the devices, if there are several.

    Raises:
      UserError: if the batch cannot be split into that many equal parts.
      ValueError: for another data_partition_spec.
    """
    if data_partition_spec != _DATA_SPEC:
        raise ValueError(f"data_partition_spec is {_DATA_SPEC}, not {data_partition_spec}.")
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
    towers = find_summed_towers(model, loss_fn)
    if train_state.frozen is not None:
        # If few parameters are trained, the sums of their gradients are small and need not pass
        # through the scans.
        loss_fn, towers = _loss_of_adapter(model, loss_fn, train_state), {}
    keys = microbatch_keys(dropout_rng, count, t5x_dropout_compat)
    gradients_of = _gradients_function(loss_fn, train_state.flax_mutables or None)
    if count == 1:
        return gradients_of(train_state.params, batch, keys(0), train_state.flax_mutables)

    params, mutables, specs = train_state.params, train_state.flax_mutables, None
    if partitioning is not None:
        shardings = partitioning.shardings(params)
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def accumulate(params: Any, parts: Any) -> tuple[Any, Any, Any]:
        return _scan_microbatches(gradients_of, params, parts, keys, mutables, towers, specs)

    parts = split_into_microbatches(batch, count, contiguous=t5x_dropout_compat)
    together = partitioning is None or partitioning.fully_sharded or partitioning.data == 1
    # An adapter's gradients are too small to be worth adding up across devices only once.
    together = together or train_state.frozen is not None
    if together or not _can_sum_over_groups(accumulate, params, parts):
        totals, metrics, after = accumulate(params, parts)
    else:
        assert partitioning is not None
        totals, metrics, after = sum_over_groups(
            accumulate, params, parts, partitioning.data, specs
        )
    return detach_accumulators(params, totals, towers), metrics, after


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


def _loss_of_adapter(model: BaseModel, loss_fn: Callable, train_state: TrainState) -> Callable:
    """The loss as a function of the adapter's parameters alone."""

    def loss(adapter_params: Any, *arguments: Any) -> Any:
        return loss_fn(parameters_of(model, train_state.replace(params=adapter_params)), *arguments)

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
    new_variables = {} if mutables is None else {"flax_mutables": mutables}
    new_state, metrics = apply_grads(
        train_state, gradients, metrics, learning_rate, weight_metrics_computer, new_variables
    )
    if not hold_if_not_finite:
        return new_state, metrics
    # Check entry by entry, since a sum of finite numbers may overflow. Check parameters too: an
    # optimizer that squares a large gradient may overflow by itself.
    checked_arrays = jax.tree.leaves((gradients, metrics.get("loss"), new_state.params))
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in checked_arrays]))
    # The base is the same in both, and large.
    new_state, before = new_state.replace(frozen=None), train_state.replace(frozen=None)
    kept_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, before)
    kept_state = kept_state.replace(frozen=train_state.frozen)
    return kept_state, {**metrics, "update_held": LastValue(1.0 - finite.astype(jnp.float32))}


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

    def compute_grads(params: Any, microbatch: Batch, key: Any, _: Any) -> tuple[Any, Any, Any]:
        (_, metrics), gradients = function(params, microbatch, key)
        return gradients, metrics, None

    def compute_with_mutables(
        params: Any, microbatch: Batch, key: Any, before: Any
    ) -> tuple[Any, Any, Any]:
        (_, (metrics, after)), gradients = function(params, microbatch, key, before)
        return gradients, metrics, after

    return compute_grads if mutables is None else compute_with_mutables


def _scan_microbatches(
    gradients_of: Callable,
    params: Any,
    parts: Any,
    keys: Callable,
    mutables: Any,
    towers: Towers,
    specs: Any,
) -> tuple[Any, Any, Any]:
    """Adds up the microbatches' gradients in float32, and merges their metrics in order.

    The scan's carry, and what each microbatch makes of it:

        totals    float32 gradient sums, like the parameters; those of `towers` are stacked and go
                  through the loss, whose backward pass adds to them (`init_accumulators`)
        merged    metrics of the microbatches so far
        before    the model's mutables after the microbatch before, or None
    """

    def add(carry: tuple, item: tuple) -> tuple[tuple, None]:
        totals, merged, before = carry
        microbatch, index = item
        params_and_sums = attach_accumulators(params, totals, towers)
        gradients, metrics, after = gradients_of(params_and_sums, microbatch, keys(index), before)
        later = merge_metrics(merged, metrics)
        # The scan starts from zeros, which not every metric can merge with: the first microbatch's
        # metrics replace them.
        merged = jax.tree.map(lambda one, two: jnp.where(index == 0, one, two), metrics, later)
        return (add_grads(totals, gradients, towers), merged, after), None

    first = jax.tree.map(lambda x: x[0], parts)
    _, metrics, _ = jax.eval_shape(gradients_of, params, first, keys(0), mutables)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
    start = (init_accumulators(params, towers, specs), nothing, mutables)
    count = next(iter(parts.values())).shape[0]
    return jax.lax.scan(add, start, (parts, jnp.arange(count)))[0]


def _can_sum_over_groups(of_parts: Callable, params: Any, parts: Any) -> bool:
    """Whether all metrics are sums, so that each group of devices can process its rows alone."""
    _, metrics, mutables = jax.eval_shape(of_parts, params, parts)
    kinds = [metric for metric in metrics.values() if jax.tree.leaves(metric)]
    return mutables is None and all(getattr(metric, "additive", False) for metric in kinds)


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


def jit_train_step(
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


# A deep tower is one scanned body, and one operation updates all layers of a stack. So the compiled
# step does not grow with depth, and no step copies layers into stacks. Code that reads a state by
# parameter names gets it by layer (`unstack_state`, t0repro.training.train_state); checkpoints
# always are by layer.


def stack_builtin_state(model: BaseModel, state: TrainState) -> TrainState:
    """The state with stacked layers (`stack_state`), unless the model is a user's own.

    Such a model may read parameters by name.

    Args:
      model: what the state is for.
      state: by layer, with its values or their shapes; arrays that get stacked are deleted.
    """
    if not is_builtin(model) or type(model.module) is not T5:
        return state
    return stack_state(model.module.config, state)
