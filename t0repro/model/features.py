"""T5X's names of a batch's features, and ours.

    encoder_input_tokens    inputs                    decoder_target_tokens   targets
    encoder_segment_ids     inputs_segmentation       decoder_segment_ids     targets_segmentation
    encoder_positions       (from the segments)       decoder_positions       (from the segments)
    decoder_loss_weights    (of targets > 0)          decoder_input_tokens    (targets, shifted)
    decoder_causal_attention  full_attention

Those in brackets are derived, as seqio.EncDecFeatureConverter does, unless the batch has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Batch = Mapping[str, jax.Array | np.ndarray]
# Positions have no counterpart; loss_weights, [batch, length], weigh the targets' losses. T5X's
# decoder_causal_attention is 1 where positions attend to each other in *both* directions.
FEATURE_NAMES = {
    "encoder_input_tokens": "inputs",
    "decoder_target_tokens": "targets",
    "decoder_input_tokens": "decoder_inputs",
    "encoder_segment_ids": "inputs_segmentation",
    "decoder_segment_ids": "targets_segmentation",
    "decoder_loss_weights": "loss_weights",
    "decoder_causal_attention": "full_attention",
}
_POSITIONS = ("encoder_positions", "decoder_positions")


def rename_features(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch under this project's names; one that has them is returned as it is."""
    if FEATURE_NAMES.keys().isdisjoint(batch):
        return batch
    return {name: batch[t5x_name] for t5x_name, name in FEATURE_NAMES.items() if t5x_name in batch}


def translate_call(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of T5's call for those of T5X's network; others are returned as they are."""
    by_name = "encoder_input_tokens" in kwargs
    if "method" in kwargs or not (by_name or args and not isinstance(args[0], Mapping)):
        return args, kwargs
    if kwargs.pop("decode", False):
        raise TypeError("This T5 decodes through t0repro.model.t5x_decoding, not with decode=True.")
    order = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    named = {name: kwargs.pop(name, None) for name in (*FEATURE_NAMES, *_POSITIONS)}
    named |= dict(zip(order, args, strict=False))
    arrays = {name: x for name, x in named.items() if x is not None}
    # T5X's init passes ones of float32 where no type is known.
    batch = {name: jnp.asarray(x).astype(jnp.int32) for name, x in rename_features(arrays).items()}
    deterministic = not kwargs.pop("enable_dropout", True)
    return (batch,), {**kwargs, "deterministic": deterministic}


def t5x_features(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of the host under T5X's names, int32, with those that can be derived.

    Weights that are fractions are float32.

    Args:
      batch: `inputs` and `targets`, [batch, length], packed or not; under T5X's names, or ours.
    """
    renamed = rename_features(batch)
    named: dict[str, np.ndarray] = {
        name: np.asarray(renamed[ours], np.int32)
        for name, ours in FEATURE_NAMES.items()
        if ours in renamed
    }
    if (weights := np.asarray(renamed.get("loss_weights", 0))).dtype.kind == "f":
        named["decoder_loss_weights"] = weights.astype(np.float32)
    targets = named["decoder_target_tokens"]
    # Negative ids are tokens without loss, which the decoder reads like any other.
    read = np.abs(_shift_by_one(targets))
    derived = {"decoder_loss_weights": (targets > 0).astype(np.int32)}
    for side in ("encoder", "decoder"):
        if f"{side}_segment_ids" in named:
            segments = named[f"{side}_segment_ids"]
            begins = segments != _shift_by_one(segments)
            begins[:, 0] = True
            index = np.arange(segments.shape[1], dtype=np.int32)
            first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
            # Padding is at position 0, as SeqIO packs it.
            derived[f"{side}_positions"] = np.where(segments == 0, 0, index - first)
            if side == "decoder":
                read = np.where(begins, 0, read)
    # What the batch has is kept, a user's own features too.
    return {**derived, "decoder_input_tokens": read, **(named if renamed is batch else batch)}


def _shift_by_one(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (1, 0)))[:, :-1]
