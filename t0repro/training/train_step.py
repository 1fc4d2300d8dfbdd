"""One update: sums the microbatches' gradients in float32, then applies the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import T5, Batch
from t0repro.training.loss import loss_denominator, training_loss
from t0repro.training.optimizers import Optimizer
from t0repro.training.schedules import Schedule
from t0repro.training.train_state import TrainState

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(
    model: T5,
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    num_microbatches: int = 1,
    dropout_key: Array | None = None,
) -> TrainStep:
    """Returns a function to jit: (state, batch) -> (next state, {"loss", "learning_rate"}).

    The loss is computed with the parameters before the update. The step and the microbatch's index
    are folded into the dropout key, so that no two draws of a run are the same.

    Args:
      model: the model; its configuration has the options of the loss.
      optimizer: from t0repro.training.optimizers.
      schedule: maps the step before an update to its learning rate.
      num_microbatches: number of equal parts into which the batch is split.
      dropout_key: PRNG key for dropout; unused if the model's dropout rate is zero.
    """
    key = dropout_key if model.config.dropout_rate else None

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        step_key = None if key is None else jax.random.fold_in(key, state.step)
        loss, gradients = loss_and_gradients(
            model, state.params, batch, num_microbatches=num_microbatches, dropout_key=step_key
        )
        learning_rate = schedule(state.step)
        updates, slots = optimizer.update(
            gradients, state.slots, state.params, step=state.step, learning_rate=learning_rate
        )
        params: Any = optax.apply_updates(state.params, updates)
        state = TrainState(step=state.step + 1, params=params, slots=slots)
        return state, {"loss": loss, "learning_rate": learning_rate}

    return train_step


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
    # The whole batch's denominator, so that the microbatches' losses and gradients add up.
    denominator = loss_denominator(model.config, batch)

    def of_part(part: Batch, index: jax.Array | int) -> tuple[jax.Array, dict]:
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
        return jax.value_and_grad(
            lambda p: training_loss(model, p, part, denominator=denominator, dropout_key=key)
        )(params)

    if num_microbatches == 1:
        return of_part(batch, 0)

    def add(total: tuple[jax.Array, dict], item: tuple) -> tuple[tuple[jax.Array, dict], None]:
        return jax.tree.map(jnp.add, total, of_part(*item)), None

    zeros = (jnp.float32(0.0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    parts = split_into_microbatches(batch, num_microbatches)
    total, _ = jax.lax.scan(add, zeros, (parts, jnp.arange(num_microbatches)))
    return total


def split_into_microbatches(batch: Batch, count: int) -> dict[str, jax.Array]:
    """Reshapes each feature [batch, length] to [count, batch / count, length]."""
    return {
        name: jnp.moveaxis(jnp.asarray(x).reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
        for name, x in batch.items()
    }
