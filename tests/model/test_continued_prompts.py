"""A model without an encoder continues prompts by T5X's searches, from a cache that read them."""

import dataclasses

import jax
import numpy as np
import pytest

from t0repro.config.decoding import DecodingPlan
from t0repro.model.t5 import T5, initial_parameters
from t0repro.model.t5x_decoding import continue_prompts

from ..config.t5x_trainings import BIDIRECTIONAL, decoder_only_config
from ..helpers.t5x_decoder import continue_by_hand, score_by_hand
from ..helpers.tiny_models import FLOAT32

TEXTS = [[7, 8, 9, 5, 1], [6, 4, 1], [], list(range(2, 12))]
LENGTH = 14
GREEDY = DecodingPlan("temperature_sample", temperature=0.0)


@pytest.fixture(scope="module", params=[False, True], ids=["causal", "prefix"])
def made(request, tmp_path_factory):
    """A model whose outputs vary, its parameters, and whether inputs attend both ways."""
    folder = tmp_path_factory.mktemp("gin")
    model = T5(decoder_only_config(folder, *[BIDIRECTIONAL] * request.param).model, FLOAT32)
    params = initial_parameters(model, jax.random.key(0))
    return model, jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params), request.param


def continued(model, params, plan, texts=TEXTS):
    prompts, both_ways = (np.zeros((len(texts), LENGTH), np.int32) for _ in range(2))
    for row, text in enumerate(texts):
        prompts[row, 1 : len(text) + 1] = text
        both_ways[row, : len(text) + 1] = 1
    tokens, scores = continue_prompts(
        model, plan, params, prompts, both_ways, jax.random.PRNGKey(0)
    )
    return np.asarray(tokens), np.asarray(scores)


@pytest.mark.parametrize("scanned", [False, True])
def test_greedy_outputs_begin_after_each_rows_prompt_and_fill_the_row(made, scanned):
    model, params, both_ways = made
    model = T5(dataclasses.replace(model.config, scan_layers=scanned), FLOAT32)
    tokens, _ = continued(model, params, GREEDY)
    for text, output in zip(TEXTS, tokens[:, 0], strict=True):
        assert np.trim_zeros(output, "b").tolist() == continue_by_hand(
            params, text, LENGTH, both_ways
        )


def test_max_decode_steps_count_after_each_rows_prompt(made):
    model, params, _ = made
    tokens, _ = continued(model, params, dataclasses.replace(GREEDY, max_decode_steps=2))
    whole, _ = continued(model, params, GREEDY)
    np.testing.assert_array_equal(tokens[:, 0, :2], whole[:, 0, :2])
    assert not tokens[:, 0, 2:].any()


@pytest.mark.parametrize("method", ["beam_search", "temperature_sample"])
def test_all_decodes_ascend_by_their_log_probability(made, method):
    """A beam's is divided by the penalty of prompt and output together."""
    model, params, both_ways = made
    # A beam search goes on for the shortest prompt, and beams count what no longer fits their rows.
    texts = [[7, 8, 9], [6, 4, 1]] if method == "beam_search" else TEXTS
    plan = DecodingPlan(method, 3, topk=5, return_all_decodes=True, rescale_log_probs=False)
    tokens, scores = continued(model, params, plan, texts)
    assert tokens.shape == (len(texts), 3, LENGTH) and (np.diff(scores, axis=1) >= 0).all()
    outputs = [
        [cut(each[: LENGTH - len(text)]) for each in row]
        for text, row in zip(texts, tokens, strict=True)
    ]
    pairs = [
        {"inputs": text, "targets": output}
        for text, row in zip(texts, outputs, strict=True)
        for output in row
    ]
    expected = score_by_hand(params, pairs, both_ways).reshape(scores.shape)
    if method == "beam_search":
        lengths = 3 + np.array([[len(each) for each in row] for row in outputs])
        # Where no beam has ended, it is the plain log-probability.
        ended = np.array([[any(1 in each for each in row)] for row in outputs])
        expected = np.where(ended, expected / ((5 + lengths) / 6) ** 0.6, expected)
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def cut(output):
    ends = np.flatnonzero(output == 1)
    return output[: ends[0] + 1] if ends.size else output
