"""What both stacks generate for 200 real inputs from the same random parameters.

Outputs must be equal token for token; where one is not, the two must tie: at the first place that
differs in greedy decoding, or in the score that the beam search ranks by, within 1e-5.

A beam search begins with beams that do not exist, of log-probability -1e7, where float32 has no
fractions: their continuations tie by the hundred and rounding decides which of them lives on. Where
such a beam ends and no real one does, it is what Mesh TensorFlow returns, and JAX too: it adds in
the same order.
"""

import dataclasses

import flax.traverse_util
import jax
import numpy as np
import pytest

from t0repro.config.decoding import DecodingConfig
from t0repro.evaluation.generation import generate_tokens
from t0repro.model.decoding import generate, search_limit
from t0repro.model.t5 import T5
from t0repro.parameters import naming

from ..helpers.tiny_models import FLOAT32, model_config
from .conftest import decode_by_mesh

pytestmark = pytest.mark.mtf

TIE = 1e-5
INPUTS, BATCH = 200, 40
BINDINGS = """
include 'defaults.gin'
include 'models/t5.1.1.small.gin'
utils.get_variable_dtype.activation_dtype = 'float32'
utils.get_variable_dtype.master_dtype = 'float32'
num_layers = 2
num_heads = 4
d_kv = 16
d_model = 64
d_ff = 96
"""
GREEDY = DecodingConfig(max_length=16, prefilter=2)
BEAM = dataclasses.replace(GREEDY, beam_size=4)
# Name -> the configuration. A search of 0.1 * longest + 2 steps ends before there is no room left.
RUNS = {
    "greedy": GREEDY,
    "greedy, as long as the inputs": dataclasses.replace(GREEDY, max_length=None),
    "4 beams": BEAM,
    "2 beams without length penalty": dataclasses.replace(BEAM, beam_size=2, alpha=0.0),
    "6 beams of few steps": dataclasses.replace(
        BEAM, beam_size=6, alpha=1.0, length_multiplier=0.1, length_constant=2.0
    ),
    "3 beams with little room": dataclasses.replace(BEAM, beam_size=3, max_length=3),
}


@pytest.fixture(scope="module")
def decoded(tmp_path_factory) -> dict[str, np.ndarray]:
    """Mesh TensorFlow's inputs, variables and outputs."""
    runs = [_arguments(config) for config in RUNS.values()]
    return decode_by_mesh(
        tmp_path_factory.mktemp("decoded"),
        inputs=INPUTS,
        bindings=BINDINGS,
        batch_size=BATCH,
        runs=runs,
    )


def _arguments(config: DecodingConfig) -> dict:
    return {
        "beam_size": config.beam_size,
        "alpha": config.alpha,
        "decode_length_multiplier": config.length_multiplier,
        "decode_length_constant": config.length_constant,
        "max_decode_length": config.max_length,
    }


@pytest.fixture(scope="module")
def model(decoded) -> tuple[T5, dict]:
    """The model with Mesh TensorFlow's variables."""
    params = {
        naming.mtf_to_path(name.removeprefix("variables/")): jax.numpy.asarray(x)
        for name, x in decoded.items()
        if name.startswith("variables/")
    }
    config = model_config(
        num_encoder_layers=2,
        num_decoder_layers=2,
        d_model=64,
        d_ff=96,
        num_heads=4,
        d_kv=16,
        vocab_size=params["token_embedder/embedding"].shape[0],
        relative_attention_num_buckets=32,
    )
    return T5(config, FLOAT32), flax.traverse_util.unflatten_dict(params, sep="/")


def test_the_outputs_are_worth_comparing(decoded):
    greedy = decoded["outputs/0"]
    assert len({tuple(row) for row in greedy.tolist()}) > 40
    lengths = np.argmax(greedy == 1, axis=1)
    assert len(set(lengths.tolist())) > 3


@pytest.mark.parametrize("name", RUNS)
def test_generated_tokens_are_mesh_tensorflows(decoded, model, name):
    config, theirs = RUNS[name], decoded[f"outputs/{list(RUNS).index(name)}"]
    network, params = model
    inputs = decoded["inputs"]
    length = config.max_length or inputs.shape[1]
    rows = generate_tokens(params, network, inputs, config, length=length, batch_size=BATCH)
    ours = np.zeros_like(theirs)
    for target, row in zip(ours, rows, strict=True):
        target[: len(row)] = row
    different = np.flatnonzero((ours != theirs).any(axis=1))
    for row in different:
        gap = _gap(network, params, inputs[row], ours[row], theirs[row], config)
        assert gap < TIE, (name, int(row), ours[row], theirs[row])
    assert len(different) <= 2


@pytest.mark.parametrize("name", [name for name, config in RUNS.items() if config.beam_size > 1])
def test_scores_of_the_best_beams_are_mesh_tensorflows_to_1e_4(decoded, model, name):
    config, number = RUNS[name], list(RUNS).index(name)
    inputs, (network, params) = decoded["inputs"][:BATCH], model
    limit = search_limit(int(np.count_nonzero(inputs, axis=1).max()), config)
    ours = generate(
        network,
        params,
        inputs,
        config,
        length=config.max_length or inputs.shape[1],
        search_steps=np.full(BATCH, limit, np.int32),
    )
    # Relative: logits reach 100 here, of which 1e-5 is float32's rounding.
    np.testing.assert_allclose(ours.scores, decoded[f"scores/{number}"][:BATCH, 0], 1e-4, 1e-3)


def _gap(model, params, source, ours, theirs, config) -> float:
    """How far apart two outputs are in what the decoding goes by."""
    inputs = jax.numpy.asarray(np.stack([source, source]))
    targets = jax.numpy.asarray(np.stack([ours, theirs]))
    segments = {
        "inputs_segmentation": jax.numpy.minimum(inputs, 1),
        "targets_segmentation": jax.numpy.ones_like(targets),
    }
    logits = model.apply({"params": params}, {"inputs": inputs, "targets": targets, **segments})
    if config.beam_size == 1:
        place = int(np.argmax(ours != theirs))
        return abs(float(logits[0, place, ours[place]] - logits[0, place, theirs[place]]))
    log_p = np.asarray(jax.nn.log_softmax(logits))
    scores = []
    for row, tokens in enumerate((ours, theirs)):
        size = int(np.argmax(tokens == 1)) + 1 if (tokens == 1).any() else len(tokens)
        total = sum(log_p[row, place, tokens[place]] for place in range(size))
        scores.append(total / ((5 + size) / 6) ** config.alpha)
    return abs(scores[0] - scores[1])
