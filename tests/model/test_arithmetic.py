"""Where T5X computes the model otherwise than Mesh TensorFlow: each switch, against numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.helpers.tiny_models as tiny
from t0repro.config.model import Arithmetic
from t0repro.model.dropout import Dropout
from t0repro.model.layers import Embedding, RMSNorm, kernel_initializer, relative_position_bucket
from t0repro.model.t5 import T5

BFLOAT16 = jnp.dtype("bfloat16")


def config(**changes):
    return tiny.model_config(arithmetic=Arithmetic(**changes))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_epsilon_changes_no_bucket_up_to_a_distance_of_2048(bidirectional):
    offsets = np.arange(-2048, 2049, dtype=np.int32)
    plain = relative_position_bucket(offsets, bidirectional)
    ours = relative_position_bucket(offsets, bidirectional, epsilon=True)
    half = 16 if bidirectional else 32
    exact = half // 2
    epsilon = float(np.finfo(np.float32).eps)
    for offset, bucket in zip(offsets.tolist(), ours.tolist(), strict=True):
        distance = abs(offset) if bidirectional else max(-offset, 0)
        by_hand = distance
        if distance >= exact:
            scaled = math.log(distance / exact + epsilon) / math.log(128 / exact)
            by_hand = min(exact + int(scaled * (half - exact)), half - 1)
        assert bucket == by_hand + (half if bidirectional and offset > 0 else 0), offset
    np.testing.assert_array_equal(plain, ours)


def test_a_norm_is_rounded_before_its_scale_or_after():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), BFLOAT16)
    scale = np.linspace(0.3, 3, 16).astype(np.float32)
    as_float = np.asarray(x, np.float32)
    normalized = as_float / np.sqrt((as_float**2).mean(-1, keepdims=True) + 1e-6)

    def norm(**changes):
        return RMSNorm(config(**changes), BFLOAT16).apply({"params": {"scale": scale}}, x)

    def rounded(values):
        return jnp.asarray(values, BFLOAT16)

    np.testing.assert_array_equal(norm(), rounded(normalized * scale))
    t5x = rounded(normalized) * rounded(scale)
    np.testing.assert_array_equal(norm(cast_before_norm_scale=True), t5x)
    assert (np.asarray(t5x) != np.asarray(norm())).any()


def test_vocabulary_logits_have_float32_factors_if_asked_for():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 16)), BFLOAT16)
    table = np.random.default_rng(1).normal(size=(128, 16)).astype(np.float32)
    exact = np.asarray(x, np.float64) @ table.T.astype(np.float64) / 4.0

    def error(**changes):
        embedding = Embedding(config(**changes), BFLOAT16)
        logits = embedding.apply({"params": {"embedding": table}}, x, method="attend")
        return np.abs(np.asarray(logits) - exact).max()

    assert error(float32_vocabulary_logits=True) < 1e-5 < 1e-3 < error()


def test_dropout_without_an_axis_draws_for_every_entry():
    x, key = jnp.ones((3, 40, 5)), {"dropout": jax.random.key(0)}
    shared = np.asarray(Dropout(0.5, -2).apply({}, x, deterministic=False, rngs=key))
    alone = np.asarray(Dropout(0.5, None).apply({}, x, deterministic=False, rngs=key))
    assert (shared == shared[:, :1]).all() and (alone != alone[:, :1]).any()
    assert set(np.unique(alone)) == {0.0, 2.0}


def test_only_the_encoders_outputs_are_dropped_position_by_position():
    batch = {"inputs": jnp.full((2, 6), 5), "targets": jnp.full((2, 4), 7)}
    params = tiny.new_state().params

    def dropped(**changes):
        model = tiny.model(dropout_rate=0.5, arithmetic=Arithmetic(**changes))
        encoded = model.apply(
            {"params": params},
            batch["inputs"],
            jnp.ones((2, 6), jnp.int32),
            deterministic=False,
            rngs={"dropout": jax.random.key(1)},
            method="encode",
        )
        return np.asarray(encoded) == 0

    assert (dropped() == dropped()[:, :1]).all()
    per_position = dropped(encoder_output_dropout_per_position=True)
    assert (per_position != per_position[:, :1]).any()


def test_attention_in_the_activations_type_differs_from_float32_in_bfloat16_alone():
    batch, params = tiny.batches(1)[0], tiny.new_state().params

    def logits(dtypes, **changes):
        arithmetic = Arithmetic(**changes)
        model = T5(dataclasses.replace(tiny.MODEL, arithmetic=arithmetic), dtypes)
        return np.asarray(jax.jit(model.apply)({"params": params}, batch))

    off = {"float32_attention_logits": False}
    np.testing.assert_array_equal(logits(tiny.FLOAT32), logits(tiny.FLOAT32, **off))
    assert (logits(tiny.BFLOAT16) != logits(tiny.BFLOAT16, **off)).any()


@pytest.mark.parametrize("rescaled, deviation", [(True, 1.0), (False, 0.8796)])
def test_initial_kernels_have_the_intended_deviation_or_what_the_cut_leaves_of_it(
    rescaled, deviation
):
    init = kernel_initializer(config(rescaled_truncated_normal=rescaled))
    kernel = np.asarray(init(jax.random.key(0), (64, 4096), jnp.float32))
    assert kernel.std() * 8 == pytest.approx(deviation, rel=0.01)
