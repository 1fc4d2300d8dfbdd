"""New parameters are those of Flax's own init under one jit, to the last bit, by fewer programs."""

import dataclasses

import jax
import numpy as np
import pytest

from t0repro.model.t5 import T5, initial_parameters

from ..helpers.tiny_models import BFLOAT16, FLOAT32, T5_1_0, T5_1_1, UMT5, model_config

T5X = dataclasses.replace(T5_1_1.arithmetic, rescaled_truncated_normal=True)
MODELS = {
    "1.1": T5(T5_1_1, FLOAT32),
    "1.0, shared towers, recomputed": T5(
        dataclasses.replace(T5_1_0, shared_towers=True, recompute="full"), FLOAT32
    ),
    "decoder only": T5(model_config(model_type="lm", num_encoder_layers=0), FLOAT32),
    "a bias in each layer, T5X's arithmetic": T5(
        dataclasses.replace(UMT5, arithmetic=T5X), BFLOAT16
    ),
}


@pytest.mark.parametrize(
    "name", [*list(MODELS)[:-1], pytest.param(list(MODELS)[-1], marks=pytest.mark.slow)]
)
def test_values_are_those_of_init_to_the_last_bit(name):
    model, key = MODELS[name], jax.random.key(5)
    batch = {feature: np.zeros((1, 1), np.int32) for feature in ("inputs", "targets")}
    expected = jax.jit(lambda: model.init(key, batch)["params"])()
    parameters = initial_parameters(model, key)
    assert jax.tree.structure(parameters) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(parameters), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_share_the_programs_that_draw_them():
    compiled = []

    def note(event, seconds, **_):
        del seconds
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        # A width that no other test has, so that no program is there yet.
        deep = model_config(d_model=18, num_encoder_layers=2, num_decoder_layers=2)
        parameters = initial_parameters(T5(deep, FLOAT32), jax.random.key(0))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(jax.tree.leaves(parameters)) == 52
    # Scales, the embedding, queries, keys and values, outputs, three kernels, the logits, biases.
    assert 0 < len(compiled) <= 10
