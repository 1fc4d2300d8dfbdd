"""T5X's beam search and sampling, against searches written out in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.config.decoding import DecodingPlan
from t0repro.model.t5 import T5, initial_parameters
from t0repro.model.t5x_decoding import generate

from ..helpers.tiny_models import FLOAT32, model_config

CONFIG = model_config(num_decoder_layers=2, d_kv=8, vocab_size=24)
INPUTS = np.array([[5, 9, 3, 1, 0, 0], [7, 7, 2, 8, 4, 1], [3, 1, 0, 0, 0, 0]], np.int32)
LENGTH, EOS = 7, 1
FREE = np.zeros((3, LENGTH), np.int32)
KEY = np.array([0, 3], np.uint32)
BEAM = DecodingPlan(return_all_decodes=True)
SAMPLE = DecodingPlan("temperature_sample", 5, return_all_decodes=True, topk=0)


@pytest.fixture(scope="module")
def made():
    """A model whose random logits vary, and its log-probabilities of any continuation."""
    model = T5(CONFIG, FLOAT32)
    params = initial_parameters(model, jax.random.key(73))
    params = jax.tree.map(lambda x: x * 3.0 if x.ndim > 1 else x, params)
    apply = jax.jit(lambda batch: model.apply({"params": params}, batch))

    def logits(row, tokens):
        targets = np.zeros((1, LENGTH + 1), np.int32)
        targets[0, : len(tokens)] = tokens
        targets[0, len(tokens)] = 2  # a token, so that the position is not padding
        return np.asarray(apply({"inputs": INPUTS[row : row + 1], "targets": targets}))[
            0, len(tokens)
        ].astype(np.float64)

    return model, params, logits


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def padded(tokens):
    return [*tokens, *[0] * (LENGTH - len(tokens))]


def searched(logits, row, beams, alpha, prompt=()):
    """The beam search of T5X on lists: (score, tokens) of each beam, worst first."""
    live, finished = [(0.0, [])], []

    def penalty(length):
        return ((5 + length) / 6) ** alpha

    for position in range(LENGTH):
        if len(finished) == beams and finished[0][0] > live[-1][0] / penalty(LENGTH + 1):
            break
        if position < len(prompt):
            live = [(0.0, [*live[-1][1], prompt[position]])]
            continue
        grown = [
            (log_p + step, [*tokens, token])
            for log_p, tokens in live
            for token, step in enumerate(log_softmax(logits(row, tokens)))
        ]
        best = sorted(grown)[-2 * beams :]
        live = [item for item in best if item[1][-1] != EOS][-beams:]
        ended = [(log_p / penalty(position + 1), t) for log_p, t in best if t[-1] == EOS]
        finished = sorted(finished + ended)[-beams:]
    return finished or live


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_beam_search_finds_what_one_on_lists_finds(made, beams, alpha):
    model, params, logits = made
    for row in range(3):
        # One row at a time: a row continues as long as any of its batch does.
        plan = dataclasses.replace(BEAM, num_decodes=beams, alpha=alpha)
        decodes = generate(model, params, INPUTS[row : row + 1], FREE[:1], plan, KEY)
        expected = searched(logits, row, beams, alpha)
        got = decodes.tokens[0, -len(expected) :].tolist()
        assert got == [padded(tokens) for _, tokens in expected]
        scores = decodes.scores[0, -len(expected) :]
        np.testing.assert_allclose(scores, [score for score, _ in expected], rtol=2e-5)


def test_a_prompt_is_kept_and_costs_nothing(made):
    model, params, logits = made
    targets = np.array([[4, 6, EOS, 0, 0, 0, 0]], np.int32)
    plan = dataclasses.replace(BEAM, num_decodes=2, prompt_with_targets=True)
    decodes = generate(model, params, INPUTS[:1], targets, plan, KEY)
    expected = searched(logits, 0, 2, 0.6, prompt=(4, 6))
    assert decodes.tokens[0].tolist() == [padded(tokens) for _, tokens in expected]
    np.testing.assert_allclose(decodes.scores[0], [score for score, _ in expected], rtol=2e-5)


def test_max_decode_len_shortens_the_search(made):
    model, params, _ = made
    plan = dataclasses.replace(BEAM, max_decode_len=3)
    assert generate(model, params, INPUTS, FREE, plan, KEY).tokens.shape == (3, 1, 3)


@pytest.mark.parametrize("plan", [dict(topk=1), dict(temperature=0.0)])
def test_topk_1_and_temperature_0_are_greedy_with_a_score_of_0(made, plan):
    model, params, logits = made
    plan = dataclasses.replace(SAMPLE, num_decodes=1, **plan)
    decodes = generate(model, params, INPUTS, FREE, plan, KEY)
    np.testing.assert_allclose(decodes.scores, 0.0, atol=1e-6)
    unscaled = dataclasses.replace(plan, rescale_log_probs=False)
    scores = generate(model, params, INPUTS, FREE, unscaled, KEY).scores
    for row in range(3):
        tokens, log_p = [], 0.0
        while len(tokens) < LENGTH and EOS not in tokens:
            step = log_softmax(logits(row, tokens))
            tokens.append(int(step.argmax()))
            log_p += step.max()
        assert decodes.tokens[row, 0].tolist() == padded(tokens)
        np.testing.assert_allclose(scores[row, 0], log_p, rtol=2e-5)


def scaled(logits, plan):
    """Log-probabilities that a plan samples from: temperature, then top-k or top-p."""
    logits = logits / plan.temperature
    order = np.argsort(-logits)
    if plan.topk:
        logits[order[plan.topk :]] = -1e7
    if plan.topp:
        probs = np.exp(log_softmax(logits))[order]
        logits[order[np.cumsum(probs) - probs >= plan.topp]] = -1e7
    return log_softmax(logits)


@pytest.mark.parametrize(
    "options", [dict(temperature=1.5), dict(topk=3), dict(topp=0.6), dict(topp=0.6, temperature=2)]
)
def test_a_samples_score_is_the_log_probability_it_was_drawn_with(made, options):
    model, params, logits = made
    plan = dataclasses.replace(SAMPLE, **{"topk": 0, **options})
    decodes = generate(model, params, INPUTS, FREE, plan, KEY)
    assert np.all(np.diff(decodes.scores, axis=1) >= 0)
    checked = 0
    for row in range(3):
        for tokens, score in zip(decodes.tokens[row].tolist(), decodes.scores[row], strict=True):
            end = tokens.index(EOS) + 1 if EOS in tokens else LENGTH
            assert not any(tokens[end:])
            if 0 in tokens[:end]:
                continue  # drawn as a token; the whole sequence would take it for padding
            checked += 1
            steps = [scaled(logits(row, tokens[:at]), plan)[tokens[at]] for at in range(end)]
            assert min(steps) > -100  # nothing was drawn that was to be dropped
            np.testing.assert_allclose(score, sum(steps), rtol=2e-5, atol=1e-5)
    assert checked > 8


def test_samples_follow_the_key_and_differ_from_each_other(made):
    model, params, _ = made

    def tokens(key):
        return np.asarray(generate(model, params, INPUTS, FREE, SAMPLE, key).tokens)

    np.testing.assert_array_equal(tokens(KEY), tokens(KEY))
    assert (tokens(KEY) != tokens(jax.random.PRNGKey(4))).any()
    assert len(np.unique(tokens(KEY)[0], axis=0)) > 1


def test_first_tokens_are_drawn_with_the_models_probabilities(made):
    model, params, logits = made
    plan = dataclasses.replace(SAMPLE, num_decodes=4000)
    firsts = generate(model, params, INPUTS[:1], FREE[:1, :1], plan, KEY).tokens[0, :, 0]
    shares = np.bincount(np.asarray(firsts), minlength=24) / 4000
    # Four standard deviations of a share of 4000 draws.
    np.testing.assert_allclose(shares, np.exp(log_softmax(logits(0, []))), atol=0.032)


def test_max_decode_steps_count_from_the_end_of_the_prompt(made):
    model, params, _ = made
    targets = jnp.asarray([[4, 6, EOS, 0, 0, 0, 0], [5, EOS, 0, 0, 0, 0, 0]], jnp.int32)
    plan = dataclasses.replace(SAMPLE, max_decode_steps=2, prompt_with_targets=True)
    tokens = np.asarray(generate(model, params, INPUTS[:2], targets, plan, KEY).tokens)
    assert (tokens[0, :, :2] == [4, 6]).all() and (tokens[1, :, 0] == 5).all()
    assert not tokens[0, :, 4:].any() and not tokens[1, :, 3:].any() and tokens[0, :, 2].all()
