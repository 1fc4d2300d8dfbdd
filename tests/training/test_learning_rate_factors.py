"""T5X's learning-rate factors against the same formulas in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t0repro.errors import UserError
from t0repro.training.schedules import FACTORS, create_learning_rate_scheduler

STEPS = [0, 1, 9, 10, 11, 99, 100, 101, 1000, 12345, 1_112_200]


def rate(step, **arguments):
    return float(create_learning_rate_scheduler(jnp.float32(step), 0, **arguments))


def in_float64(step, base=0.5, warmup=1000, decay=0.5, every=20000, cycle=100000):
    """Each factor by hand: T5X's formulas, in Python's floats."""
    return {
        "constant": base,
        "linear_warmup": min(1.0, step / warmup),
        "linear_decay": base * min(step / warmup, 1 + decay * (warmup - step)),
        "rsqrt_decay": 1 / math.sqrt(max(step, warmup)),
        "rsqrt_normalized_decay": math.sqrt(warmup) / math.sqrt(max(step, warmup)),
        "decay_every": decay ** (step // every),
        "cosine_decay": max(
            0.0, 0.5 * (1 + math.cos(math.pi * (max(0.0, (step - warmup) / cycle) % 1.0)))
        ),
    }


@given(
    st.lists(st.sampled_from(sorted(FACTORS)), min_size=1, max_size=4),
    st.integers(0, 2_000_000),
    st.integers(0, 1_100_000),
)
def test_any_product_of_factors_is_that_of_the_formulas(names, step, offset):
    values = [in_float64(max(0, step - offset))[name] for name in names]
    # A cosine is a difference of two numbers near one, so its error is float32's of one.
    error = 2e-6 * math.prod(max(1.0, abs(value)) for value in values)
    got = rate(step, factors=" * ".join(names), step_offset=offset)
    assert got == pytest.approx(max(math.prod(values), 1e-8), rel=2e-6, abs=error)


def test_the_pretraining_schedule_is_mesh_tensorflows_rsqrt():
    arguments = {
        "factors": "constant * rsqrt_decay",
        "base_learning_rate": 1.0,
        "warmup_steps": 10000,
    }
    rates = [rate(step, **arguments) for step in STEPS]
    np.testing.assert_allclose(rates, [max(step, 10000) ** -0.5 for step in STEPS], rtol=1e-7)


def test_a_product_never_falls_below_the_minimum():
    falling = {"factors": "linear_decay", "base_learning_rate": 1.0, "warmup_steps": 10}
    assert rate(1000, **falling) == pytest.approx(1e-8)
    assert rate(1000, **falling, min_learning_rate=1e-3) == pytest.approx(1e-3)
    assert rate(0, factors="linear_warmup") == pytest.approx(1e-8)


def test_an_unknown_factor_is_named_with_the_nearest():
    with pytest.raises(UserError, match="'rsqrt_decay'"):
        rate(1, factors="constant * rsqr_decay")
    with pytest.raises(UserError, match=r"none is similar; there are 'constant', '.*, \.\.\."):
        rate(1, factors="xyzzy")
