"""Attention in blocks of queries equals attention with its whole matrix, gradients included."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from t0repro.model import blockwise_attention as blockwise
from t0repro.model.layers import INVISIBLE, attention_weights
from t0repro.model.t5 import T5, initial_parameters
from t0repro.partitioning import memory
from t0repro.training.train_step import loss_and_gradients

from .. import tiny_models as tiny

SLOW = pytest.mark.slow  # each compiles two steps


def whole(query, key, value, position_bias, visibility):
    """The oracle: JAX's own gradient of the same arithmetic on whole matrices."""
    bias = visibility if position_bias is None else position_bias + visibility
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key) + bias.astype(query.dtype)
    weights = attention_weights(logits).astype(value.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value)


def arrays(seed, batch, heads, length, keys, *, biased=True):
    """Query, key, value, position bias and a visibility in which some queries see nothing."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, size, 4) for size in (length, keys, keys)]
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    bias = rng.normal(size=(1, heads, length, keys)).astype(np.float32) if biased else None
    visible = rng.random((batch, 1, length, keys)) < 0.6
    visible[0, :, 0] = False
    visibility = np.where(visible, 0, INVISIBLE).astype(np.float32)
    return jax.tree.map(jnp.asarray, (query, key, value, bias, visibility))


def values_and_gradients(function, *given):
    *learned, visibility = given
    cotangent = np.random.default_rng(0).normal(size=given[0].shape)

    @jax.jit
    def both(*learned):
        y, pull_back = jax.vjp(lambda *learned: function(*learned, visibility), *learned)
        return y, pull_back(jnp.asarray(cotangent, y.dtype))

    return both(*learned)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 3),
    heads=st.integers(1, 2),
    length=st.integers(2, 9),
    keys=st.integers(1, 9),
    blocks=st.integers(2, 5),
    biased=st.booleans(),
)
def test_values_and_gradients_are_those_of_the_whole_matrix(
    seed, batch, heads, length, keys, blocks, biased
):
    given_ = arrays(seed, batch, heads, length, keys, biased=biased)
    blocks = min(blocks, length)
    found = values_and_gradients(lambda *x: blockwise.blockwise_attention(*x, blocks), *given_)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(compare, found, values_and_gradients(whole, *given_))


def test_bfloat16_keeps_its_types_and_differs_by_its_rounding():
    query, key, value, bias, visibility = arrays(1, 2, 2, 8, 8)
    given_ = (query, key, jnp.asarray(value, jnp.bfloat16), jnp.asarray(bias, jnp.bfloat16))
    ours = values_and_gradients(
        lambda *x: blockwise.blockwise_attention(*x, 4), *given_, visibility
    )
    theirs = values_and_gradients(whole, *given_, visibility)

    def compare(one, other):
        assert one.dtype == other.dtype
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())

    jax.tree.map(compare, ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"position_bias_per_layer": True, "recompute": "full"}, marks=pytest.mark.slow
        ),
        pytest.param({"scan_layers": True, "recompute": "minimal"}, marks=pytest.mark.slow),
    ],
    ids=["shared position bias", "position bias per layer, recomputed", "scanned layers"],
)
def test_a_models_loss_and_gradients_are_the_same(monkeypatch, changes):
    """With dropout: what is dropped of the weights is dropped of the values."""
    config = dataclasses.replace(tiny.MODEL, dropout_rate=0.2, **changes)
    model = T5(config, tiny.FLOAT32)
    params = initial_parameters(model, jax.random.key(0))
    (batch,) = tiny.batches(1)

    def gradients(params):
        key = jax.random.key(3)
        return loss_and_gradients(model, params, batch, num_microbatches=2, dropout_key=key)

    def found():
        return jax.jit(lambda params: gradients(params)).lower(params).compile()

    one = found()
    monkeypatch.setattr(memory, "ATTENTION_BLOCK_BYTES", 400)
    blocks = found()
    assert one.as_text() != blocks.as_text()
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)  # noqa: E731
    jax.tree.map(compare, one(params), blocks(params))


def test_a_long_sequence_needs_a_fraction_of_the_memory():
    qkv = [jax.ShapeDtypeStruct((8, 4, 512, 8), jnp.float32)] * 3
    biases = [jax.ShapeDtypeStruct((*axes, 512, 512), jnp.float32) for axes in ((1, 4), (8, 1))]

    def temporaries(function):
        loss = lambda *x: jnp.sum(function(*x))  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*qkv, *biases).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    matrix = 4 * 8 * 4 * 512 * 512
    assert temporaries(whole) > matrix
    assert temporaries(lambda *x: blockwise.blockwise_attention(*x, 16)) < matrix / 3


def test_blocks_keep_within_the_bound_and_divide_the_length_if_they_can():
    assert blockwise.number_of_blocks(8, 6, 512, 512) == 1  # 50 MB
    assert blockwise.number_of_blocks(8, 32, 1024, 1024) == 16  # 1 GiB
    assert blockwise.number_of_blocks(8, 32, 1000, 1024) == 20  # 16 would not divide 1,000
    assert blockwise.number_of_blocks(8, 32, 1021, 1021) == 16  # a prime number of queries
    assert blockwise.number_of_blocks(1 << 20, 64, 509, 509) == 509  # no more than queries
