"""Generation: the cache, the early end, greedy, sampling and beam search."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t0repro.config.decoding import DecodingConfig
from t0repro.model import decoder_steps, decoding
from t0repro.model.t5 import T5, initial_parameters

from ..helpers.tiny_models import FLOAT32, UMT5, model_config

CONFIG = model_config(num_decoder_layers=2, d_kv=8, vocab_size=24)
TIED = dataclasses.replace(CONFIG, activations=("relu",), logits_from_embedding=True)
PER_LAYER = dataclasses.replace(UMT5, num_decoder_layers=2, d_kv=8, vocab_size=24)
GREEDY = DecodingConfig(prefilter=2)
BEAM = dataclasses.replace(GREEDY, beam_size=3)
INPUTS = jnp.array([[5, 9, 3, 1, 0, 0], [7, 7, 2, 8, 4, 1], [3, 1, 0, 0, 0, 0]], jnp.int32)
LENGTH = 12
ENDING = 73  # a seed whose model ends all three rows within LENGTH


def make(config=CONFIG, seed=0, scale=3.0):
    """A model whose random logits are far enough apart for outputs to vary."""
    model = T5(config, FLOAT32)
    params = initial_parameters(model, jax.random.key(seed))
    return model, jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


APPLY = jax.jit(
    lambda model, params, batch: model.apply({"params": params}, batch), static_argnums=0
)


def logits_of(model, params, inputs, targets):
    return model.apply({"params": params}, {"inputs": inputs, "targets": targets})


def cleaned(tokens):
    """A row up to its first EOS, zeros after it."""
    after = np.cumsum(tokens == 1, axis=-1) - (tokens == 1)
    return np.where(after == 0, tokens, 0)


@pytest.mark.parametrize("config", [CONFIG, TIED, PER_LAYER])
def test_logits_with_the_cache_are_those_of_the_whole_sequence(config):
    model, params = make(config, scale=1.0)
    length = 140  # beyond the distance from which on all positions share a bucket
    targets = jnp.asarray(np.random.default_rng(0).integers(2, 24, (3, length)), jnp.int32)
    expected = logits_of(model, params, INPUTS, targets)
    reads = decoder_steps.read_inputs(model, params, INPUTS)
    cache = decoder_steps.empty_cache(model, 3, length)
    step = jax.jit(decoder_steps.decoder_step, static_argnums=0)
    last = jnp.zeros(3, jnp.int32)
    for position in range(length):
        logits, cache = step(model, params, reads, cache, last[:, None], jnp.int32(position))
        np.testing.assert_allclose(logits[:, 0], expected[:, position], rtol=2e-4, atol=2e-5)
        last = targets[:, position]


@pytest.mark.parametrize("config", [CONFIG, TIED])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_takes_the_likeliest_token_at_each_place_up_to_eos(config, seed):
    model, params = make(config, seed)
    tokens = np.asarray(decoding.generate(model, params, INPUTS, GREEDY, length=LENGTH).tokens)
    by_hand = np.zeros((3, LENGTH), np.int32)
    for position in range(LENGTH):
        batch = {
            "inputs": INPUTS,
            "targets": by_hand,
            "inputs_segmentation": jnp.minimum(INPUTS, 1),
            "targets_segmentation": np.ones_like(by_hand),
        }
        logits = APPLY(model, params, batch)
        by_hand[:, position] = np.argmax(logits[:, position], axis=-1)
    np.testing.assert_array_equal(tokens, cleaned(by_hand))


def test_a_greedy_output_does_not_depend_on_the_other_rows():
    model, params = make()
    together = decoding.generate(model, params, INPUTS, GREEDY, length=LENGTH)
    for row in range(3):
        alone = decoding.generate(model, params, INPUTS[row : row + 1], GREEDY, length=LENGTH)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_decoding_ends_as_soon_as_all_rows_have_their_eos():
    model, params = make(seed=ENDING)
    short = np.asarray(decoding.generate(model, params, INPUTS, GREEDY, length=LENGTH).tokens)
    assert (short == 1).any(axis=1).all(), "the model ends all of these"
    # With room for so much, every place visited would take hours.
    long = decoding.generate(model, params, INPUTS, GREEDY, length=30_000).tokens
    np.testing.assert_array_equal(long[:, :LENGTH], short)
    assert not np.asarray(long[:, LENGTH:]).any()


def test_of_equally_likely_tokens_the_first_is_taken():
    model, params = make()
    head = params["decoder"]["logits_dense"]
    head["kernel"] = jnp.zeros_like(head["kernel"]).at[:, 5:9].set(head["kernel"][:, 5:6])
    tokens = np.asarray(decoding.generate(model, params, INPUTS, GREEDY, length=LENGTH).tokens)
    assert set(tokens.ravel().tolist()) <= {0, 5}


# ---- Sampling ------------------------------------------------------------------------------------


def first_tokens(model, params, config, draws=4000):
    inputs = jnp.tile(INPUTS[:1], (draws, 1))
    return np.asarray(decoding.generate(model, params, inputs, config, length=1).tokens)[:, 0]


def test_sampling_at_temperature_one_draws_from_the_softmax():
    model, params = make(scale=1.5)
    config = dataclasses.replace(GREEDY, temperature=1.0)
    counts = np.bincount(first_tokens(model, params, config), minlength=24)
    logits = logits_of(model, params, INPUTS[:1], np.array([[2]], np.int32))[0, 0]
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    error = np.sqrt(p * (1 - p) / counts.sum()) + 1e-9
    # The largest of 24 deviations, each about normal: five standard errors are never seen.
    assert np.max(np.abs(counts / counts.sum() - p) / error) < 5


def test_temperature_scales_the_noise_and_not_the_logits():
    model, params = make(scale=1.5)
    config = dataclasses.replace(GREEDY, temperature=0.5)
    counts = np.bincount(first_tokens(model, params, config), minlength=24)
    logits = logits_of(model, params, INPUTS[:1], np.array([[2]], np.int32))[0, 0]
    p = np.asarray(jax.nn.softmax(logits / 0.5), np.float64)  # the same in distribution
    error = np.sqrt(p * (1 - p) / counts.sum()) + 1e-9
    assert np.max(np.abs(counts / counts.sum() - p) / error) < 5


def test_top_k_draws_only_among_the_k_likeliest_tokens():
    model, params = make(scale=1.5)
    config = dataclasses.replace(GREEDY, temperature=1.0, keep_top_k=4)
    logits = logits_of(model, params, INPUTS[:1], np.array([[2]], np.int32))[0, 0]
    likeliest = set(np.argsort(-np.asarray(logits))[:4].tolist())
    assert set(first_tokens(model, params, config).tolist()) == likeliest


def test_a_rows_seeds_decide_what_is_drawn():
    model, params = make(scale=1.0)
    config = dataclasses.replace(GREEDY, temperature=1.0)

    def drawn(*seeds):
        seeds = np.array(seeds, np.int32)
        rows = np.repeat(INPUTS[:1], len(seeds), axis=0)
        return np.asarray(
            decoding.generate(model, params, rows, config, length=LENGTH, seeds=seeds).tokens
        )

    first, *others = drawn((5, 0), (5, 1), (0, 5), (6, 0))
    assert all((first != other).any() for other in others)
    np.testing.assert_array_equal(drawn((1, 1), (2, 3), (5, 0), (5, 0))[2:], [first, first])


# ---- Beam search ---------------------------------------------------------------------------------


def best_sequence(model, params, inputs, length, alpha, vocab):
    """The best of all sequences that end within `length` tokens, by trying every one."""
    best = (-np.inf, ())
    for size in range(1, length + 1):
        for body in itertools.product([t for t in range(vocab) if t != 1], repeat=size - 1):
            sequence = np.array([[*body, 1]], np.int32)
            batch = {"inputs": inputs, "targets": sequence}
            batch |= {
                "inputs_segmentation": jnp.minimum(inputs, 1),
                "targets_segmentation": np.ones_like(sequence),
            }
            log_p = jax.nn.log_softmax(APPLY(model, params, batch))
            total = sum(float(log_p[0, i, t]) for i, t in enumerate(sequence[0]))
            best = max(best, (total / ((5 + size) / 6) ** alpha, tuple(sequence[0].tolist())))
    return best


def test_a_beam_wide_enough_finds_the_best_of_all_sequences():
    config = dataclasses.replace(CONFIG, vocab_size=5)
    inputs = jnp.array([[4, 3, 1]], jnp.int32)
    for seed in range(3):
        model, params = make(config, seed, scale=1.5)
        wide = dataclasses.replace(BEAM, beam_size=64, alpha=0.6, prefilter=0)
        found = decoding.generate(model, params, inputs, wide, length=4)
        score, sequence = best_sequence(model, params, inputs, 4, 0.6, 5)
        assert tuple(np.trim_zeros(np.asarray(found.tokens[0]), "b").tolist()) == sequence
        assert float(found.scores[0]) == pytest.approx(score, rel=1e-4)


def test_alpha_divides_a_log_probability_by_the_length_penalty():
    config = dataclasses.replace(CONFIG, vocab_size=5)
    model, params = make(config, seed=0, scale=1.5)
    inputs = jnp.array([[4, 3, 1]], jnp.int32)
    best = []
    for alpha in (0.0, 3.0):
        # With more beams than tokens, one that has ended would go on and win, as it would in Mesh
        # TensorFlow: (1, 1) scores more than (2, 1).
        narrow = dataclasses.replace(BEAM, beam_size=2, alpha=alpha, prefilter=0)
        found = decoding.generate(model, params, inputs, narrow, length=4)
        score, sequence = best_sequence(model, params, inputs, 4, alpha, 5)
        assert tuple(np.trim_zeros(np.asarray(found.tokens[0]), "b").tolist()) == sequence
        assert float(found.scores[0]) == pytest.approx(score, rel=1e-4)
        best.append(sequence)
    assert len(best[1]) > len(best[0])


def test_rows_that_may_do_fewer_steps_stop_earlier():
    model, params = make()
    params["decoder"]["logits_dense"]["kernel"] = (
        params["decoder"]["logits_dense"]["kernel"].at[:, 1].set(0.0)
    )
    limits = np.array([2, 5, LENGTH], np.int32)
    tokens = decoding.generate(
        model, params, INPUTS, BEAM, length=LENGTH, search_steps=limits
    ).tokens
    last = [np.max(np.flatnonzero(row), initial=-1) + 1 for row in np.asarray(tokens)]
    assert all(n <= limit for n, limit in zip(last, limits, strict=True))


def test_the_limit_of_a_search_is_mesh_tensorflows():
    assert decoding.search_limit(7, BEAM) == 20  # 7 * 1.5 + 10 = 20.5
    assert decoding.search_limit(0, BEAM) == 10


def test_a_beam_that_does_not_exist_loses_the_normalizer_before_it_gains_a_logit():
    logits = np.random.default_rng(0).normal(size=(40, 2, 128)).astype(np.float32)
    alive = np.tile(np.float32([-1e7, -1e7 - 3]), (40, 1))
    log_z = np.asarray(jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    grown = np.asarray(jax.jit(decoding._extend_log_probs)(logits, alive))
    # Tokens tie by whole numbers; the logarithm's last place may move one or two.
    assert (grown != logits + (alive[..., None] - log_z)).mean() < 1e-2
    # As Mesh TensorFlow's source has it, others tie: its graph is optimized before it runs.
    assert (grown != (logits - log_z) + alive[..., None]).mean() > 0.1
