"""T5X's names for a batch's features, which subclasses of its models read, and ours for them.

    encoder_input_tokens    inputs                    decoder_target_tokens   targets
    encoder_segment_ids     inputs_segmentation       decoder_segment_ids     targets_segmentation
    encoder_positions       (from the segments)       decoder_positions       (from the segments)
    decoder_loss_weights    loss_weights              decoder_input_tokens    (targets, shifted)

Those in brackets are derived, as seqio.EncDecFeatureConverter does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_OURS = {
    "encoder_input_tokens": "inputs",
    "decoder_target_tokens": "targets",
    "encoder_segment_ids": "inputs_segmentation",
    "decoder_segment_ids": "targets_segmentation",
    "decoder_loss_weights": "loss_weights",
}


def own_features(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch under this project's names; one that has them is returned as it is."""
    if "decoder_target_tokens" not in batch:
        return batch
    return {ours: batch[name] for name, ours in _OURS.items() if name in batch}


def t5x_features(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of the host under T5X's names, int32; one that has them is returned as it is.

    Args:
      batch: `inputs` and `targets`, [batch, length], packed or not.
    """
    if "decoder_target_tokens" in batch:
        return dict(batch)
    named = {
        name: np.asarray(batch[ours], np.int32) for name, ours in _OURS.items() if ours in batch
    }
    targets = named["decoder_target_tokens"]
    read = np.abs(_delayed(targets))
    named["decoder_loss_weights"] = (targets > 0).astype(np.int32)
    for side in ("encoder", "decoder"):
        if f"{side}_segment_ids" in named:
            segments = named[f"{side}_segment_ids"]
            begins = segments != _delayed(segments)
            begins[:, 0] = True
            index = np.arange(segments.shape[1], dtype=np.int32)
            first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
            # Padding is at position 0, as SeqIO packs it.
            named[f"{side}_positions"] = np.where(segments == 0, 0, index - first)
            if side == "decoder":
                read = np.where(begins, 0, read)
    return named | {"decoder_input_tokens": read}


def _delayed(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (1, 0)))[:, :-1]
