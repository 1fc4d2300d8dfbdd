import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.config.model import Activation
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.dropout import Dropout
from t0repro.model.full_attention import attention_weights
from t0repro.model.layers import Embedding, activation, relative_position_bucket

from ..helpers.tiny_models import model_config

FLOAT32 = jnp.dtype("float32")


def mesh_bucket(offset, bidirectional, num_buckets, max_distance):
    """Mesh TensorFlow's formula for one offset, an operation at a time in float32."""
    bucket, distance = 0, -offset
    if bidirectional:
        num_buckets //= 2
        bucket += num_buckets if distance < 0 else 0
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    max_exact = num_buckets // 2
    if distance < max_exact:
        return bucket + distance
    scaled = np.log(np.float32(distance) / np.float32(max_exact))
    scaled = np.float32(scaled) / np.float32(math.log(max_distance / max_exact))
    scaled = scaled * np.float32(num_buckets - max_exact)
    return bucket + min(max_exact + int(scaled), num_buckets - 1)


@given(
    offset=st.integers(-100_000, 100_000),
    bidirectional=st.booleans(),
    num_buckets=st.sampled_from([8, 16, 32, 64]),
    max_distance=st.sampled_from([40, 128, 256]),
)
def test_relative_position_bucket_is_mesh_tensorflows_formula(
    offset, bidirectional, num_buckets, max_distance
):
    offsets = np.array([offset], np.int32)
    (bucket,) = relative_position_bucket(offsets, bidirectional, num_buckets, max_distance)
    assert bucket == mesh_bucket(offset, bidirectional, num_buckets, max_distance)


@given(bidirectional=st.booleans(), num_buckets=st.sampled_from([8, 16, 32, 64]))
def test_buckets_cover_the_range_and_grow_with_distance(bidirectional, num_buckets):
    past = relative_position_bucket(-np.arange(2049, dtype=np.int32), bidirectional, num_buckets)
    assert past[0] == 0 and np.all(np.diff(past) >= 0)
    both = relative_position_bucket(
        np.arange(-2048, 2049, dtype=np.int32), bidirectional, num_buckets
    )
    # With both directions, 0 and "0 to the right" are one offset: one bucket is never used.
    assert len(np.unique(both)) == num_buckets - bidirectional
    assert both.min() == 0 and both.max() == num_buckets - 1


def test_gelu_is_the_tanh_approximation():
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    expected = x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(activation("gelu")(jnp.asarray(x)), expected, atol=1e-6)


def test_exact_gelu_weighs_by_the_normal_distribution():
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    expected = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    np.testing.assert_allclose(activation("gelu_exact")(jnp.asarray(x)), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_silu_and_swish_are_x_times_its_sigmoid(name):
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    np.testing.assert_allclose(activation(name)(jnp.asarray(x)), x / (1 + np.exp(-x)), atol=1e-6)


def test_every_activation_of_a_configuration_is_there():
    for name in get_args(Activation):
        assert np.isfinite(activation(name)(jnp.linspace(-4, 4, 9))).all()


@pytest.mark.parametrize("name", get_args(Activation))
def test_an_activation_in_bfloat16_is_rounded_once_on_a_cpu(name):
    x = jnp.linspace(-4, 4, 999).astype(jnp.bfloat16)
    exact = activation(name)(x.astype(jnp.float32))
    np.testing.assert_array_equal(activation(name)(x), exact.astype(jnp.bfloat16))


def test_ids_outside_the_vocabulary_have_zero_embeddings():
    embedding = Embedding(model_config(vocab_size=4, d_model=3), FLOAT32)
    variables = embedding.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    vectors = embedding.apply(variables, jnp.array([[-1, -4, 4, 3]]))
    np.testing.assert_array_equal(vectors[0, :3], np.zeros((3, 3)))
    np.testing.assert_array_equal(vectors[0, 3], variables["params"]["embedding"][3])


def test_dropout_draws_once_for_all_positions_and_keeps_the_mean():
    x = jnp.ones((64, 7, 128))
    y = Dropout(0.25, -2).apply({}, x, deterministic=False, rngs={"dropout": jax.random.key(0)})
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
    np.testing.assert_allclose(np.unique(y), [0.0, 1 / 0.75], rtol=1e-6)
    # 8,192 draws: the mean's standard deviation is 0.0064.
    assert abs(float(jnp.mean(y)) - 1.0) < 0.03


@pytest.mark.parametrize(("rate", "deterministic"), [(0.5, True), (0.0, False)])
def test_dropout_that_is_off_returns_its_input(rate, deterministic):
    x = jnp.arange(6.0).reshape(1, 2, 3)
    assert Dropout(rate, -2).apply({}, x, deterministic=deterministic) is x


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_attention_weights_sum_to_one_where_something_is_visible(seed):
    logits = 5 * jax.random.normal(jax.random.key(seed), (1, 2, 4, 8))
    logits = logits.at[..., 5:].add(-1e9)
    weights = attention_weights(logits)
    np.testing.assert_allclose(weights.sum(-1), np.ones((1, 2, 4)), rtol=1e-5)
    assert not weights[..., 5:].any()


def test_attention_weights_are_one_each_where_nothing_is_visible():
    logits = jax.random.normal(jax.random.key(0), (1, 1, 1, 8)) - 1e9
    np.testing.assert_array_equal(attention_weights(logits), np.ones((1, 1, 1, 8)))


def test_masks_show_what_is_in_the_segment_and_not_later():
    segments = jnp.array([[1, 1, 2, 0]])
    place = jnp.arange(4)[None]
    visible = AttentionMask(segments, segments, place, place).matrix()[0, 0]
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(visible, np.array(expected, bool))
