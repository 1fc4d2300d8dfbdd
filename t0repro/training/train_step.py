"""One update: sums the microbatches' gradients in float32, then applies the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import T5, Batch
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.rules import constrain, sums_over_groups
from t0repro.training.batch_sums import Sums, loss_and_sums
from t0repro.training.loss import loss_denominator, training_loss, with_loss_weights
from t0repro.training.optimizers import Optimizer
from t0repro.training.schedules import Schedule
from t0repro.training.train_state import TrainState
from t0repro.training.weight_metrics import weight_metrics

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a train step returns beside the loss, for T5X's metrics.

    Attributes:
      weights: whether parameters, gradients and updates are measured too.
    """

    weights: bool = False


def make_train_step(
    model: T5,
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    num_microbatches: int = 1,
    dropout_key: Array | None = None,
    measured: Measured | None = None,
    partitioning: Partitioning | None = None,
) -> TrainStep:
    """Returns a function to jit: (state, batch) -> (next state, {"loss", "learning_rate"}).

    If `measured`, the values have `sums` too (t0repro.training.batch_sums), and `weights`, a
    dictionary of metrics by T5X's names, empty unless they are asked for.

    The loss is computed with the parameters before the update. The step and the microbatch's index
    are folded into the dropout key, so that no two draws of a run are the same.

    Args:
      model: the model; its configuration has the options of the loss.
      optimizer: from t0repro.training.optimizers.
      schedule: maps the step before an update to its learning rate.
      num_microbatches: number of equal parts into which the batch is split.
      dropout_key: PRNG key for dropout; unused if the model's dropout rate is zero.
      measured: what is measured beside the loss; None for nothing.
      partitioning: the devices, if there are several.
    """
    key = dropout_key if model.config.dropout_rate else None

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        # From the global step, so that a run that continues draws what it would have
        # drawn.
        step_key = None if key is None else jax.random.fold_in(key, state.step)
        loss, sums, gradients = loss_sums_and_gradients(
            model,
            state.params,
            batch,
            num_microbatches=num_microbatches,
            dropout_key=step_key,
            measured=measured is not None,
            partitioning=partitioning,
        )
        learning_rate = schedule(state.step)
        updates, slots = optimizer.update(
            gradients, state.slots, state.params, step=state.step, learning_rate=learning_rate
        )
        params: Any = optax.apply_updates(state.params, updates)
        values: dict[str, Any] = {"loss": loss, "learning_rate": learning_rate}
        if measured is not None:
            weights = weight_metrics(gradients, state.params, params) if measured.weights else {}
            values |= {"sums": sums, "weights": weights}
        return TrainState(step=state.step + 1, params=params, slots=slots), values

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
    if partitioning is None:
        # Donated: the new state takes the place of the old one in memory.
        return jax.jit(train_step, donate_argnums=0)
    shardings = (partitioning.shardings(state), NamedSharding(partitioning.mesh, PartitionSpec()))
    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)


def loss_and_gradients(
    model: T5,
    params: dict,
    batch: Batch,
    *,
    num_microbatches: int = 1,
    dropout_key: Array | None = None,
) -> tuple[Float[Array, ""], dict]:
    """Computes the batch's loss and its float32 gradients, one microbatch at a time.

    Of n microbatches, number m has the rows m, m + n, m + 2n, ... of the batch, as in
    mtf.serialize_training_step.
    """
    loss, _, gradients = loss_sums_and_gradients(
        model, params, batch, num_microbatches=num_microbatches, dropout_key=dropout_key
    )
    return loss, gradients


def loss_sums_and_gradients(
    model: T5,
    params: dict,
    batch: Batch,
    *,
    num_microbatches: int = 1,
    dropout_key: Array | None = None,
    measured: bool = False,
    partitioning: Partitioning | None = None,
) -> tuple[Float[Array, ""], Sums, dict]:
    """`loss_and_gradients`, and the sums of T5X's metrics if `measured`, else no sums.

    On several devices gradients are added up between them after the last microbatch; if fully
    sharded after each, since no device has room for all gradients.
    """
    # Of the whole batch, so that the microbatches' losses and gradients add up.
    batch = with_loss_weights(model.config, batch)
    denominator = loss_denominator(model.config, batch)

    def loss_of(params: dict, part: Batch, key: Array | None) -> tuple[jax.Array, Sums]:
        function = loss_and_sums if measured else _loss_alone
        return function(model, params, part, denominator=denominator, dropout_key=key)

    def of_part(params: dict, part: Batch, index: jax.Array | int) -> tuple[jax.Array, Sums, dict]:
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
        (loss, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, part, key)
        return loss, sums, gradients

    if num_microbatches == 1:
        return of_part(params, batch, 0)

    def of_parts(params: dict, parts: dict[str, jax.Array]) -> tuple[jax.Array, Sums, dict]:
        def add(total: Any, item: tuple) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_part(params, *item)), None

        first = jax.tree.map(lambda x: x[0], parts)
        # Shapes alone: which sums there are depends on the metrics asked for.
        _, sums, _ = jax.eval_shape(of_part, params, first, 0)
        zeros = (
            jnp.float32(0.0),
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
        )
        return jax.lax.scan(add, zeros, (parts, jnp.arange(num_microbatches)))[0]

    parts = split_into_microbatches(batch, num_microbatches)
    if partitioning is None or partitioning.fully_sharded or partitioning.data == 1:
        return of_parts(params, parts)
    specs = jax.tree.map(lambda sharding: sharding.spec, partitioning.shardings(params))
    return sums_over_groups(of_parts, params, parts, partitioning.data, specs)


def _loss_alone(*args: Any, **options: Any) -> tuple[jax.Array, Sums]:
    return training_loss(*args, **options), {}


def split_into_microbatches(batch: Batch, count: int) -> dict[str, jax.Array]:
    """Reshapes each feature [batch, length] to [count, batch / count, length]."""
    return {
        # Row r goes to microbatch r modulo count, as in mtf.serialize_training_step.
        name: constrain(
            jnp.moveaxis(jnp.asarray(x).reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0),
            *(None, "batch", *[None] * (x.ndim - 1)),
        )
        for name, x in batch.items()
    }
