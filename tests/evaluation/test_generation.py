"""Generation for many examples: batches by length change neither order nor outputs.

In the models here, every token but for a few bits of its logit ties with another, so that rounding
decides between the two.
"""

import dataclasses

import jax
import numpy as np
import pytest

from t0repro.config.decoding import DecodingConfig, DecodingPlan
from t0repro.evaluation import generation
from t0repro.evaluation.generation import generate_tokens
from t0repro.evaluation.model_functions import ModelFunctions
from t0repro.model import decoding
from t0repro.model.decoding import generate
from t0repro.model.t5 import T5, initial_parameters
from t0repro.progress import heard_by

from ..helpers import tiny_models as tiny
from ..helpers.near_ties import near_ties
from .small_model import MODEL, small_parameters

GREEDY = DecodingConfig(prefilter=2)
SAMPLING = dataclasses.replace(GREEDY, temperature=1.0, keep_top_k=7)
BEAM = dataclasses.replace(GREEDY, beam_size=2)
WIDE = tiny.model(d_model=64, d_ff=96, num_heads=4, d_kv=16)
CAUSAL = tiny.model(d_model=64, d_ff=96, num_heads=4, d_kv=16, num_encoder_layers=0)


@pytest.fixture(scope="module")
def params():
    return near_ties(small_parameters())


def inputs_of(*lengths):
    generator = np.random.default_rng(0)
    return [generator.integers(2, 128, length).astype(np.int32) for length in lengths]


def test_outputs_come_in_the_order_of_inputs_as_if_each_were_alone(params):
    inputs, config = inputs_of(3, 20, 7, 22, 0, 5), GREEDY
    found = generate_tokens(params, MODEL, inputs, config, length=6)
    for source, tokens in zip(inputs, found, strict=True):
        # As often as a batch has rows, so that what was compiled for it serves here too.
        rows = np.tile(np.pad(source, (0, 64 - len(source))), (32, 1))
        alone = np.asarray(generate(MODEL, params, rows, config, length=6).tokens[0])
        assert tokens == np.trim_zeros(alone, "b").tolist()


@pytest.mark.parametrize("model", [WIDE, CAUSAL], ids=["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize("config", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
def test_an_output_is_the_same_in_any_order_company_and_batch_size(model, config):
    params = near_ties(initial_parameters(model, jax.random.key(0)))
    inputs, random = inputs_of(*range(1, 70, 2)), np.random.default_rng(0)
    expected = generate_tokens(params, model, inputs, config, length=5)
    for size in (1, 7, 64):
        some = random.permutation(len(inputs))[: random.integers(1, len(inputs) + 1)]
        given = [inputs[n] for n in some]
        found = generate_tokens(params, model, given, config, length=5, batch_size=size)
        assert found == [expected[n] for n in some]
    # In a program of another shape they are not.
    rows = np.stack([np.pad(each, (0, 128 - len(each))) for each in inputs])
    other = np.asarray(generate(model, params, rows, GREEDY, length=5).tokens)
    if config is GREEDY:
        assert [np.trim_zeros(row, "b").tolist() for row in other] != expected


def test_what_is_sampled_does_not_depend_on_the_process_generator(params):
    inputs = inputs_of(3, 9, 20, 9)
    expected = generate_tokens(params, MODEL, inputs, SAMPLING, length=6)
    with jax.default_prng_impl("rbg"):
        found = generate_tokens(params, MODEL, inputs[:2], SAMPLING, length=6)
    assert found == expected[:2]


def test_equal_inputs_sample_outputs_of_their_own(params):
    (source,) = inputs_of(9)
    found = generate_tokens(params, MODEL, [source] * 5, SAMPLING, length=6)
    assert len({tuple(tokens) for tokens in found}) > 2


@pytest.mark.parametrize("method", ["beam_search", "temperature_sample"])
def test_t5xs_outputs_and_scores_have_the_same_bits_in_any_batch_size_and_order(method):
    params, plan = near_ties(initial_parameters(WIDE, jax.random.key(0))), DecodingPlan(method)
    examples = [
        (n, {"encoder_input_tokens": np.pad(row, (0, 24 - len(row))),
             "decoder_target_tokens": np.zeros(5, np.int32)})
        for n, row in enumerate(inputs_of(*range(1, 24), *range(1, 24)))
    ]  # fmt: skip

    def predicted(some, batch_size):
        functions = ModelFunctions(WIDE, params, plan, batch_size, "encoder_decoder")
        outputs, aux = functions.predict_with_aux(some)
        return dict(outputs), dict(zip(dict(outputs), aux["scores"], strict=True))

    expected = predicted(examples, 8)
    assert predicted(examples[::-1], 3) == expected
    assert predicted(examples[5:9], 1)[0] == {n: expected[0][n] for n in range(5, 9)}


class OutOfMemory:
    """Takes the place of a function on a device that holds so many rows."""

    def __init__(self, function, rows, place):
        self.function, self.rows, self.place = function, rows, place

    def __call__(self, *arguments, **options):
        if len(arguments[self.place]) > self.rows:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 12 GB asked for")
        return self.function(*arguments, **options)


def test_rows_that_memory_does_not_hold_are_decoded_by_halves_and_said(params, monkeypatch):
    inputs, said = inputs_of(3, 20, 7, 22, 5), []
    expected = generate_tokens(params, MODEL, inputs, GREEDY, length=6)
    monkeypatch.setattr(generation, "generate", OutOfMemory(generate, 8, 2))
    with heard_by(said.append):
        found = generate_tokens(params, MODEL, inputs, GREEDY, length=6)
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens in expected]
    assert [text.split(":")[0] for text in said if "memory" in text] == [
        "Out of memory with 32 rows at once", "Out of memory with 16 rows at once",
    ]  # fmt: skip
    monkeypatch.setattr(generation, "generate", OutOfMemory(generate, 0, 2))
    with pytest.raises(jax.errors.JaxRuntimeError), heard_by(said.append):
        generate_tokens(params, MODEL, inputs, GREEDY, length=6)


def test_a_beam_search_takes_consecutive_examples_and_fills_the_last_batch_up(params):
    inputs = inputs_of(3, 20, 7, 22, 18)
    found = generate_tokens(params, MODEL, inputs, BEAM, length=6, batch_size=4)
    for start, batch in ((0, inputs[:4]), (4, [inputs[4]])):
        rows = np.zeros((4, 64), np.int32)
        for row, source in zip(rows, batch, strict=False):
            row[: len(source)] = source
        tokens = np.asarray(generate(MODEL, params, rows, BEAM, length=6).tokens)
        for number in range(len(batch)):
            assert found[start + number] == np.trim_zeros(tokens[number], "b").tolist()


def test_padding_and_what_is_beyond_the_inputs_length_are_not_read(params):
    (source,) = inputs_of(12)
    cut, padded = source[:8], np.pad(source[:8], (0, 5))
    found = generate_tokens(params, MODEL, [source, cut, padded], GREEDY, length=6, inputs_length=8)
    assert found[0] == found[1] == found[2]


def test_no_inputs_give_no_outputs(params):
    assert generate_tokens(params, MODEL, [], GREEDY, length=6) == []


def test_the_limit_of_a_search_is_of_the_consecutive_examples_and_what_fills_them_up():
    config = dataclasses.replace(BEAM, length_multiplier=1.0, length_constant=0)
    rows = inputs_of(3, 9, 4, 2)
    assert generation._search_limits(rows, config, 2).tolist() == [9, 9, 4, 4]
    filled = [*rows[:3], rows[1]]
    assert generation._search_limits(filled, config, 2).tolist() == [9, 9, 9, 9]


def test_batches_whose_inputs_round_to_the_same_length_are_compiled_once(params):
    model = T5(dataclasses.replace(MODEL.config, z_loss=0.5), MODEL.dtypes)  # compiled nowhere else
    before = decoding.generate._cache_size()
    for lengths in ((3, 9, 4, 2, 12), (16, 1, 5), (7, 7)):
        generate_tokens(params, model, inputs_of(*lengths), GREEDY, length=6)
    assert decoding.generate._cache_size() == before + 1
