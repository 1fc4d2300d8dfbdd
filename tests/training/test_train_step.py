import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.training.train_step import (
    loss_and_gradients,
    make_train_step,
    split_into_microbatches,
)

from ..helpers import tiny_models as tiny


@functools.partial(jax.jit, static_argnums=(0, 3))
def run(model, params, batch, count, key=None):
    return loss_and_gradients(model, params, batch, num_microbatches=count, dropout_key=key)


@settings(max_examples=12)
@given(seed=st.integers(0, 3), count=st.sampled_from([2, 12]))
@pytest.mark.parametrize("denominator", [None, 50.0], ids=["by size", "bound"])
def test_loss_and_gradients_are_the_same_for_any_number_of_microbatches(denominator, seed, count):
    model = tiny.model(loss_denominator=denominator)
    params, batch = tiny.new_state(seed).params, tiny.batches(1, rows=12, seed=seed)[0]
    whole_loss, whole = run(model, params, batch, 1)
    loss, parts = run(model, params, batch, count)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5)
    for ours, expected in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert np.linalg.norm(ours - expected) <= 1e-5 * np.linalg.norm(expected) + 1e-9


def test_microbatches_are_strided_as_in_mesh_tensorflow():
    parts = split_into_microbatches({"inputs": jnp.arange(6).reshape(6, 1)}, 3)
    np.testing.assert_array_equal(parts["inputs"][..., 0], [[0, 3], [1, 4], [2, 5]])


def test_each_microbatch_and_each_step_has_noise_of_its_own():
    model, params = tiny.model(dropout_rate=0.5), tiny.new_state().params
    batch = tiny.batches(1, rows=1)[0]
    # The same row four times: equal noise would give four equal losses.
    repeated = {name: np.repeat(x, 4, axis=0) for name, x in batch.items()}
    key = jax.random.key(0)

    def loss(rows, count, key):
        return float(run(model, params, rows, count, key)[0])

    single = loss(batch, 1, jax.random.key(0))
    assert loss(repeated, 4, key) != pytest.approx(single, rel=1e-3)
    assert loss(repeated, 4, key) == loss(repeated, 4, key)
    step = jax.jit(make_train_step(model, tiny.OPTIMIZER, tiny.schedule(), dropout_key=key))
    state = tiny.new_state()
    _, first = step(state, batch)
    _, second = step(state.replace(step=state.step + 1), batch)
    assert float(first["loss"]) != pytest.approx(float(second["loss"]), rel=1e-4)


def test_a_step_reports_the_loss_before_it_and_the_rate_of_its_update():
    state, batch = tiny.new_state(), tiny.batches(1)[0]
    loss, _ = run(tiny.model(), state.params, batch, 1)
    step = jax.jit(make_train_step(tiny.model(), tiny.OPTIMIZER, lambda step: 0.5 / (step + 1.0)))
    after, metrics = step(state.replace(step=jnp.int32(4)), batch)
    assert int(after.step) == 5
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["learning_rate"], 0.1, rtol=1e-6)


def test_fifty_steps_on_one_batch_learn_it():
    step = jax.jit(make_train_step(tiny.model(), tiny.OPTIMIZER, lambda _: jnp.float32(0.05)))
    state, batch = tiny.new_state(), tiny.batches(1)[0]
    losses = []
    for _ in range(50):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.always
@pytest.mark.parametrize("rate", [0.0, 0.2], ids=["without dropout", "with dropout"])
def test_recomputed_activations_give_the_same_loss_and_gradients(rate):
    """And the backward pass does compute them again: the more so, the less is kept."""
    params, batch = tiny.new_state().params, tiny.batches(1)[0]
    key = jax.random.key(3) if rate else None
    kept, *others = (
        tiny.model(dropout_rate=rate, recompute=way)
        for way in ("none", "offload", "minimal", "full")
    )
    theirs = run(kept, params, batch, 1, key)
    for model in others:
        ours = run(model, params, batch, 1, key)
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
        jax.tree.map(compare, ours, theirs)

    def traced(model):
        make = jax.make_jaxpr(lambda p: loss_and_gradients(model, p, batch, dropout_key=key))
        return str(make(params))

    programs = [traced(model) for model in (kept, *others)]
    least, offloaded, some, most = (program.count("dot_general") for program in programs)
    assert least < some < most and offloaded == some
    # What is kept goes to the host's memory, which on CPU is the device's own.
    assert ["<host>" in program for program in programs] == [False, True, False, False]
