"""T5X's beam search and temperature sampling, position by position with a cache.

They differ from Mesh TensorFlow's (t0repro.model.decoding) in when a search ends, in the candidates
that compete, and in what a score is; each follows t5x.decoding at cc342d4. A prompt forces the
tokens at its positions. All decodes of a row are returned, sorted so that the best is the last.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.decoding_plan import DecodingPlan
from t0repro.model.decoding import Parameters, decoder_step, empty_cache, read_inputs
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5

_NEVER = -1e7  # T5X's minus infinity: the log-probability of a beam that does not exist
_GREEDY_TEMPERATURE = 1e-4  # at or below it, T5X takes the likeliest token


class Decodes(NamedTuple):
    """Generated targets of each row, by ascending score.

    Attributes:
      tokens: int32 [batch, decodes, length], 0 after the end of an output.
      scores: float32 [batch, decodes]: log-probabilities, after a beam search divided by the
        length penalty.
    """

    tokens: Int[Array, "batch decodes length"]
    scores: Float[Array, "batch decodes"]


def generate(
    model: T5,
    params: Parameters,
    inputs: Int[Array | np.ndarray, "batch inputs_length"],
    targets: Int[Array | np.ndarray, "batch length"],
    plan: DecodingPlan,
    key: jax.Array,
) -> Decodes:
    """Generates targets for inputs, on the device.

    Args:
      model: the model.
      params: its parameters.
      inputs: one example per row; zeros are padding.
      targets: their length is the outputs'; read only by `prompt_with_targets`.
      plan: how to decode.
      key: PRNG key for sampling.

    Source: t5x.models.EncoderDecoderModel.predict_batch_with_aux.
    """
    prompt, inputs = _prompt(targets, plan), jnp.asarray(inputs, jnp.int32)
    if plan.method == "beam_search":
        prompt = prompt[:, : plan.max_decode_len]
        return _beam_search(model, plan, params, inputs, prompt)
    return _temperature_sample(model, plan, params, inputs, prompt, key)


def _prompt(targets: Any, plan: DecodingPlan) -> Int[Array, "batch length"]:
    """The token forced at each position; 0 leaves it free."""
    targets = jnp.asarray(targets, jnp.int32)
    if not plan.prompt_with_targets:
        return jnp.zeros_like(targets)
    # T5X reads the prompt off the decoder's inputs, which lack the last target.
    shown = targets.at[:, -1].set(0)
    return jnp.where(shown == plan.eos_id, 0, shown)


# ---- Beam search --------------------------------------------------------------------------------


class _Search(NamedTuple):
    """The state of a beam search, by ascending score: [batch, beams, ...]."""

    position: jax.Array
    live: jax.Array
    log_probs: jax.Array
    last: jax.Array
    finished: jax.Array
    scores: jax.Array
    is_finished: jax.Array
    cache: Any


@functools.partial(jax.jit, static_argnums=(0, 1))
def _beam_search(
    model: T5,
    plan: DecodingPlan,
    params: Parameters,
    inputs: Int[Array, "batch memory"],
    prompt: Int[Array, "batch length"],
) -> Decodes:
    (rows, length), beams = prompt.shape, plan.num_decodes
    reads = read_inputs(model, params, inputs)

    def penalty(tokens: Any) -> jax.Array:
        return jnp.power((5.0 + tokens) / 6.0, plan.alpha)

    def more(state: _Search) -> jax.Array:
        # T5X counts the token before the first one too: hence the + 1.
        reachable = state.log_probs[:, -1:] / penalty(length + 1)
        worst = jnp.min(state.scores, axis=1, keepdims=True)
        decided = jnp.where(state.is_finished, worst, _NEVER) > reachable
        return (state.position < length) & ~decided.all()

    def step(state: _Search) -> _Search:
        logits, cache = decoder_step(model, params, reads, state.cache, state.last, state.position)
        log_probs = jax.nn.log_softmax(logits) + state.log_probs[..., None]
        vocabulary = logits.shape[-1]
        # Twice as many as beams: at most half of them can end, so enough stay alive.
        best, index = jax.lax.top_k(log_probs.reshape(rows, -1), 2 * beams)
        # Inside a prompt one beam is left, at no cost.
        forced = prompt[:, state.position][:, None]
        only = jnp.where(jnp.arange(2 * beams) == 0, 0.0, _NEVER)
        best = jnp.where(forced == 0, best, only)
        tokens = jnp.where(forced == 0, index % vocabulary, forced)
        parents = index // vocabulary
        grown = _taken(state.live, parents).at[:, :, state.position].set(tokens)
        ends = tokens == plan.eos_id

        alive = _best_last(best + ends * _NEVER, beams)
        # Continuations that do not end are no candidates for the finished ones.
        scores = best / penalty(state.position + 1) + ~ends * _NEVER
        all_scores = jnp.concatenate([state.scores, scores], axis=1)
        kept = _best_last(all_scores, beams)
        rows_of = jnp.arange(rows)[:, None] * beams + _taken(parents, alive)
        return _Search(
            position=state.position + 1,
            live=_taken(grown, alive),
            log_probs=_taken(best + ends * _NEVER, alive),
            last=_taken(tokens, alive),
            finished=_taken(jnp.concatenate([state.finished, grown], axis=1), kept),
            scores=_taken(all_scores, kept),
            is_finished=_taken(jnp.concatenate([state.is_finished, ends], axis=1), kept),
            cache=jax.tree.map(lambda x: x[rows_of.reshape(-1)], cache),
        )

    state = jax.lax.while_loop(more, step, _start(model, rows, beams, length))
    any_finished = state.is_finished.any(axis=1)
    return Decodes(
        jnp.where(any_finished[:, None, None], state.finished, state.live),
        jnp.where(any_finished[:, None], state.scores, state.log_probs),
    )


def _start(model: T5, rows: int, beams: int, length: int) -> _Search:
    """The state before the first step: no tokens, and one live beam in each row."""
    nothing = jnp.zeros((rows, beams, length), jnp.int32)
    # Only the first beam exists at the start; with equal beams, all would grow alike.
    first = jnp.where(jnp.arange(beams) == 0, 0.0, _NEVER)
    return _Search(
        position=jnp.int32(0),
        live=nothing,
        log_probs=jnp.tile(first, (rows, 1)),
        last=nothing[:, :, 0],
        finished=nothing,
        scores=jnp.full((rows, beams), _NEVER),
        is_finished=nothing[:, :, 0] > 0,
        cache=empty_cache(model, rows * beams, length),
    )


def _best_last(scores: Float[Array, "batch some"], count: int) -> Int[Array, "batch count"]:
    return jnp.flip(jax.lax.top_k(scores, count)[1], axis=1)


def _taken(x: Array, index: Int[Array, "batch some"]) -> Array:
    """For each row, the beams of these indices."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


# ---- Sampling -----------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """The state of sampling, [batch * decodes, ...]."""

    position: jax.Array
    tokens: jax.Array
    last: jax.Array
    done: jax.Array
    log_probs: jax.Array
    key: jax.Array
    cache: Any


@functools.partial(jax.jit, static_argnums=(0, 1))
def _temperature_sample(
    model: T5,
    plan: DecodingPlan,
    params: Parameters,
    inputs: Int[Array, "batch memory"],
    prompt: Int[Array, "batch length"],
    key: jax.Array,
) -> Decodes:
    (rows, length), decodes = prompt.shape, plan.num_decodes
    reads = read_inputs(model, params, inputs)
    # Decodes of one row are adjacent.
    prompts = jnp.repeat(prompt, decodes, axis=0)
    limit = jnp.full(rows * decodes, length)
    if plan.max_decode_steps is not None:
        limit = jnp.minimum((prompts != 0).sum(axis=1) + plan.max_decode_steps, length)

    def step(state: _Sample) -> _Sample:
        now, later = jax.random.split(state.key)
        last = state.last.reshape(rows, decodes)
        logits, cache = decoder_step(model, params, reads, state.cache, last, state.position)
        chosen, log_p = _chosen(logits.reshape(rows * decodes, -1), plan, now)
        forced = prompts[:, state.position]
        # What is forced, or follows the end, costs nothing.
        log_p = jnp.where((forced == 0) & ~state.done, log_p, 0.0)
        token = jnp.where(state.done, 0, jnp.where(forced == 0, chosen, forced))
        position = state.position + 1
        return _Sample(
            position=position,
            tokens=state.tokens.at[:, state.position].set(token),
            last=token,
            done=state.done | (token == plan.eos_id) | (position >= limit),
            log_probs=state.log_probs + log_p,
            key=later,
            cache=cache,
        )

    none = jnp.zeros(rows * decodes, jnp.int32)
    cache = empty_cache(model, rows * decodes, length)
    start = _Sample(
        jnp.int32(0), jnp.zeros_like(prompts), none, none > 0, jnp.zeros(rows * decodes), key, cache
    )
    state = jax.lax.while_loop(lambda state: ~state.done.all(), step, start)
    scores = state.log_probs.reshape(rows, decodes)
    order = jnp.argsort(scores, axis=1)
    tokens = state.tokens.reshape(rows, decodes, length)
    return Decodes(_taken(tokens, order), _taken(scores, order))


def _chosen(
    logits: Float[Array, "rows vocab"], plan: DecodingPlan, key: jax.Array
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """A token for each row and its log-probability."""
    if plan.temperature <= _GREEDY_TEMPERATURE:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Rescaled to the one token that is left, its probability is 1.
        if plan.rescale_log_probs:
            return token, jnp.zeros(token.shape)
        return token, _log_prob(logits, token)
    scaled = logits / plan.temperature
    if plan.topk:
        kept = jax.lax.top_k(scaled, min(plan.topk, scaled.shape[-1]))[0][:, -1:]
        scaled = jnp.where(scaled >= kept, scaled, _NEVER)
    if plan.topp:
        scaled = _most_probable(scaled, plan.topp)
    token = jax.random.categorical(key, scaled).astype(jnp.int32)
    return token, _log_prob(scaled if plan.rescale_log_probs else logits, token)


def _most_probable(logits: Float[Array, "rows vocab"], share: float) -> Float[Array, "rows vocab"]:
    """Drops all but the fewest tokens that together have at least this share of probability."""
    probs = jax.nn.softmax(logits)
    ordered = -jnp.sort(-probs, axis=-1)
    # Kept as long as what comes before them does not have the share yet.
    needed = jnp.cumsum(ordered, axis=-1) - ordered < share
    least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probs >= least, logits, _NEVER)


def _log_prob(logits: Float[Array, "rows vocab"], token: Int[Array, " rows"]) -> Array:
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
