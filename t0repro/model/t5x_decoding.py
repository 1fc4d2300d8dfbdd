"""T5X's beam search and temperature sampling, position by position with a cache.

They differ from Mesh TensorFlow's (t0repro.model.decoding) in when a search ends, in which
candidates compete, and in how a score is defined; each follows t5x.decoding at cc342d4. A prompt
forces the tokens at its positions. All decodes of a row are returned in ascending order of score,
the best last.

`beam_search` and `temperature_sample` have T5X's arguments and decode any model, given a function
from the state to logits; `generate` decodes a T5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.decoding import NEVER, DecodingPlan
from t0repro.model.decoder_steps import (
    Parameters,
    decoder_step,
    empty_cache,
    read_inputs,
    read_prompts,
)
from t0repro.model.matmuls import FIXED_KERNELS
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5

NEG_INF = NEVER


class Decodes(NamedTuple):
    """Generated targets of each row, by ascending score.

    Attributes:
      tokens: int32 [batch, decodes, length], 0 after the end of an output.
      scores: float32 [batch, decodes]: log-probabilities, after a beam search divided by the
        length penalty.
    """

    tokens: Int[Array, "batch decodes length"]
    scores: Float[Array, "batch decodes"]


@flax.struct.dataclass
class DecodingState:
    """The argument of a function from tokens to logits; decodes of one row are adjacent.

    Attributes:
      cur_index: the position to decode, counted from 0: one for all rows in a beam search, [batch *
        decodes] in sampling.
      sequences: [batch * decodes, length (+ 1)], a 0 and then the tokens so far.
      cur_token: [batch * decodes, 1], the decoder's current inputs.
      cache: the cache returned for the previous position; batch * decodes rows.
    """

    cur_index: jax.Array
    sequences: jax.Array
    cur_token: jax.Array
    cache: Any


@flax.struct.dataclass
class SamplingLoopState:
    """The state of `temperature_sample`, passed to its callbacks; rows are batch * decodes.

    Attributes:
      step: number of positions decoded so far.
      cur_index: the position to decode, [rows].
      sequences: a 0, the prompt or the tokens so far, and another 0: [rows, length + 2].
      cache: the cache.
      cur_token: the decoder's current inputs, [rows, 1].
      ended: whether an output is complete, [rows, 1].
      rng: PRNG key.
      log_prob: log-probability of the sampled tokens, forced ones excluded, [rows].
    """

    step: jax.Array
    cur_index: jax.Array
    sequences: jax.Array
    cache: Any
    cur_token: jax.Array
    ended: jax.Array
    rng: jax.Array
    log_prob: jax.Array


TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Any]]
StateCallback = Callable[[SamplingLoopState], SamplingLoopState]
LogitCallback = Callable[[jax.Array, SamplingLoopState], jax.Array]


@functools.partial(jax.jit, static_argnames=("model", "plan"), compiler_options=FIXED_KERNELS)
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
      targets: their length sets the outputs'; read only with `prompt_with_targets`.
      plan: the decoding options.
      key: PRNG key for sampling.

    Source: t5x.models.EncoderDecoderModel.predict_batch_with_aux.
    """
    # T5X takes the prompt from the decoder's inputs, which lack the last target.
    prompt = jnp.pad(jnp.asarray(targets, jnp.int32)[:, :-1], ((0, 0), (1, 0)))
    prompt = jnp.where(plan.prompt_with_targets & (prompt != plan.eos_id), prompt, 0)
    inputs = jnp.asarray(inputs, jnp.int32)
    decode, length = _decode_function(plan, prompt.shape[1]), prompt.shape[1]
    cache, tokens_to_logits = t5_functions(model, params, inputs, plan.num_decodes, length)
    return decode(prompt, cache, tokens_to_logits, decode_rng=key)


def _decode_function(plan: DecodingPlan, length: int) -> Callable[..., Decodes]:
    """The plan's function with its options, for rows of this length."""
    options = plan.function_options()
    decode = beam_search if plan.method == "beam_search" else temperature_sample
    # The rows have no room for more.
    for name in options.keys() & {"max_decode_len", "max_decode_steps"}:
        options[name] = None if options[name] is None else min(options[name], length)
    return functools.partial(decode, **options)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=FIXED_KERNELS)
def continue_prompts(
    model: T5,
    plan: DecodingPlan,
    params: Parameters,
    prompts: Int[Array, "batch length"],
    both_ways: Int[Array, "batch length"],
    key: jax.Array,
) -> Decodes:
    """What a model without an encoder generates after each row's prompt, on the device.

    Args:
      model: the model.
      plan: the decoding options.
      params: its parameters.
      prompts: a 0, then each prompt's tokens, then zeros: `decoder_input_tokens` without targets.
        A row's prompt and output fill at most its length.
      both_ways: `decoder_causal_attention`: 1 at a prompt's tokens and the 0 before them.
      key: PRNG key for sampling.

    Source: t5x.models.DecoderOnlyModel.predict_batch_with_aux.
    """
    cache, lengths, tokens_to_logits = prompted_functions(model, params, prompts, both_ways)
    decode = _decode_function(plan, prompts.shape[1])
    tokens, scores = decode(prompts, cache, tokens_to_logits, decode_rng=key, initial_index=lengths)
    return Decodes(remove_prompts(tokens, lengths), scores)


def prompted_functions(
    model: T5,
    params: Parameters,
    prompts: Int[Array, "batch length"],
    both_ways: Int[Array, "batch length"],
) -> tuple[Any, Int[Array, " batch"], TokensToLogits]:
    """A cache that has read each prompt, the prompts' lengths, and the function for the rest.

    Args: see `continue_prompts`.
    """
    lengths = jnp.sum(prompts[:, 1:] != 0, axis=1, dtype=jnp.int32)

    def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Any]:
        # Its rows' own: a beam search counts from the end of each prompt.
        position = state.cache["position"]
        logits, layers = decoder_step(
            model, params, None, state.cache["layers"], state.cur_token, position
        )
        return logits[:, 0], {"position": position + 1, "layers": layers}

    # The last token of a prompt is read again, for the logits after it.
    layers = read_prompts(model, params, prompts, both_ways)
    return {"position": lengths, "layers": layers}, lengths, tokens_to_logits


def remove_prompts(
    tokens: Int[Array, "batch decodes length"], lengths: Int[Array, " batch"]
) -> Int[Array, "batch decodes length"]:
    """Moves what follows the first tokens of each row to its front, with zeros after it."""
    at = lengths[:, None, None] + jnp.arange(tokens.shape[2])
    return jnp.take_along_axis(tokens, at, axis=2, mode="fill", fill_value=0)


def t5_functions(
    model: T5, params: Parameters, inputs: Int[Array, "batch memory"], decodes: int, length: int
) -> tuple[Any, TokensToLogits]:
    """An empty cache for each row of inputs, and the function by which decoding calls T5.

    Args:
      model: the model.
      params: its parameters.
      inputs: one example per row; zeros are padding.
      decodes: number of decodes of each row.
      length: number of positions in the cache.
    """
    reads, rows = read_inputs(model, params, inputs), inputs.shape[0]

    def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Any]:
        # All rows are at the same position.
        position = jnp.max(state.cur_index)
        tokens = state.cur_token.reshape(rows, decodes)
        logits, cache = decoder_step(model, params, reads, state.cache, tokens, position)
        return logits.reshape(rows * decodes, -1), cache

    return empty_cache(model, rows, length), tokens_to_logits


def brevity_penalty(alpha: float, length: Any) -> jax.Array:
    """The divisor for the log-probability of an output of this length."""
    return jnp.power((5.0 + length) / 6.0, alpha)


class _Search(NamedTuple):
    """The state of a beam search, by ascending score: [batch, beams, ...]; tokens after a 0."""

    position: jax.Array
    live: jax.Array
    log_probs: jax.Array
    finished: jax.Array
    scores: jax.Array
    is_finished: jax.Array
    cache: Any


def beam_search(
    inputs: Int[Array | np.ndarray, "batch length"],
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 4,
    alpha: float = 0.6,
    max_decode_len: int | None = None,
    max_decode_step: int = -1,
    min_log_prob: float = NEG_INF,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    initial_index: Int[Array | np.ndarray, " batch"] | None = None,
) -> Decodes:
    """Finds the outputs with the highest scores.

    Args:
      inputs: a 0, then the prompt's tokens, which are forced; 0 leaves a position free.
      cache: pytree with `batch` rows; scalars and arrays named cached_bias have none.
      tokens_to_logits: maps a `DecodingState` to float logits [batch * decodes, vocab] of the next
        token and the cache after it.
      eos_id: the token that ends an output.
      num_decodes: number of beams.
      alpha: exponent of the length penalty.
      max_decode_len: maximum number of tokens; None takes the length of `inputs`.
      max_decode_step: maximum number of positions to decode, if above 0.
      min_log_prob: the search ends if no live beam of any row has at least this log-probability.
      decode_rng: not used.
      cache_offset: the axis of the cache's arrays that has the rows.
      initial_index: the number of tokens in each row's prompt, if the cache has all of them but the
        last, which is read first. The search then counts positions from there. None reads the
        prompt token by token.

    Source: t5x.decoding.beam_search.
    """
    del decode_rng
    rows, beams = inputs.shape[0], num_decodes
    length = inputs.shape[1] if max_decode_len is None else max_decode_len
    prompts, first = jnp.asarray(inputs), jnp.zeros(rows, jnp.int32)
    if initial_index is not None:
        first = jnp.asarray(initial_index, jnp.int32)
        # The search sees only the last token of the prompt.
        last = jnp.take_along_axis(prompts, _prompt_lengths(prompts)[:, None], axis=1)
        inputs = jnp.pad(last, ((0, 0), (0, inputs.shape[1] - 1)))
    # The token forced at each position; beyond the prompt every token is free.
    prompt = jnp.pad(inputs[:, 1:], ((0, 0), (0, max(0, length + 1 - inputs.shape[1]))))

    def more(state: _Search) -> jax.Array:
        # The + 1: T5X also counts the token before the first one.
        longest = brevity_penalty(alpha, length + 1)
        reachable = state.log_probs[:, -1:] / longest
        worst = jnp.min(state.scores, axis=1, keepdims=True)
        decided = jnp.where(state.is_finished, worst, NEG_INF) > reachable
        unlikely = jnp.all(reachable < min_log_prob / longest) & (state.position > 0)
        over = (max_decode_step > 0) & (state.position >= max_decode_step)
        room = state.position + jnp.min(first) < length
        return room & ~decided.all() & ~unlikely & ~over

    def step(state: _Search) -> _Search:
        last = jax.lax.dynamic_index_in_dim(state.live, state.position, 2, keepdims=False)
        sequences = state.live.reshape(rows * beams, -1)
        logits, cache = tokens_to_logits(
            DecodingState(state.position, sequences, last.reshape(-1, 1), state.cache)
        )
        logits = logits.reshape(rows, beams, -1)
        log_probs = jax.nn.log_softmax(logits) + state.log_probs[..., None]
        vocabulary = logits.shape[-1]
        # Take twice as many as beams: at most half of them can end, so enough stay alive.
        best, index = jax.lax.top_k(log_probs.reshape(rows, -1), 2 * beams)
        # Inside a prompt only one beam remains, at no cost.
        forced = prompt[:, state.position][:, None]
        only = jnp.where(jnp.arange(2 * beams) == 0, 0.0, NEG_INF)
        best = jnp.where(forced == 0, best, only)
        tokens = jnp.where(forced == 0, index % vocabulary, forced)
        parents = index // vocabulary
        grown = _take_beams(state.live, parents).at[:, :, state.position + 1].set(tokens)
        ends = tokens == eos_id

        alive = _best_last(best + ends * NEG_INF, beams)
        # Continuations that do not end cannot become finished beams.
        lengths = first[:, None] + state.position + 1
        scores = best / brevity_penalty(alpha, lengths) + ~ends * NEG_INF
        all_scores = jnp.concatenate([state.scores, scores], axis=1)
        ranked = _best_last(all_scores, beams)
        parent_rows = (jnp.arange(rows)[:, None] * beams + _take_beams(parents, alive)).reshape(-1)
        return _Search(
            position=state.position + 1,
            live=_take_beams(grown, alive),
            log_probs=_take_beams(best + ends * NEG_INF, alive),
            finished=_take_beams(jnp.concatenate([state.finished, grown], axis=1), ranked),
            scores=_take_beams(all_scores, ranked),
            is_finished=_take_beams(jnp.concatenate([state.is_finished, ends], axis=1), ranked),
            cache=_map_rows(cache, lambda x: jnp.take(x, parent_rows, axis=cache_offset)),
        )

    nothing = jnp.zeros((rows, beams, length + 1), jnp.int32)
    # Only the first beam exists at the start; with equal beams, all would grow alike.
    only_first = jnp.where(jnp.arange(beams) == 0, 0.0, NEG_INF)
    start = _Search(
        position=jnp.int32(0),
        live=nothing.at[:, :, 0].set(inputs[:, :1]),
        log_probs=jnp.tile(only_first, (rows, 1)),
        finished=nothing,
        scores=jnp.full((rows, beams), NEG_INF),
        is_finished=nothing[:, :, 0] > 0,
        cache=_repeat_cache(cache, beams, cache_offset),
    )
    state = jax.lax.while_loop(more, step, start)
    any_finished = state.is_finished.any(axis=1)
    tokens = jnp.where(any_finished[:, None, None], state.finished, state.live)[:, :, 1:]
    if initial_index is not None:
        tokens = _prepend_prompts(prompts, tokens)
    return Decodes(tokens, jnp.where(any_finished[:, None], state.scores, state.log_probs))


def _prompt_lengths(prompts: Int[Array, "batch length"]) -> Int[Array, " batch"]:
    """The index of each prompt's last token, which equals its number of tokens after the 0."""
    return jnp.argmax((prompts != 0) * jnp.arange(prompts.shape[1]), axis=1)


def _prepend_prompts(
    prompts: Int[Array, "batch some"], tokens: Int[Array, "batch beams length"]
) -> Int[Array, "batch beams length"]:
    """Each beam's tokens after those of its row's prompt, truncated to the same length."""
    length, shift = tokens.shape[2], _prompt_lengths(prompts)[:, None]
    at = jnp.arange(length)[None, :]
    places = jnp.broadcast_to(jnp.maximum(at - shift, 0)[:, None, :], tokens.shape)
    moved = jnp.take_along_axis(tokens, places, axis=-1)
    prompt_tokens = jnp.pad(prompts[:, 1:], ((0, 0), (0, length)))[:, None, :length]
    return jnp.where((at < shift)[:, None, :], prompt_tokens, moved)


def _repeat_cache(cache: Any, decodes: int, axis: int) -> Any:
    """A cache in which the decodes of each row are adjacent."""
    return _map_rows(cache, lambda x: jnp.repeat(x, decodes, axis=axis))


def _map_rows(cache: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a change to the cache's arrays that have a row for each decode."""

    def change_leaf(path: Any, x: Any) -> Any:
        # Flax's layers keep these once, in addition to the arrays with rows.
        shared = jnp.ndim(x) == 0 or jax.tree_util.keystr(path[-1:], simple=True) == "cached_bias"
        return x if shared else change(x)

    return jax.tree_util.tree_map_with_path(change_leaf, cache)


def _best_last(scores: Float[Array, "batch some"], count: int) -> Int[Array, "batch count"]:
    return jnp.flip(jax.lax.top_k(scores, count)[1], axis=1)


def _take_beams(x: Array, index: Int[Array, "batch some"]) -> Array:
    """Selects beams by index, for each row."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def temperature_sample(
    inputs: Int[Array | np.ndarray, "batch length"],
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    decode_rng: jax.Array | None = None,
    num_decodes: int = 1,
    temperature: float | Array | np.ndarray | int = 1.0,
    topk: int | Array = 1,
    topp: float | Array = 0.0,
    cache_offset: int = 0,
    initial_index: Int[Array | np.ndarray, " batch"] | None = None,
    max_decode_steps: int | Array | None = None,
    max_decode_steps_hard_limit: int | None = None,
    rescale_log_probs: bool = True,
    state_callback_fn: StateCallback | None = None,
    logit_callback_fn: LogitCallback | None = None,
) -> Decodes:
    """Samples outputs token by token; sorts them by log-probability.

    Args:
      inputs: a 0, then the prompt's tokens, which are forced; 0 leaves a position free. An EOS in
        the prompt ends nothing.
      cache: see `beam_search`.
      tokens_to_logits: see `beam_search`.
      eos_id: see `beam_search`.
      decode_rng: PRNG key; None for `jax.random.PRNGKey(0)`.
      num_decodes: outputs of each row.
      temperature: divides the logits, one number or one for each row of `inputs`; 1e-4 or less
        takes the likeliest token.
      topk: sample among this many of the likeliest tokens; 0 keeps all.
      topp: sample among the fewest tokens with at least this much probability; 0 keeps all.
      cache_offset: see `beam_search`.
      initial_index: each row's first position to decode, if the cache has the ones before; None for
        0.
      max_decode_steps: maximum tokens after the prompt; None fills the length of `inputs`.
      max_decode_steps_hard_limit: a limit to that number, if above 0.
      rescale_log_probs: whether log-probabilities count the temperature, topk and topp.
      state_callback_fn: maps the state to another before each position and at the end.
      logit_callback_fn: maps logits and state to other logits.

    Inside a jitted function `temperature`, `topk`, `topp` and `max_decode_steps` may be traced;
    checks on traced values are skipped.

    Raises:
      ValueError: if topk and topp are both set, or max_decode_steps exceeds the available length.

    Source: t5x.decoding.temperature_sample.
    """
    if not (_is_traced(topk) or _is_traced(topp)) and topk and topp:
        raise ValueError("At most one of topk and topp may be other than 0.")
    rows, length = inputs.shape[0] * num_decodes, inputs.shape[1]
    # Decodes of one row are adjacent.
    prompts = jnp.pad(jnp.repeat(inputs, num_decodes, axis=0), ((0, 0), (0, 2)))
    limit = jnp.full(rows, length)
    if max_decode_steps is not None:
        steps = max_decode_steps
        if max_decode_steps_hard_limit:
            steps = jnp.minimum(steps, max_decode_steps_hard_limit)
        if not _is_traced(steps) and steps > length:
            raise ValueError(f"{steps} steps are more than the length, {length}.")
        limit = jnp.minimum((prompts != 0).sum(axis=1) + steps, length)
    ends_in_prompt = (prompts == eos_id).sum(axis=1)
    if jnp.ndim(temperature) == 1:
        temperature = jnp.repeat(jnp.asarray(temperature), num_decodes)[:, None]

    def step(state: SamplingLoopState) -> SamplingLoopState:
        if state_callback_fn is not None:
            state = state_callback_fn(state)
        now, later = jax.random.split(state.rng)
        logits, new_cache = tokens_to_logits(
            DecodingState(state.cur_index, state.sequences[:, :-2], state.cur_token, state.cache)
        )
        if logit_callback_fn is not None:
            logits = logit_callback_fn(logits, state)
        chosen, log_p = _choose_tokens(logits, temperature, topk, topp, rescale_log_probs, now)
        at, done = state.cur_index + 1, state.ended[:, 0]
        forced = jnp.take_along_axis(state.sequences, at[:, None], axis=1)[:, 0]
        # Forced tokens and those after the end cost nothing.
        log_p = jnp.where((forced == 0) & ~done, log_p, 0.0)
        token = jnp.where(done, 0, jnp.where(forced == 0, chosen, forced))
        sequences = state.sequences.at[jnp.arange(rows), at].set(token)
        # The sequence already contains the prompt's tokens that are still ahead.
        more_ends = (sequences == eos_id).sum(axis=1) > ends_in_prompt
        return SamplingLoopState(
            step=state.step + 1,
            cur_index=at,
            sequences=sequences,
            cache=new_cache,
            cur_token=token[:, None],
            ended=(done | more_ends | (at >= limit))[:, None],
            rng=later,
            log_prob=state.log_prob + log_p,
        )

    first = jnp.zeros(rows, jnp.int32)
    if initial_index is not None:
        first = jnp.repeat(jnp.asarray(initial_index, jnp.int32), num_decodes)
    start = SamplingLoopState(
        step=jnp.int32(0),
        cur_index=first,
        sequences=prompts,
        cache=_repeat_cache(cache, num_decodes, cache_offset),
        cur_token=jnp.take_along_axis(prompts, first[:, None], axis=1),
        ended=jnp.zeros((rows, 1), bool),
        rng=jax.random.PRNGKey(0) if decode_rng is None else decode_rng,
        log_prob=jnp.zeros(rows),
    )
    state = jax.lax.while_loop(lambda state: ~state.ended.all(), step, start)
    if state_callback_fn is not None:
        state = state_callback_fn(state)
    scores = state.log_prob.reshape(-1, num_decodes)
    order = jnp.argsort(scores, axis=1)
    tokens = state.sequences[:, 1:-1].reshape(-1, num_decodes, length)
    return Decodes(_take_beams(tokens, order), _take_beams(scores, order))


MIN_TEMPERATURE = 1e-4  # at or below it, T5X takes the likeliest token


def _is_traced(x: Any) -> bool:
    """Whether a value is known only when a jitted function runs."""
    return isinstance(x, jax.core.Tracer)


def _choose_tokens(
    logits: Float[Array, "rows vocab"],
    temperature: Any,
    topk: Any,
    topp: Any,
    rescale: bool,
    key: jax.Array,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """A token for each row and its log-probability; the temperature is a number or [rows, 1]."""
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Rescaled to the one remaining token, its probability is 1.
    certain = jnp.zeros(likeliest.shape) if rescale else _log_prob(logits, likeliest)
    if isinstance(temperature, int | float) and temperature <= MIN_TEMPERATURE:
        return likeliest, certain
    scaled = logits / jnp.maximum(temperature, MIN_TEMPERATURE)
    if _is_traced(topk):
        # 0 keeps all, like the size of the whole vocabulary.
        count = jnp.where(topk > 0, jnp.minimum(topk, scaled.shape[-1]), scaled.shape[-1])
        threshold = jnp.take(jnp.flip(jnp.sort(scaled, axis=-1), axis=-1), count - 1, axis=-1)
        scaled = jnp.where(scaled >= threshold[:, None], scaled, NEVER)
    elif topk:
        threshold = jax.lax.top_k(scaled, min(topk, scaled.shape[-1]))[0][:, -1:]
        scaled = jnp.where(scaled >= threshold, scaled, NEVER)
    if _is_traced(topp):
        scaled = jnp.where(topp > 0, _keep_top_p(scaled, topp), scaled)
    elif topp:
        scaled = _keep_top_p(scaled, topp)
    token = jax.random.categorical(key, scaled).astype(jnp.int32)
    log_p = _log_prob(scaled if rescale else logits, token)
    if isinstance(temperature, int | float):
        return token, log_p
    greedy = (jnp.asarray(temperature) <= MIN_TEMPERATURE).reshape(-1)
    return jnp.where(greedy, likeliest, token), jnp.where(greedy, certain, log_p)


def _keep_top_p(logits: Float[Array, "rows vocab"], share: Any) -> Float[Array, "rows vocab"]:
    """Keeps only the fewest most probable tokens that together have at least this probability."""
    probs = jax.nn.softmax(logits)
    ordered = -jnp.sort(-probs, axis=-1)
    # Keep a token as long as those before it do not reach the share.
    needed = jnp.cumsum(ordered, axis=-1) - ordered < share
    least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probs >= least, logits, NEVER)


def _log_prob(logits: Float[Array, "rows vocab"], token: Int[Array, " rows"]) -> Array:
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
