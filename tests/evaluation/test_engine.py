import ast
import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.config.decoding import GREEDY
from t0repro.config.model import DTypePolicy
from t0repro.errors import UserError
from t0repro.evaluation import engine
from t0repro.evaluation.engine import Engine, score_examples, score_pairs
from t0repro.evaluation.generation import generate_tokens
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
@given(st.integers(0, 2**16), st.integers(1, 9), st.randoms())
def test_scores_agree_with_plain_scoring(params, seed, choices, order):
    examples = examples_of(seed, 5, choices)
    order.shuffle(examples)
    scores = score_examples(params, MODEL, examples, None)
    assert scores.dtype == np.float32
    assert per_token(examples, scores, plain_scores(params, examples)).max() <= TOLERANCE


@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
def test_a_score_has_the_same_bits_in_any_order_and_company(params, activation):
    """So many pairs that they fill several batches, one of them with an empty input."""
    model = T5(CONFIG, DTypePolicy("float32", "float32", activation))
    examples, random = examples_of(11, 90, 4, longest=32), np.random.default_rng(0)
    expected = score_examples(params, model, examples, None)
    for _ in range(6):
        some = random.permutation(len(examples))[: random.integers(1, len(examples) + 1)]
        found = score_examples(params, model, [examples[n] for n in some], None)
        assert found.tobytes() == expected[some].tobytes()


def test_a_process_with_64_bit_types_gets_the_same_bits(params):
    examples = examples_of(3, 4, 3)
    scores = score_examples(params, MODEL, examples, None)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(score_examples(params, MODEL, examples, None), scores)


def test_an_input_that_gives_nan_leaves_the_scores_of_the_others(params):
    examples = examples_of(11, 30, 3)
    expected = score_examples(params, MODEL, examples, None)
    token, spoiled = 100, np.zeros(len(examples), bool)  # no example has it
    embedding = params["token_embedder"]["embedding"].at[token].set(np.nan)
    bad = {**params, "token_embedder": {"embedding": embedding}}
    for number in (4, 9, 20):
        length = len(examples[number]["inputs"])
        spoiled[number] = True
        examples[number] = {**examples[number], "inputs": np.full(length, token, np.int32)}
    scores = score_examples(bad, MODEL, examples, None)
    assert np.isnan(scores[spoiled]).all()
    assert scores[~spoiled].tobytes() == expected[~spoiled].tobytes()


@pytest.mark.parametrize("tokens", [1, 600, 5000])
def test_how_many_batches_are_under_way_changes_no_bit(params, tokens):
    pairs = collect_pairs(examples_of(11, 90, 4, longest=32))
    engine = Engine(params, MODEL, tokens_per_batch=tokens)
    scores = np.zeros(len(pairs))
    for found in engine.run(pairs, engine.plan(pairs)):
        scores[found.pairs] = found.scores
    assert scores.tobytes() == score_pairs(params, MODEL, pairs).tobytes()


def test_scores_agree_at_the_sequence_lengths_of_the_run(params):
    examples = examples_of(4, 4, 4)
    lengths = {"inputs": 9, "targets": 3}
    cut = [{name: example[name][: lengths[name]] for name in lengths} for example in examples]
    scores = score_examples(params, MODEL, examples, lengths)
    assert per_token(cut, scores, plain_scores(params, cut)).max() <= TOLERANCE


def test_each_distinct_input_is_encoded_once_and_each_pair_scored_once(params, monkeypatch):
    encoded, decoded = [], []
    encode, decode = engine.encode, engine.decode

    def counting_encode(*arguments):
        encoded.append((arguments[4] > 0).sum())
        return encode(*arguments)

    def counting_decode(*arguments, **options):
        decoded.append((arguments[6] == 1).sum())
        return decode(*arguments, **options)

    monkeypatch.setattr(engine, "encode", counting_encode)
    monkeypatch.setattr(engine, "decode", counting_decode)
    examples = [e for e in examples_of(5, 40, 5)[1:] if len(e["inputs"])]
    pairs = collect_pairs(examples + examples)
    score_pairs(params, MODEL, pairs)
    assert sum(encoded) == len(pairs.inputs) < len(pairs)
    assert sum(decoded) == len(pairs) < 2 * len(examples)


def test_a_choice_without_tokens_scores_zero(params):
    examples = [{"inputs": [5], "targets": []}, {"inputs": [5], "targets": [6, 1]}]
    scores = score_examples(params, MODEL, examples, None)
    assert scores[0] == 0.0 and scores[1] < 0
    assert score_examples(params, MODEL, [], None).shape == (0,)


def test_a_cpu_never_converts_all_that_is_kept(params):
    """XLA would do so to update a slice of a bfloat16 array."""
    half = T5(CONFIG, DTypePolicy("float32", "float32", "bfloat16"))
    kept = engine.make_room(half, 1, 4321)
    inputs, lengths, start = np.ones((1, 2, 32), np.int32), np.ones((1, 2), np.int32), np.int32(0)
    compiled = engine.encode.lower(half, params, kept, inputs, lengths, start).compile()
    assert ",4321," in compiled.as_text()
    assert not re.search(r"f32\[[\d,]*,4321,", compiled.as_text())


def test_scores_under_bfloat16_are_near_those_of_float32(params):
    half = T5(CONFIG, DTypePolicy("float32", "float32", "bfloat16"))
    examples = examples_of(3, 4, 3)
    exact = score_examples(params, MODEL, examples, None)
    np.testing.assert_allclose(score_examples(params, half, examples, None), exact, rtol=0.05)


class OutOfMemory:
    """Takes the place of `encode` on a device that holds `rows` rows."""

    def __init__(self, rows, message="RESOURCE_EXHAUSTED: 12 GB asked for"):
        self.rows, self.message, self.encode, self.tried = rows, message, engine.encode, []

    def __call__(self, model, params, kept, inputs, *rest):
        self.tried.append(inputs.shape[1])
        if inputs.shape[1] > self.rows:
            raise jax.errors.JaxRuntimeError(self.message)
        return self.encode(model, params, kept, inputs, *rest)


def test_a_batch_that_memory_does_not_hold_is_halved_and_said(params, monkeypatch):
    examples = [
        {"inputs": [n] * length, "targets": [n, 1]} for length in (31, 32) for n in range(2, 26)
    ]
    expected = score_examples(params, MODEL, examples, None)
    device, said, rounded_by = OutOfMemory(4), [], []
    monkeypatch.setattr(engine, "encode", device)
    pairs, scores = collect_pairs(examples), np.full(len(examples), np.nan)
    own = Engine(params, MODEL, note_rounding=rounded_by.append)
    with heard_by(said.append):
        for found in own.run(pairs, own.plan(pairs)):
            scores[found.pairs] = found.scores
    np.testing.assert_allclose(pairs.expand_to_examples(scores), expected, atol=1e-5)
    assert said == [
        "Out of memory with 512 input tokens at once: continuing with 256.",
        "Out of memory with 256 input tokens at once: continuing with 128.",
    ]
    assert set(rounded_by) == {"batches that were split to fit the memory"}
    assert device.tried.count(16) == 1  # later batches are halved before they are tried


def test_what_was_scored_before_memory_ran_out_is_not_scored_again(params, monkeypatch):
    examples = examples_of(11, 60, 4, longest=100)
    pairs = collect_pairs(examples)
    own = Engine(params, MODEL, tokens_per_batch=1)
    dispatch, calls = Engine._dispatch, []

    def fails_once(self, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return dispatch(self, *arguments)

    monkeypatch.setattr(Engine, "_dispatch", fails_once)
    with heard_by(lambda text: None):
        scored = [int(pair) for found in own.run(pairs, own.plan(pairs)) for pair in found.pairs]
    assert sorted(scored) == list(range(len(pairs)))


def test_one_row_that_memory_does_not_hold_is_a_users_error(params, monkeypatch):
    monkeypatch.setattr(engine, "encode", OutOfMemory(0))
    with (
        pytest.raises(UserError, match="Not even one input of 32 tokens fits"),
        heard_by(lambda text: None),
    ):
        score_examples(params, MODEL, [{"inputs": [5], "targets": [6, 1]}], None)


def test_another_failure_of_the_device_is_not_taken_for_memory(params, monkeypatch):
    monkeypatch.setattr(engine, "encode", OutOfMemory(0, "INTERNAL: a broken kernel"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        score_examples(params, MODEL, [{"inputs": [5], "targets": [6, 1]}], None)


def test_batches_come_in_the_plans_order_while_the_next_one_is_under_way(params, monkeypatch):
    started = []
    dispatch = Engine._dispatch

    def noting(self, batch, *rest):
        started.append(batch)
        return dispatch(self, batch, *rest)

    monkeypatch.setattr(Engine, "_dispatch", noting)
    examples = [{"inputs": [n] * 8, "targets": [n] * m} for n in range(2, 20) for m in (2, 9, 20)]
    pairs, own = collect_pairs(examples), Engine(params, MODEL)
    plan = own.plan(pairs)
    planned = [batch.pairs[batch.pairs >= 0].tolist() for batch in plan.batches]
    run = own.run(pairs, plan)
    assert next(run).pairs.tolist() == planned[0]
    assert started == list(plan.batches[:2])
    assert [s.pairs.tolist() for s in run] == planned[1:]


def test_a_plan_says_which_programs_are_compiled(params):
    """Fixed shapes: more examples of the same lengths bring no new program."""
    model = T5(dataclasses.replace(MODEL.config, z_loss=0.5), MODEL.dtypes)  # compiled nowhere else
    programs, own = (engine.encode, engine.decode), Engine(params, model)

    def compiled(inputs):
        pairs = collect_pairs(examples_of(7, inputs, 2), None)
        plan = own.plan(pairs)
        before = [program._cache_size() for program in programs]
        for _ in own.run(pairs, plan):
            pass
        new = [p._cache_size() - count for p, count in zip(programs, before, strict=True)]
        return sum(new), len(plan.programs)

    new, planned = compiled(24)
    assert new == planned == 4  # inputs of up to 32 tokens; choices of up to 2, 4 and 8
    assert compiled(60) == (0, planned)


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
    pairs, own = collect_pairs(examples + other), Engine(params, MODEL, misses=True)
    misses = np.full(len(pairs), np.nan)
    for scored in own.run(pairs, own.plan(pairs)):
        misses[scored.pairs] = scored.misses
    expected = [0.0] * len(examples) + [1.0] * len(other)
    assert pairs.expand_to_examples(misses).tolist() == expected


def test_every_program_that_scores_encodes_or_generates_fixes_a_gpus_kernels():
    """Otherwise XLA for GPUs takes those that it measures to be fastest, others on another day."""
    package = Path(engine.__file__).parents[1]
    files = [*package.glob("evaluation/*.py"), *package.glob("model/*decoding.py")]
    trees = [ast.parse(file.read_text()) for file in files]
    programs = [
        ast.unparse(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "jax.jit" in map(ast.unparse, (node.func, *node.args))
    ]
    assert len(programs) >= 10
    # Zeros are no arithmetic.
    zeros = ["functools.partial(jax.jit, static_argnums=(0, 1, 2))"]
    assert [each for each in programs if "FIXED_KERNELS" not in each] == zeros
