"""Generation for many examples: batches by length change neither order nor outputs."""

import dataclasses

import jax
import numpy as np
import pytest

from t0repro.config.decoding import DecodingConfig
from t0repro.evaluation import generation
from t0repro.evaluation.generation import generate_tokens
from t0repro.model import decoding
from t0repro.model.decoding import generate
from t0repro.model.t5 import T5

from .small_model import MODEL, small_parameters

GREEDY = DecodingConfig(1, 0.6, 0.0, -1, 1.5, 10, None, 2, 1)
BEAM = dataclasses.replace(GREEDY, beam_size=2)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, small_parameters())


def inputs_of(*lengths):
    generator = np.random.default_rng(0)
    return [generator.integers(2, 128, length).astype(np.int32) for length in lengths]


def test_outputs_come_in_the_order_of_inputs_as_if_each_were_alone(params):
    inputs, config = inputs_of(3, 20, 7, 22, 0, 5), GREEDY
    found = generate_tokens(params, MODEL, inputs, config, length=6, batch_size=4)
    for source, tokens in zip(inputs, found, strict=True):
        # Four times the same, so that what was compiled for a batch serves here too.
        rows = np.tile(np.pad(source, (0, 24 - len(source))), (4, 1))
        alone = np.asarray(generate(MODEL, params, rows, config, length=6).tokens[0])
        assert tokens == np.trim_zeros(alone, "b").tolist()


def test_a_beam_search_takes_consecutive_examples_and_fills_the_last_batch_up(params):
    inputs = inputs_of(3, 20, 7, 22, 18)
    found = generate_tokens(params, MODEL, inputs, BEAM, length=6, batch_size=4)
    for start, batch in ((0, inputs[:4]), (4, [inputs[4]])):
        rows = np.zeros((4, 24), np.int32)
        for row, source in zip(rows, batch, strict=False):
            row[: len(source)] = source
        tokens = np.asarray(generate(MODEL, params, rows, BEAM, length=6).tokens)
        for number in range(len(batch)):
            assert found[start + number] == np.trim_zeros(tokens[number], "b").tolist()


def test_padding_and_what_is_beyond_the_inputs_length_are_not_read(params):
    (source,) = inputs_of(12)
    cut, padded = source[:8], np.pad(source[:8], (0, 5))
    found = generate_tokens(
        params, MODEL, [source, cut, padded], GREEDY, length=6, inputs_length=8, batch_size=4
    )
    assert found[0] == found[1] == found[2]


def test_no_inputs_give_no_outputs(params):
    assert generate_tokens(params, MODEL, [], GREEDY, length=6) == []


def test_the_limit_of_a_search_is_of_the_consecutive_examples_and_what_fills_them_up():
    config = dataclasses.replace(BEAM, length_multiplier=1.0, length_constant=0)
    rows = inputs_of(3, 9, 4, 2)
    assert generation._search_limits(rows, config, 2).tolist() == [9, 9, 4, 4]
    filled = [*rows[:3], rows[1]]
    assert generation._search_limits(filled, config, 2).tolist() == [9, 9, 9, 9]


def test_input_lengths_are_rounded_to_few():
    assert {generation._round_up_length(n) for n in range(1, 513)} == {
        16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512,
    }  # fmt: skip


def test_batches_whose_inputs_round_to_the_same_length_are_compiled_once(params):
    model = T5(dataclasses.replace(MODEL.config, z_loss=0.5), MODEL.dtypes)  # compiled nowhere else
    before = decoding._sample._cache_size()
    for lengths in ((3, 9, 4, 2, 12), (16, 1, 5), (7, 7)):
        generate_tokens(params, model, inputs_of(*lengths), GREEDY, length=6, batch_size=2)
    assert decoding._sample._cache_size() == before + 1
