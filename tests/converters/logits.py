"""Logits of one model as PyTorch and as our JAX model compute them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from t0repro.evaluation.opened import open_checkpoint


def torch_logits(model, tokens: dict[str, np.ndarray]) -> np.ndarray:
    """float32 [batch, targets, vocabulary] of a transformers model, for unpadded pairs."""
    import torch

    shifted = np.pad(tokens["targets"], ((0, 0), (1, 0)))[:, :-1]
    with torch.no_grad():
        output = model(
            input_ids=torch.from_numpy(tokens["inputs"]).long(),
            decoder_input_ids=torch.from_numpy(shifted).long(),
        )
    return output.logits.numpy()


def jax_logits(directory: Path, tokens: dict[str, np.ndarray]) -> np.ndarray:
    """float32 [batch, targets, vocabulary] of a checkpoint in any format."""
    opened = open_checkpoint(str(directory), None, "float32")
    return np.asarray(opened.model.apply({"params": opened.params}, tokens))
