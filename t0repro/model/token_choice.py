"""How T5X's sampling chooses a token: temperature, topk and topp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from t0repro.config.decoding import NEVER
from t0repro.model.shapes import Array, Float, Int

MIN_TEMPERATURE = 1e-4  # at or below it, T5X takes the likeliest token


def traced(x: Any) -> bool:
    """Whether a value is known only when a jitted function runs."""
    return isinstance(x, jax.core.Tracer)


def chosen_tokens(
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
    if traced(topk):
        # 0 keeps all, like the size of the whole vocabulary.
        count = jnp.where(topk > 0, jnp.minimum(topk, scaled.shape[-1]), scaled.shape[-1])
        kept = jnp.take(jnp.flip(jnp.sort(scaled, axis=-1), axis=-1), count - 1, axis=-1)
        scaled = jnp.where(scaled >= kept[:, None], scaled, NEVER)
    elif topk:
        kept = jax.lax.top_k(scaled, min(topk, scaled.shape[-1]))[0][:, -1:]
        scaled = jnp.where(scaled >= kept, scaled, NEVER)
    if traced(topp):
        scaled = jnp.where(topp > 0, _most_probable(scaled, topp), scaled)
    elif topp:
        scaled = _most_probable(scaled, topp)
    token = jax.random.categorical(key, scaled).astype(jnp.int32)
    log_p = _log_prob(scaled if rescale else logits, token)
    if isinstance(temperature, int | float):
        return token, log_p
    greedy = (jnp.asarray(temperature) <= MIN_TEMPERATURE).reshape(-1)
    return jnp.where(greedy, likeliest, token), jnp.where(greedy, certain, log_p)


def _most_probable(logits: Float[Array, "rows vocab"], share: Any) -> Float[Array, "rows vocab"]:
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
