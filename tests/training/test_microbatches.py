"""A batch's gradient does not depend on its microbatches here; in T5X it does, by these numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.model.t5 import T5
from t0repro.training.metric_classes import AveragePerStep
from t0repro.training.t5_model import BaseModel, T5Model
from t0repro.training.train_state import TrainState
from t0repro.training.train_step import accumulate_grads_microbatched

from ..helpers import tiny_models as tiny

DENOMINATORS = ["NUM_REAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE", None, 60.0]
(BATCH,) = tiny.batches(1, rows=12)
new_state = functools.cache(tiny.new_state)  # importing a test compiles nothing


class AsInT5X(T5Model):
    """Normalizes each microbatch's loss by what is in the microbatch, as T5X's models do."""

    def whole_batch(self, batch):
        return batch, self.loss_fn


def model_of(kind, denominator, **changes):
    config = dataclasses.replace(tiny.MODEL, loss_denominator=denominator, **changes)
    return kind(T5(config, tiny.FLOAT32), measured=False)


@functools.cache
def loss_and_gradient(kind, denominator, count, key=None, **changes):
    """The loss, and all gradients in one vector."""
    model = model_of(kind, denominator, **changes)
    function = jax.jit(lambda state, batch: accumulate_grads_microbatched(
        model, state, batch, key, count, t5x_dropout_compat=kind is AsInT5X
    )[:2])  # fmt: skip
    gradients, metrics = function(new_state(), BATCH)
    return float(metrics["loss"].total), np.concatenate(
        [np.ravel(leaf) for leaf in jax.tree.leaves(gradients)]
    )


def how_wrong(kind, denominator):
    """(loss in 4 microbatches / loss of the whole, relative distance of the scaled gradients)."""
    whole, expected = loss_and_gradient(T5Model, denominator, 1)
    loss, gradient = loss_and_gradient(kind, denominator, 4)
    # T5X's optimizer, Adafactor, does not see a common factor: only the direction counts.
    scaled = gradient * np.linalg.norm(expected) / np.linalg.norm(gradient)
    return loss / whole, np.linalg.norm(scaled - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_here_every_normalizer_is_exact(denominator):
    ratio, distance = how_wrong(T5Model, denominator)
    assert ratio == pytest.approx(1.0, rel=1e-5) and distance < 1e-5


@pytest.mark.parametrize(
    "denominator, factor, turned",
    [("NUM_REAL_TARGET_TOKENS", 4, True), ("AVERAGE_PER_SEQUENCE", 4, False), (None, 4, False)],
)
def test_in_t5x_normalizers_of_the_batch_are_not(denominator, factor, turned):
    """All are about 4 times too large; where microbatches differ in size, the direction is off."""
    ratio, distance = how_wrong(AsInT5X, denominator)
    assert ratio == pytest.approx(factor, rel=0.15)
    assert (distance > 0.01) == turned


class Doubled(T5Model):
    """A loss of a user's own, made of T5's."""

    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
        loss, _ = super().loss_fn(params, batch, dropout_rng)
        return 2 * loss, {"loss": AveragePerStep(2 * loss)}


@pytest.mark.always
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_loss_of_a_subclass_is_what_is_trained_with_the_whole_batchs_divisor(denominator):
    whole, expected = loss_and_gradient(T5Model, denominator, 1)
    for count in (1, 4):
        loss, gradient = loss_and_gradient(Doubled, denominator, count)
        assert loss == pytest.approx(2 * whole, rel=1e-5)
        np.testing.assert_allclose(gradient, 2 * expected, rtol=1e-4, atol=1e-6)


def test_a_loss_of_a_subclass_is_what_is_evaluated():
    plain, doubled = (
        jax.jit(model_of(kind, None, z_loss=0.0).eval_fn)(new_state().params, BATCH)[0]
        for kind in (T5Model, Doubled)
    )
    assert float(doubled) == pytest.approx(2 * float(plain), rel=1e-6)


def test_t5x_dropout_compat_repeats_one_mask_and_the_default_does_not():
    rows = {name: np.repeat(x[:1], 4, axis=0) for name, x in BATCH.items()}
    model, key = model_of(T5Model, None, dropout_rate=0.5), jax.random.key(3)

    def losses(**options):
        @functools.partial(jax.jit, static_argnums=0)
        def loss(count):
            batch = {name: x[:count] for name, x in rows.items()}
            _, metrics, _ = accumulate_grads_microbatched(
                model, new_state(), batch, key, count, **options
            )
            return metrics["loss"].total

        return float(loss(4)), float(loss(2))

    four, two = losses(t5x_dropout_compat=True)
    # The same row under the same mask: each microbatch is a fourth, or a half, of the batch.
    assert four == pytest.approx(two, rel=1e-6)
    four, two = losses()
    assert four != pytest.approx(two, rel=1e-3)


def test_gradients_add_up_in_float32():
    state = new_state()
    half = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))
    model = model_of(T5Model, None)
    function = jax.jit(lambda batch: accumulate_grads_microbatched(model, half, batch, None, 4)[0])
    gradients = function(BATCH)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


class Line(BaseModel):
    """Fits a line; its parameters are a pair instead of a nested dictionary."""

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        return {"params": (jnp.float32(0.5), {"offset": jnp.float32(1.0)})}

    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
        slope, rest = params
        off = slope * batch["x"] + rest["offset"] - batch["y"]
        loss = jnp.sum(jnp.square(off))
        return loss, {"loss": AveragePerStep(loss)}


def test_parameters_of_a_users_model_may_be_any_tree():
    model = Line()
    params = model.get_initial_variables(None, {})["params"]
    state = TrainState(step=jnp.int32(0), params=params, slots=None)
    batch = {"x": jnp.arange(4.0), "y": jnp.ones(4)}
    whole, parts = (accumulate_grads_microbatched(model, state, batch, None, n)[0] for n in (1, 2))
    assert jax.tree.structure(parts) == jax.tree.structure(params)
    np.testing.assert_allclose(jax.tree.leaves(parts), jax.tree.leaves(whole))
