import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.config.decoding import GREEDY
from t0repro.config.model import DTypePolicy
from t0repro.errors import UserError
from t0repro.evaluation import engine, packing
from t0repro.evaluation.engine import Engine, score_examples, score_pairs
from t0repro.evaluation.generation import generate_tokens
from t0repro.evaluation.grouping import make_batching
from t0repro.evaluation.pairs import collect_pairs
from t0repro.model.t5 import T5
from t0repro.progress import heard_by

from ..helpers.plain_scoring import row_scores
from .small_model import CONFIG, MODEL, small_parameters

TOLERANCE = 1e-5  # absolute, per target token


@pytest.fixture(scope="module")
def params():
    return small_parameters()


def examples_of(seed, inputs, most_choices, longest=20):
    """Inputs of random lengths, one of them empty, each with choices of random lengths."""
    random = np.random.default_rng(seed)

    def tokens(length):
        return random.integers(2, 100, length).astype(np.int32)

    examples = []
    for number in range(inputs):
        source = tokens(random.integers(1, longest) if number else 0)
        for _ in range(random.integers(1, most_choices + 1)):
            examples.append({"inputs": source, "targets": np.append(tokens(random.integers(6)), 1)})
    return examples + examples[:3]


def plain_scores(params, examples):
    """The same scores by way of one batch in which each example has a row to itself."""
    batch = {}
    for name in ("inputs", "targets"):
        batch[name] = np.zeros((len(examples), max(1, *(len(e[name]) for e in examples))), np.int32)
        for row, example in zip(batch[name], examples, strict=True):
            row[: len(example[name])] = example[name]
    return row_scores(params, MODEL, batch)


def per_token(examples, a, b):
    return np.abs(a - b) / [len(example["targets"]) for example in examples]


@settings(max_examples=5)
@given(st.integers(0, 2**16), st.integers(4, 160), st.integers(1, 9), st.randoms())
def test_scores_agree_with_plain_scoring_whatever_batch_size_grouping_and_order(
    params, seed, tokens, choices, order
):
    examples = examples_of(seed, 5, choices)
    order.shuffle(examples)
    scores = score_examples(params, MODEL, examples, None, tokens)
    assert scores.dtype == np.float32
    assert per_token(examples, scores, plain_scores(params, examples)).max() <= TOLERANCE


def test_scores_agree_when_choices_take_several_rows(params, monkeypatch):
    monkeypatch.setattr(packing, "MAX_ROW", 8)
    examples = examples_of(3, 3, 9)
    scores = score_examples(params, MODEL, examples, None, 64)
    assert per_token(examples, scores, plain_scores(params, examples)).max() <= TOLERANCE


def test_scores_agree_at_the_sequence_lengths_of_the_run(params):
    examples = examples_of(4, 4, 4)
    lengths = {"inputs": 9, "targets": 3}
    cut = [{name: example[name][: lengths[name]] for name in lengths} for example in examples]
    scores = score_examples(params, MODEL, examples, lengths)
    assert per_token(cut, scores, plain_scores(params, cut)).max() <= TOLERANCE


def test_each_distinct_input_is_encoded_once_and_each_pair_scored_once(params, monkeypatch):
    encoded, decoded = [], []
    encode, decode = engine.encode, engine.decode

    def counting_encode(model, params, inputs, segments):
        encoded.append(segments.max(axis=-1).sum())
        return encode(model, params, inputs, segments)

    def counting_decode(model, params, memory, segments_read, targets, *rest, **options):
        decoded.append((targets == 1).sum())
        return decode(model, params, memory, segments_read, targets, *rest, **options)

    monkeypatch.setattr(engine, "encode", counting_encode)
    monkeypatch.setattr(engine, "decode", counting_decode)
    examples = examples_of(5, 6, 5)[1:]
    examples = [e for e in examples if len(e["inputs"])]
    pairs = collect_pairs(examples + examples)
    score_pairs(params, MODEL, pairs, 48)
    assert sum(encoded) == len(pairs.inputs) < len(pairs)
    assert sum(decoded) == len(pairs) < 2 * len(examples)


def test_a_choice_without_tokens_scores_zero(params):
    examples = [{"inputs": [5], "targets": []}, {"inputs": [5], "targets": [6, 1]}]
    scores = score_examples(params, MODEL, examples, None)
    assert scores[0] == 0.0 and scores[1] < 0
    assert score_examples(params, MODEL, [], None).shape == (0,)


def test_scores_under_bfloat16_are_near_those_of_float32(params):
    half = T5(CONFIG, DTypePolicy("float32", "float32", "bfloat16"))
    examples = examples_of(3, 4, 3)
    exact = score_examples(params, MODEL, examples, None)
    np.testing.assert_allclose(score_examples(params, half, examples, None), exact, rtol=0.05)


class OutOfMemory:
    """Takes the place of `encode` on a device that holds `rows` rows."""

    def __init__(self, rows, message="RESOURCE_EXHAUSTED: 12 GB asked for"):
        self.rows, self.message, self.encode, self.tried = rows, message, engine.encode, []

    def __call__(self, model, params, inputs, segments):
        self.tried.append(len(inputs))
        if len(inputs) > self.rows:
            raise jax.errors.JaxRuntimeError(self.message)
        return self.encode(model, params, inputs, segments)


def test_a_batch_that_memory_does_not_hold_is_halved_and_said(params, monkeypatch):
    examples = [
        {"inputs": [n] * length, "targets": [n, 1]} for length in (31, 32) for n in range(2, 26)
    ]
    expected = score_examples(params, MODEL, examples, None, 768)
    device, said = OutOfMemory(3), []
    monkeypatch.setattr(engine, "encode", device)
    pairs = collect_pairs(examples)
    with heard_by(said.append):
        scores = score_pairs(params, MODEL, pairs, 768)
    np.testing.assert_allclose(pairs.expand_to_examples(scores), expected, atol=1e-5)
    assert said == [
        "Out of memory with 12 rows of 64 input and 16 target tokens: continuing with 6.",
        "Out of memory with 6 rows of 64 input and 16 target tokens: continuing with 3.",
    ]
    assert device.tried.count(12) == 1  # later batches are halved before they are tried


def test_one_row_that_memory_does_not_hold_is_a_users_error(params, monkeypatch):
    monkeypatch.setattr(engine, "encode", OutOfMemory(0))
    with pytest.raises(UserError, match="Not even one input of 32 input and 16 target tokens fits"):
        score_examples(params, MODEL, [{"inputs": [5], "targets": [6, 1]}], None)


def test_another_failure_of_the_device_is_not_taken_for_memory(params, monkeypatch):
    monkeypatch.setattr(engine, "encode", OutOfMemory(0, "INTERNAL: a broken kernel"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        score_examples(params, MODEL, [{"inputs": [5], "targets": [6, 1]}], None)


def test_batches_come_in_the_plans_order_while_the_next_one_is_under_way(params, monkeypatch):
    started = []
    dispatch = Engine._dispatch

    def noting(self, batch, pairs):
        started.append(batch)
        return dispatch(self, batch, pairs)

    monkeypatch.setattr(Engine, "_dispatch", noting)
    pairs = collect_pairs([{"inputs": [n] * 8, "targets": [n, 1]} for n in range(2, 14)])
    plan = make_batching(pairs, 32)
    run = Engine(params, MODEL).run(pairs, plan)
    assert next(run).pairs.tolist() == plan.batches[0].pairs.tolist()
    assert started == list(plan.batches[:2])
    assert [s.pairs.tolist() for s in run] == [b.pairs.tolist() for b in plan.batches[1:]]


def test_batches_of_the_same_lengths_are_compiled_once(params):
    """Fixed shapes by buckets: more examples of the same lengths bring no new program."""
    model = T5(dataclasses.replace(MODEL.config, z_loss=0.5), MODEL.dtypes)  # compiled nowhere else
    programs = (engine.encode, engine.decode)

    def compiled(inputs):
        pairs = collect_pairs(examples_of(7, inputs, 2), None)
        plan = make_batching(pairs, 64)
        before = [program._cache_size() for program in programs]
        for _ in Engine(params, model).run(pairs, plan):
            pass
        shapes = {(batch.size, batch.inputs_length) for batch in plan.batches}
        new = [p._cache_size() - count for p, count in zip(programs, before, strict=True)]
        return new, len(shapes), len(plan.batches)

    (encoders, decoders), shapes, batches = compiled(24)
    assert encoders == shapes < batches and decoders <= batches
    assert compiled(24)[0] == [0, 0]


def test_misses_are_the_targets_that_greedy_decoding_would_not_choose(params):
    inputs = [example["inputs"] for example in examples_of(3, 4, 2) if len(example["inputs"])]
    greedy = generate_tokens(params, MODEL, inputs, GREEDY, length=4)
    examples = [
        {"inputs": source, "targets": target} for source, target in zip(inputs, greedy, strict=True)
    ]
    # Another last token is one miss, and changes nothing before it.
    other = [
        {**each, "targets": [*each["targets"][:-1], each["targets"][-1] + 1]} for each in examples
    ]
    pairs = collect_pairs(examples + other)
    misses = np.full(len(pairs), np.nan)
    for scored in Engine(params, MODEL, misses=True).run(pairs, make_batching(pairs, 48)):
        misses[scored.pairs] = scored.misses
    expected = [0.0] * len(examples) + [1.0] * len(other)
    assert pairs.expand_to_examples(misses).tolist() == expected
