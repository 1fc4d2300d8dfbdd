"""T5X's decoding functions with its arguments: limits, temperatures by row, callbacks, prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.model.t5x_decoding import beam_search, temperature_sample

VOCAB, EOS = 6, 1
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 2, jnp.float32)
# A model in which no output ends.
ENDLESS = LOGITS.at[:, EOS].set(-20.0)


def after(table):
    """Logits that depend on the last token; the cache counts the calls."""

    def tokens_to_logits(state):
        return table[state.cur_token[:, 0]], {"count": state.cache["count"] + 1}

    return tokens_to_logits


def cache(rows):
    return {"count": jnp.zeros(rows)}


FREE = np.zeros((2, 5), np.int32)


def test_a_search_ends_after_a_number_of_steps_or_when_nothing_is_likely():
    tokens, _ = beam_search(FREE, cache(2), after(ENDLESS), EOS, 2, max_decode_step=2)
    assert not np.asarray(tokens)[:, :, 2:].any()
    tokens, _ = beam_search(FREE, cache(2), after(ENDLESS), EOS, 2, min_log_prob=-1e-3)
    assert not np.asarray(tokens)[:, :, 1:].any()  # one step is always done
    whole = beam_search(FREE, cache(2), after(ENDLESS), EOS, 2)
    same = beam_search(FREE, cache(2), after(ENDLESS), EOS, 2, min_log_prob=-1e3)
    np.testing.assert_array_equal(whole.tokens, same.tokens)


def test_each_row_may_have_a_temperature_of_its_own():
    rows, key = np.zeros((64, 5), np.int32), jax.random.PRNGKey(2)
    temperatures = np.repeat(np.float32([0.0, 3.0]), 32)
    options = {"topk": 0, "decode_rng": key}
    tokens, scores = temperature_sample(
        rows, cache(64), after(ENDLESS), EOS, temperature=temperatures, **options
    )
    greedy, _ = temperature_sample(rows, cache(64), after(ENDLESS), EOS, temperature=0.0, **options)
    np.testing.assert_array_equal(tokens[:32], greedy[:32])
    np.testing.assert_array_equal(scores[:32], 0.0)
    assert len(np.unique(np.asarray(tokens[32:, 0]), axis=0)) > 20 and (scores[32:] < 0).all()
    with pytest.raises(ValueError, match="At most one"):
        temperature_sample(rows, cache(64), after(ENDLESS), EOS, topk=2, topp=0.5)


def test_callbacks_see_and_change_the_state_and_the_logits():
    def only_three(logits, state):
        assert state.sequences.shape == (2, 7) and state.ended.shape == (2, 1)
        return jnp.where(jnp.arange(VOCAB) == 3, 0.0, -1e7) + 0.0 * logits

    tokens, _ = temperature_sample(
        FREE, cache(2), after(ENDLESS), EOS, logit_callback_fn=only_three
    )
    np.testing.assert_array_equal(tokens, 3)

    def ended_after_two(state):
        return state.replace(ended=state.ended | (state.step >= 2))

    tokens, _ = temperature_sample(
        FREE, cache(2), after(ENDLESS), EOS, temperature=0.0,
        state_callback_fn=ended_after_two, logit_callback_fn=only_three,
    )  # fmt: skip
    np.testing.assert_array_equal(tokens[0, 0], [3, 3, 0, 0, 0])


def test_an_eos_inside_a_prompt_ends_nothing():
    prompt = np.array([[0, 4, EOS, 5, 0], [0, 4, 0, 0, 0]], np.int32)
    tokens, _ = temperature_sample(prompt, cache(2), after(ENDLESS), EOS, temperature=0.0)
    shown = np.asarray(tokens)[0, 0]
    assert shown[:3].tolist() == [4, EOS, 5] and shown[3:].any()
    free = np.asarray(tokens)[1, 0]
    expected, last = [], 4
    for _ in range(4):
        last = int(np.asarray(ENDLESS)[last].argmax())
        expected.append(last)
    assert free.tolist() == [4, *expected]
    tokens, _ = temperature_sample(
        prompt, cache(2), after(ENDLESS), EOS, temperature=0.0, max_decode_steps=1
    )
    assert np.asarray(tokens)[1, 0, 1] == expected[0] and not np.asarray(tokens)[1, 0, 2:].any()
