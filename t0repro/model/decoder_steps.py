"""One position of a decoder, given the keys and values of earlier ones in a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t0repro.model.attention_mask import AttentionMask
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, make_cross_attention_cache, segments_of
from t0repro.model.towers import CrossAttentionCache

Parameters = Mapping[str, Any]
Cache = Mapping[str, Any]  # Flax's collection "cache" of the model


@flax.struct.dataclass
class DecoderReads:
    """The constant inputs of every decoding step.

    Attributes:
      cross_attention_cache: keys and values of the encoder's outputs, by layer, [batch, heads,
        inputs, d_kv].
      mask: which inputs are not padding.
    """

    cross_attention_cache: CrossAttentionCache
    mask: AttentionMask


def read_inputs(model: T5, params: Parameters, inputs: Int[Array, "batch memory"]) -> DecoderReads:
    """Encodes the inputs, once for all positions."""
    segments = segments_of(inputs, None)
    encoded = model.apply({"params": params}, inputs, segments, method=T5.encode)
    assert isinstance(encoded, jax.Array)
    return DecoderReads(
        cross_attention_cache=make_cross_attention_cache(model, params, encoded),
        mask=AttentionMask(jnp.ones((inputs.shape[0], 1), segments.dtype), segments),
    )


def empty_cache(model: T5, rows: int, length: int) -> Cache:
    """Zeros for the keys and values of `length` positions in each decoder layer."""
    config, dtype = model.config, jnp.dtype(model.dtypes.activation)
    zeros = jnp.zeros((rows, config.num_heads, length, config.d_kv), dtype)
    return {
        "decoder": {
            f"layers_{index}": {"self_attention": {"cached_key": zeros, "cached_value": zeros}}
            for index in range(config.num_decoder_layers)
        }
    }


def read_prompts(
    model: T5,
    params: Parameters,
    prompts: Int[Array, "batch length"],
    both_ways: Int[Array, "batch length"],
) -> Cache:
    """The cache of a model without an encoder after it has read prompts, all positions at once.

    Args:
      model: the model.
      params: its parameters.
      prompts: a 0, then each prompt's tokens, then zeros.
      both_ways: 1 at the positions of a prompt, and of the 0 before it: they attend to each other
        if the model's inputs do. The cache has nothing to read at the others.
    """
    # The mask is made of targets, which are padding where there is nothing to read.
    batch = {"targets": both_ways, "full_attention": both_ways, "decoder_inputs": prompts}
    _, filled = model.apply({"params": params}, batch, hidden=True, mutable=["cache"])
    return filled["cache"]


def decoder_step(
    model: T5,
    params: Parameters,
    reads: DecoderReads | None,
    cache: Cache,
    tokens: Int[Array, "batch beams"],
    position: Int[Array, "*rows"],
) -> tuple[Float[Array, "batch beams vocab"], Cache]:
    """Float32 logits of the targets at a position, and the cache with that position.

    Args:
      model: the model.
      params: its parameters.
      reads: from `read_inputs`; all beams of a row read the same input. None without an encoder.
      cache: keys and values of the earlier positions, [batch * beams, heads, length, d_kv].
      tokens: the decoder's inputs: the targets one position earlier, 0 at the first.
      position: counted from 0, of all rows or [batch * beams].
    """
    logits, updated = model.apply(
        {"params": params, "cache": cache},
        tokens.reshape(-1, 1),
        position,
        # The cache's length; its leaves are [rows, heads, length, d_kv].
        jax.tree.leaves(cache)[0].shape[2],
        None if reads is None else reads.cross_attention_cache,
        None if reads is None else reads.mask,
        method=T5.decode_step,
        mutable=["cache"],
    )
    assert isinstance(logits, jax.Array)
    return logits.reshape(*tokens.shape, -1), updated["cache"]
