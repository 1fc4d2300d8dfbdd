"""Sums of gradients that a tower's loop adds to equal those of the microbatches, added up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.optimizers import make_optimizer
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import TrainState
from t0repro.training.train_step import accumulate_grads_microbatched, loss_and_gradients

from ..helpers import tiny_models as tiny

DEEP = {"num_encoder_layers": 2, "num_decoder_layers": 3, "scan_layers": True}


def network(dtypes=tiny.FLOAT32, **changes):
    return T5(dataclasses.replace(tiny.MODEL, **{**DEEP, **changes}), dtypes)


def strided(batch, count):
    """Microbatch m has the rows m, m + count, ... of the batch."""
    return [{name: x[m::count] for name, x in batch.items()} for m in range(count)]


VARIANTS = {
    "two towers": {"recompute": "minimal"},
    "shared towers": {"shared_towers": True, "num_decoder_layers": 2},
    "language model": {"model_type": "delimited_lm", "num_encoder_layers": 0, "recompute": "full"},
}
# Each compiles two steps.
CASES = [
    pytest.param(changes, dtypes, id=f"{name}, {dtypes.activation}", marks=marks)
    for name, changes in VARIANTS.items()
    for dtypes, marks in ((tiny.FLOAT32, ()), (tiny.BFLOAT16, pytest.mark.slow))
]


@pytest.mark.parametrize("changes, dtypes", CASES)
def test_sums_are_those_of_the_microbatches(changes, dtypes):
    model = network(dtypes, loss_denominator=7.0, **changes)  # the same for part and whole
    params = initial_parameters(model, jax.random.key(0))
    (batch,) = tiny.batches(1)
    whole = jax.jit(lambda p, b: loss_and_gradients(model, p, b, num_microbatches=2))
    one = jax.jit(lambda p, b: loss_and_gradients(model, p, b))
    loss, sums = whole(params, batch)
    parts = [one(params, part) for part in strided(batch, 2)]
    np.testing.assert_allclose(loss, sum(part for part, _ in parts), rtol=1e-6)
    expected = jax.tree.map(jnp.add, *(gradients for _, gradients in parts))
    # Within a loop XLA may fuse, and so round, otherwise than outside of one.
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)  # noqa: E731
    if dtypes is tiny.BFLOAT16:
        close = lambda a, b: np.testing.assert_allclose(  # noqa: E731
            a, b, rtol=0, atol=2e-2 * float(jnp.max(jnp.abs(b)))
        )
    jax.tree.map(close, sums, expected)


class Penalized(T5Model):
    """Adds the squares of all parameters to the loss, so layers have gradients outside the loop."""

    def whole_batch(self, batch):
        return batch, self.loss_fn

    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
        loss, metrics = super().loss_fn(params, batch, dropout_rng)
        return loss + sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params)), metrics


def test_a_users_loss_that_reads_the_layers_elsewhere_keeps_all_its_gradients():
    model = network(loss_denominator=7.0)
    params = initial_parameters(model, jax.random.key(0))
    (batch,) = tiny.batches(1)
    gradients = []
    for kind in (T5Model, Penalized):
        trained = kind(model, make_optimizer(tiny.ADAFACTOR), measured=False)
        state = TrainState(step=jnp.int32(0), params=params, slots=None)
        step = jax.jit(
            lambda b, t=trained, s=state: accumulate_grads_microbatched(t, s, b, None, 2)[0]
        )
        gradients.append(step(batch))
    plain, penalized = gradients
    # Twice, once for each microbatch.
    jax.tree.map(
        lambda a, p, b: np.testing.assert_allclose(a + 4 * p, b, rtol=1e-5, atol=1e-5),
        plain,
        params,
        penalized,
    )


class Wrapped(T5Model):
    """The same loss, wrapped in a user's function that the trainer knows nothing about."""

    def whole_batch(self, batch):
        batch, loss_fn = super().whole_batch(batch)
        return batch, lambda *arguments: loss_fn(*arguments)


def test_no_stack_of_gradients_exists_beside_the_sums():
    """Large layers and a short batch, so that parameters decide the memory."""
    config = {"d_model": 64, "d_ff": 512, "num_heads": 4, "d_kv": 16, "recompute": "full"}
    model = network(num_encoder_layers=6, num_decoder_layers=6, **config)
    params = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    (batch,) = tiny.batches(1)
    held = []
    for kind in (T5Model, Wrapped):
        trained = kind(model, make_optimizer(tiny.ADAFACTOR), measured=False)

        def sums(p, trained=trained):
            state = TrainState(step=jnp.int32(0), params=p, slots=None)
            return accumulate_grads_microbatched(trained, state, batch, None, 2)[0]

        held.append(jax.jit(sums).lower(params).compile().memory_analysis().temp_size_in_bytes)
    size = 4 * sum(x.size for x in jax.tree.leaves(params))
    # The larger tower's stack is more than half of all gradients.
    assert held[0] < held[1] - size / 2.5
