"""T5X's decoding functions with its arguments: limits, temperatures by row, callbacks, prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.model.t5x_decoding import beam_search, temperature_sample

VOCAB, EOS = 6, 1
LOGITS = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
# A model in which no output ends.
ENDLESS = LOGITS.copy()
ENDLESS[:, EOS] = -20.0


def after(table):
    """Logits that depend on the last token; the cache counts the calls."""

    def tokens_to_logits(state):
        return jnp.asarray(table)[state.cur_token[:, 0]], {"count": state.cache["count"] + 1}

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


@pytest.mark.parametrize("max_decode_step", [-1, 2])
def test_a_search_continues_prompts_whose_cache_is_filled(max_decode_step):
    """Two prompts of other lengths: what T5X's beam_search returns for them."""
    seen = []

    def tokens_to_logits(state):
        seen.append(state)
        likes = jnp.array(
            [
                [-1e7, -1e10, -0.1, -0.9, -1e4, -1e4, -1e4, -1e4],
                [-1e7, -1.0, -0.9, -0.1, -1e4, -1e4, -1e4, -1e4],
            ]
        )
        return jnp.repeat(likes, 2, axis=0), state.cache

    prompts = np.array([[0, 7, 0, 0, 0], [0, 4, 5, 0, 0]], np.int32)
    cache = {"cached_bias": np.ones((1, 3)), "index": np.ones(2), "key": np.ones((2, 3))}
    with jax.disable_jit():
        tokens, scores = beam_search(
            prompts,
            cache,
            tokens_to_logits,
            eos_id=1,
            num_decodes=2,
            alpha=0.0,
            max_decode_step=max_decode_step,
            initial_index=np.array([1, 2]),
        )
    assert seen[0].cur_token.ravel().tolist() == [7, 7, 5, 5]
    shapes = {name: x.shape for name, x in seen[0].cache.items()}
    assert shapes == {"cached_bias": (1, 3), "index": (4,), "key": (4, 3)}
    # In the first row nothing ends, so it holds what the steps allowed.
    end = [2, 2] if max_decode_step < 0 else [0, 0]
    assert tokens.tolist() == [
        [[7, 3, 2, *end], [7, 2, 2, *end]],
        [[4, 5, 3, 1, 0], [4, 5, 1, 0, 0]],
    ]
    assert (np.diff(scores) >= 0).all()


@pytest.mark.parametrize(("topk", "topp"), [(3, 0.0), (0, 0.6), (0, 0.0)])
def test_traced_options_sample_as_numbers_do(topk, topp):
    likes = jnp.log(jnp.array([[0.3, 0.01, 0.1, 0.59]]))

    def sample(temperature, topk, topp, steps):
        return temperature_sample(
            np.zeros((1, 12), np.int32),
            {},
            lambda state: (jnp.repeat(likes, 4, axis=0), {}),
            eos_id=99,
            num_decodes=4,
            temperature=temperature,
            topk=topk,
            topp=topp,
            max_decode_steps=steps,
        )

    plain, traced = sample(0.8, topk, topp, 9), jax.jit(sample)(0.8, topk, topp, 9)
    np.testing.assert_array_equal(plain.tokens, traced.tokens)
    np.testing.assert_allclose(plain.scores, traced.scores, rtol=1e-5)
