"""Generates targets, greedy, by sampling, and by beam search.

A model without an encoder continues its inputs. Each position is decoded with a cache of earlier
keys and values, under jit with static shapes; the loop ends once every row is done. In float32 the
outputs equal those of Mesh TensorFlow 0.1.21 (Bitransformer.decode,
Unitransformer.sample_autoregressive, beam_search.beam_search), edge cases included:

- Sampling adds Gumbel noise times the temperature to the logits; top-k keeps the logits above the
  (k+1)-th largest.
- A beam's score is its log-probability over ((5 + length) / 6)**alpha. Each step takes the
  2 * beam best continuations among the `prefilter` best of each beam; those that end in EOS are
  finished.
- A finished beam can replace an alive one that does not exist yet, and continue; the output omits
  whatever follows its EOS (clean_decodes). How far it goes, and so which output is best, depends on
  when all rows of the batch are done. Rows affect each other in no other way.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.decoding import DecodingConfig
from t0repro.model.decoder_steps import (
    Cache,
    DecoderReads,
    Parameters,
    decoder_step,
    empty_cache,
    read_inputs,
    read_prompts,
)
from t0repro.model.matmuls import FIXED_KERNELS
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5

EOS = 1
# Mesh TensorFlow's infinity (beam_search.INF); a beam that does not exist scores minus this.
_NEVER = 1e7
# Replaces the logits that top-k sampling drops.
_DROPPED = -1e6


class Decoded(NamedTuple):
    """Generated targets.

    Attributes:
      tokens: int32 [batch, length], 0 after the first EOS.
      scores: the best beam's score after a beam search; zeros otherwise.
    """

    tokens: Int[Array, "batch length"]
    scores: Float[Array, " batch"]


@functools.partial(
    jax.jit, static_argnames=("model", "config", "length"), compiler_options=FIXED_KERNELS
)
def generate(
    model: T5,
    params: Parameters,
    inputs: Int[Array | np.ndarray, "batch inputs_length"],
    config: DecodingConfig,
    *,
    length: int,
    search_steps: Int[Array | np.ndarray, " batch"] | None = None,
    seeds: Int[Array | np.ndarray, "batch 2"] | None = None,
) -> Decoded:
    """Generates targets for inputs, on the device.

    Args:
      model: the model; logits are float32 whatever its activation dtype is.
      params: its parameters.
      inputs: one example per row; zeros are padding.
      config: greedy (temperature 0), sampling, or beam search.
      length: maximum number of output tokens.
      search_steps: maximum number of beam-search steps for each row, see `search_limit`; defaults
        to `length`.
      seeds: two numbers, of 32 bits, which decide the noise that a row samples with; by default
        the row's own in the batch.
    """
    inputs = jnp.asarray(inputs, jnp.int32)
    rows = inputs.shape[0]
    if config.beam_size > 1:
        steps = length if search_steps is None else jnp.asarray(search_steps, jnp.int32)
        limits = jnp.minimum(jnp.broadcast_to(steps, rows), length)
        return _search(model, length, config, params, inputs, limits)
    seeds = jnp.tile(jnp.arange(rows)[:, None], 2) if seeds is None else jnp.asarray(seeds)
    return Decoded(_sample(model, length, config, params, inputs, seeds), jnp.zeros(rows))


def search_limit(longest_input: int, config: DecodingConfig) -> int:
    """Maximum number of beam-search steps for a batch whose longest input has this many tokens.

    Computed in float32, as in Bitransformer.decode, then truncated to an integer.
    """
    product = np.float32(longest_input) * np.float32(config.length_multiplier)
    return int(product + np.float32(config.length_constant))


class _Start(NamedTuple):
    """What decoding begins with.

    Attributes:
      reads: what every step reads; None without an encoder.
      cache: of the positions before the first; beams of one input are adjacent rows.
      first: the position of the first token, of all rows or [rows * beams].
      last: what the decoder reads there, [rows].
    """

    reads: DecoderReads | None
    cache: Cache
    first: jax.Array
    last: jax.Array


def _read(
    model: T5, params: Parameters, inputs: Int[Array, "batch memory"], length: int, beams: int = 1
) -> _Start:
    """Reads the inputs, for outputs of at most this length."""
    rows = inputs.shape[0]
    if not model.config.decoder_only:
        cache = empty_cache(model, rows * beams, length)
        reads = read_inputs(model, params, inputs)
        return _Start(reads, cache, jnp.int32(0), jnp.zeros(rows, jnp.int32))
    # The inputs come first in the text, after a 0; the last of them is read again.
    prompts = jnp.pad(inputs, ((0, 0), (1, length - 1)))
    lengths = jnp.sum(inputs != 0, axis=1, dtype=jnp.int32)
    both_ways = (jnp.arange(prompts.shape[1]) <= lengths[:, None]).astype(jnp.int32)
    cache = read_prompts(model, params, prompts, both_ways)
    last = jnp.take_along_axis(prompts, lengths[:, None], axis=1)[:, 0]
    cache, first = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), (cache, lengths))
    return _Start(None, cache, first, last)


def _sample(
    model: T5,
    length: int,
    config: DecodingConfig,
    params: Parameters,
    inputs: Int[Array, "batch memory"],
    seeds: Int[Array, "batch 2"],
) -> Int[Array, "batch length"]:
    """Generates tokens one by one until each row has its EOS or is `length` long."""
    rows = inputs.shape[0]
    fold_in = jax.vmap(jax.random.fold_in)
    # Of other generators, such as rbg, several keys in one call draw numbers that depend on all.
    key = jax.random.key(0, impl="threefry2x32")
    keys = fold_in(fold_in(jnp.broadcast_to(key, rows), seeds[:, 0]), seeds[:, 1])
    reads, cache, first, last = _read(model, params, inputs, length)

    def more(carry: tuple[Any, ...]) -> jax.Array:
        position, _, _, done, _ = carry
        return (position < length) & ~done.all()

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, tokens, last, done, cache = carry
        at = first + position
        logits, cache = decoder_step(model, params, reads, cache, last[:, None], at)
        here = fold_in(keys, jnp.broadcast_to(position, rows))
        chosen = _choose(logits[:, 0], config.temperature, config.keep_top_k, here)
        # A row that is done stays padding.
        chosen = jnp.where(done, 0, chosen)
        tokens = tokens.at[:, position].set(chosen)
        return position + 1, tokens, chosen, done | (chosen == EOS), cache

    start = (
        jnp.int32(0),
        jnp.zeros((rows, length), jnp.int32),
        last,
        jnp.zeros(rows, bool),
        cache,
    )
    return jax.lax.while_loop(more, step, start)[1]


def _choose(
    logits: Float[Array, "batch vocab"], temperature: float, keep_top_k: int, keys: jax.Array
) -> Int[Array, " batch"]:
    """Chooses a token for each row; at temperature 0, the first one with the largest logit."""
    if keep_top_k != -1 and keep_top_k < logits.shape[-1]:
        # mtf.nth_largest_element counts from zero, so this is the largest logit to drop.
        dropped = jax.lax.top_k(logits, keep_top_k + 1)[0][:, -1:]
        logits = jnp.where(logits <= dropped, _DROPPED, logits)
    if temperature != 0.0:
        # Each row's own, whatever else is in the batch; above zero, where the logarithm is finite.
        draw = functools.partial(jax.random.uniform, shape=logits.shape[1:], minval=1e-9)
        uniform = jax.vmap(draw)(keys)
        logits = logits - jnp.log(-jnp.log(uniform)) * temperature
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@flax.struct.dataclass
class _Beams:
    """The state of a beam search; each array is [batch, beams, ...].

    `finished_scores` are divided by the length penalty; `log_probs` of the alive beams are not.
    """

    alive: jax.Array
    log_probs: jax.Array
    last: jax.Array
    finished: jax.Array
    finished_scores: jax.Array
    is_finished: jax.Array


def _search(
    model: T5,
    length: int,
    config: DecodingConfig,
    params: Parameters,
    inputs: Int[Array, "batch memory"],
    limits: Int[Array, " batch"],
) -> Decoded:
    """Finds each row's best beam; all rows continue until no alive beam can become the best."""
    beams, rows = config.beam_size, inputs.shape[0]
    reads, cache, first, last = _read(model, params, inputs, length, beams)
    penalties = jnp.asarray(_length_penalties(length, config.alpha))

    def is_unfinished(position: jax.Array, state: _Beams) -> jax.Array:
        return (position < limits) & ~_is_decided(state, penalties[limits]).all()

    def more(carry: tuple[Any, ...]) -> jax.Array:
        return is_unfinished(carry[0], carry[1]).any()

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, state, cache = carry
        at = first + position
        logits, cache = decoder_step(model, params, reads, cache, state.last, at)
        penalty = penalties[position + 1]
        grown, parents = _grow(
            state, logits, position, penalty, config.prefilter, config.vocab_parts
        )
        active = is_unfinished(position, state)

        # Rows may have different limits: a row that is done keeps its state while others continue.
        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        # The cache's rows for batch row i start at i * beams; each beam takes its parent's row.
        flat = (jnp.arange(rows)[:, None] * beams + parents).reshape(-1)
        cache = jax.tree.map(lambda x: x[flat], cache)
        return position + 1, jax.tree.map(chosen, grown, state), cache

    # Only the first beam exists at the start; with equal beams, all would grow alike.
    none = jnp.zeros((rows, beams, length), jnp.int32)
    start = _Beams(
        alive=none,
        log_probs=jnp.tile(jnp.where(jnp.arange(beams) == 0, 0.0, -_NEVER), (rows, 1)),
        last=jnp.tile(last[:, None], (1, beams)),
        finished=none,
        finished_scores=jnp.full((rows, beams), -_NEVER),
        is_finished=jnp.zeros((rows, beams), bool),
    )
    carry = (jnp.int32(0), start, cache)
    state = jax.lax.while_loop(more, step, carry)[1]
    # Without a finished beam, return the best alive one with its plain log-probability.
    any_finished = state.is_finished.any(axis=1)
    tokens = jnp.where(any_finished[:, None], state.finished[:, 0], state.alive[:, 0])
    scores = jnp.where(any_finished, state.finished_scores[:, 0], state.log_probs[:, 0])
    # A beam can continue after its EOS (see the module's docstring): drop that part.
    after_end = jnp.cumsum(tokens == EOS, axis=1) - (tokens == EOS) > 0
    return Decoded(jnp.where(after_end, 0, tokens), scores)


def _grow(
    state: _Beams,
    logits: Float[Array, "batch beams vocab"],
    position: Int[Array, ""],
    penalty: Float[Array, ""],
    prefilter: int,
    vocab_parts: int,
) -> tuple[_Beams, Int[Array, "batch beams"]]:
    """Extends the beams by one token; also returns the parent of each beam that is now alive."""
    beams = logits.shape[1]
    log_probs = _extend_log_probs(logits, state.log_probs)
    # Without the barrier, XLA would multiply by a rounded reciprocal of the penalty.
    divisors = jax.lax.optimization_barrier(jnp.broadcast_to(penalty, log_probs.shape))
    scores, parents, tokens = _best_continuations(
        log_probs / divisors, 2 * beams, prefilter, vocab_parts
    )
    grown = jnp.take_along_axis(state.alive, parents[..., None], axis=1)
    grown = grown.at[:, :, position].set(tokens)
    ends = tokens == EOS

    # Continuations that end are no longer alive: they fall below all others.
    _, alive = jax.lax.top_k(scores - ends * _NEVER, beams)
    all_scores = jnp.concatenate([state.finished_scores, scores - ~ends * _NEVER], axis=1)
    finished_scores, finished = jax.lax.top_k(all_scores, beams)
    all_tokens = jnp.concatenate([state.finished, grown], axis=1)
    all_flags = jnp.concatenate([state.is_finished, ends], axis=1)
    new = _Beams(
        alive=jnp.take_along_axis(grown, alive[..., None], axis=1),
        # Back to plain log-probabilities, which the next step adds to.
        log_probs=jnp.take_along_axis(scores * penalty, alive, axis=1),
        last=jnp.take_along_axis(tokens, alive, axis=1),
        finished=jnp.take_along_axis(all_tokens, finished[..., None], axis=1),
        finished_scores=finished_scores,
        is_finished=jnp.take_along_axis(all_flags, finished, axis=1),
    )
    return new, jnp.take_along_axis(parents, alive, axis=1)


def _length_penalties(length: int, alpha: float) -> np.ndarray:
    """The penalty of an output of n tokens, for n from 0 to `length`: float32 [length + 1].

    Rounds as Mesh TensorFlow does on a CPU, where TensorFlow's optimizer multiplies by a rounded
    1/6. XLA would take powers in another order, so that the first penalty would be 1.0000001 for an
    alpha of 2; for a nonexistent beam, at -1e7, that changes the score by 1.
    """
    tokens = np.arange(length + 1, dtype=np.float32)
    sixth = np.float32(1.0) / np.float32(6.0)
    return ((np.float32(5.0) + tokens) * sixth) ** np.float32(alpha)


def _extend_log_probs(
    logits: Float[Array, "batch beams vocab"], log_probs: Float[Array, "batch beams"]
) -> Float[Array, "batch beams vocab"]:
    """The log-probabilities of beams with each token appended.

    Mesh TensorFlow's source has (logits - log_z) + log_probs; TensorFlow's arithmetic optimizer
    changes that to the order used here. It matters for a nonexistent beam: at -1e7 float32 resolves
    only integers, so the order decides which tokens tie and which are found.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return logits + (log_probs[..., None] - log_z)


def _best_continuations(
    scores: Float[Array, "batch beams vocab"], count: int, prefilter: int, vocab_parts: int
) -> tuple[Float[Array, "batch count"], Int[Array, "batch count"], Int[Array, "batch count"]]:
    """Returns the best continuations: their scores, the beams they continue, and their tokens.

    At most `prefilter` continuations per beam and per shard of the vocabulary compete.
    """
    batch, beams, vocab = scores.shape
    split = scores.reshape(batch, beams, vocab_parts, vocab // vocab_parts)
    # Without a prefilter (0), as many continuations per beam compete as the caller wants.
    per_beam = min(prefilter or count, split.shape[-1])
    values, tokens = jax.lax.top_k(split, per_beam)
    # Convert ids within a shard of the vocabulary to ids in the whole.
    tokens = tokens + jnp.arange(vocab_parts)[:, None] * split.shape[-1]
    best, index = jax.lax.top_k(values.reshape(batch, -1), count)
    chosen = jnp.take_along_axis(tokens.reshape(batch, -1), index, axis=1)
    return best, index // (vocab_parts * per_beam), chosen


def _is_decided(state: _Beams, longest: Float[Array, " batch"]) -> Array:
    """Whether each row's worst finished beam beats any score its best alive beam can still reach.

    Args:
      state: the search's.
      longest: the penalty of each row's longest output, which is the largest.
    """
    # An upper bound on a beam's score: it loses no further log-probability.
    reachable = state.log_probs[:, 0] / longest
    # An unfinished beam counts as 0, above every real score.
    worst = jnp.min(state.finished_scores * state.is_finished, axis=1)
    worst = worst - ~state.is_finished.any(axis=1) * _NEVER
    return worst > reachable
