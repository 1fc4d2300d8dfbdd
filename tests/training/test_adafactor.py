import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.parameters.shape import factoring
from t0repro.training.adafactor import decay_rate
from t0repro.training.formulas import Slots
from t0repro.training.optimizers import make_optimizer

from ..helpers.tiny_models import ADAFACTOR

STANDARD = dataclasses.replace(ADAFACTOR, min_dim_size_to_factor=128)


def update(parameter, gradients, config=ADAFACTOR, step=0, learning_rate=0.1):
    """The parameter and its slots after one update per gradient."""
    parameters = {"w": jnp.asarray(parameter)}
    optimizer = make_optimizer(config)
    slots = optimizer.init(parameters)
    for index, gradient in enumerate(gradients):
        updates, slots = optimizer.update(
            {"w": jnp.asarray(gradient)},
            slots,
            parameters,
            step=jnp.int32(step + index),
            learning_rate=jnp.float32(learning_rate),
        )
        parameters = optax.apply_updates(parameters, updates)
    return np.asarray(parameters["w"]), slots["w"]


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((128, 2048), (1, 0)),
        ((2048, 128), (0, 1)),
        ((128, 128), (1, 0)),
        ((127, 2048), None),
        ((4096,), None),
        ((3, 128, 256), (2, 1)),
    ],
)
def test_v_row_lacks_the_longest_axis_and_v_col_the_second(shape, axes):
    dropped = factoring("a/kernel", shape, STANDARD).dropped
    assert dropped == (axes and tuple((axis,) for axis in axes))
    shapes = STANDARD.slot_shapes("a/kernel", shape)
    if axes is None:
        assert shapes == {"v": shape}
    else:
        d0, d1 = axes
        assert shapes["v_row"] == tuple(n for axis, n in enumerate(shape) if axis != d0)
        assert shapes["v_col"] == tuple(n for axis, n in enumerate(shape) if axis != d1)


@pytest.mark.always
def test_slots_of_a_square_matrix_are_means_over_the_axes_that_t5x_means():
    gradient = random(0, 8, 8)
    _, slots = update(np.ones((8, 8), np.float32), [gradient])
    # At step 0 the decay is 0: the slots are the means of this gradient's squares.
    np.testing.assert_allclose(slots.v_row, np.square(gradient).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(slots.v_col, np.square(gradient).mean(axis=0), rtol=1e-6)


def test_factoring_can_be_off():
    config = dataclasses.replace(STANDARD, factored=False)
    assert config.slot_shapes("a/kernel", (256, 256)) == {"v": (256, 256)}


def test_decay_is_of_the_global_step_less_the_offset():
    config = dataclasses.replace(ADAFACTOR, decay_offset=100.0)
    for step, count in ((100, 1), (101, 2), (1_100_100, 1_100_001)):
        expected = 1 - count**-0.8
        assert float(decay_rate(jnp.int32(step), config)) == pytest.approx(expected, rel=1e-5)


def test_slots_of_a_late_step_keep_nearly_all_of_their_past():
    gradients = [np.full((3,), 1.0, np.float32), np.full((3,), 2.0, np.float32)]
    _, early = update(np.ones(3, np.float32), gradients, step=0)
    _, late = update(np.ones(3, np.float32), gradients, step=1_100_000)
    # Early: decays 0 and 1 - 2**-0.8. Late: both 1 - 1,100,001**-0.8, from zero slots.
    np.testing.assert_allclose(early.v, 1 + 3 * 2**-0.8, rtol=1e-5)
    np.testing.assert_allclose(late.v, 5 * 1_100_001**-0.8, rtol=1e-2)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(5,), (3, 4), (8, 8), (8, 12), (12, 8)]),
    beta1=st.sampled_from([0.0, 0.9]),
    clip=st.sampled_from([None, 1.0, 0.1]),
    scaled=st.sampled_from(["by its size", "excluded", "not at all"]),
    fixed_decay=st.sampled_from([None, 0.7]),
    epsilon1=st.sampled_from([1e-30, 0.5]),
    epsilon2=st.sampled_from([1e-3, 3.0]),
)
def test_updates_follow_the_paper(
    seed, shape, beta1, clip, scaled, fixed_decay, epsilon1, epsilon2
):
    config = dataclasses.replace(
        ADAFACTOR,
        beta1=beta1,
        clipping_threshold=clip,
        multiply_by_parameter_scale=scaled != "not at all",
        exclude_from_parameter_scale=("w",) if scaled == "excluded" else (),
        decay_rate=fixed_decay,
        epsilon1=epsilon1,
        epsilon2=epsilon2,
    )
    start, gradients = random(seed, *shape), [random(seed + n, *shape) for n in (1, 2, 3)]
    ours, _ = update(start, gradients, config, step=10)
    w, v, row, column, m = start.astype(np.float64), 0.0, 0.0, 0.0, 0.0
    for step, gradient in enumerate(gradients, start=10):
        gradient = gradient.astype(np.float64)
        decay, squared = fixed_decay or 1 - (step + 1) ** -0.8, np.square(gradient) + epsilon1
        if len(shape) == 2 and min(shape) >= 8:
            row = decay * row + (1 - decay) * squared.mean(axis=1)
            column = decay * column + (1 - decay) * squared.mean(axis=0)
            second = np.outer(row, column) / row.mean()
        else:
            second = v = decay * v + (1 - decay) * squared
        change = gradient / np.sqrt(second)
        if clip:
            change /= max(1.0, np.sqrt(np.mean(change**2)) / clip)
        change *= 0.1 * (max(np.sqrt(np.mean(w**2)), epsilon2) if scaled == "by its size" else 1.0)
        if beta1:
            m = change = beta1 * m + (1 - beta1) * change
        w = w - change
    np.testing.assert_allclose(ours, w, rtol=2e-5, atol=2e-5)


@pytest.mark.always
@pytest.mark.parametrize(("shape", "axis"), [((8, 12), 0), ((12, 8), 1)])
def test_a_stack_of_matrices_is_updated_as_each_of_them(shape, axis):
    config = dataclasses.replace(
        ADAFACTOR, clipping_threshold=None, multiply_by_parameter_scale=False
    )
    start, gradient = random(0, 3, *shape), random(1, 3, *shape)
    stacked, _ = update(np.moveaxis(start, 0, axis), [np.moveaxis(gradient, 0, axis)], config)
    alone = [update(one, [its], config)[0] for one, its in zip(start, gradient, strict=True)]
    np.testing.assert_allclose(np.moveaxis(stacked, axis, 0), alone, rtol=1e-5, atol=1e-6)


def test_slots_that_are_not_used_are_none():
    slots = make_optimizer(ADAFACTOR).init({"matrix": jnp.ones((8, 8)), "vector": jnp.ones(8)})
    assert slots["matrix"].v is None and slots["matrix"].m is None
    assert slots["vector"].v_row is None and slots["vector"].v_col is None
    assert isinstance(slots["vector"], Slots)
    with_momentum = make_optimizer(dataclasses.replace(ADAFACTOR, beta1=0.9)).init(
        {"matrix": jnp.ones((8, 8))}
    )
    assert with_momentum["matrix"].m.shape == (8, 8)


def test_a_zero_gradient_changes_nothing():
    start = random(0, 8, 8)
    after, _ = update(start, [np.zeros((8, 8), np.float32)])
    np.testing.assert_array_equal(after, start)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), after))
