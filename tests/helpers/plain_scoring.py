"""Log-likelihoods the plain way, one example a row, in float64: what the engine is held against."""

from __future__ import annotations

import jax
import numpy as np
from scipy.special import log_softmax


def row_scores(params, model, batch) -> np.ndarray:
    """Sum of log p over each row's targets > 0, EOS included: float64 [rows], natural log.

    Args:
      params: the model's parameters.
      model: a T5.
      batch: `inputs` and `targets`, int32 [rows, length]; zeros are padding.
    """
    inputs, targets = batch["inputs"], batch["targets"]
    logits = jax.jit(model.apply)({"params": params}, {"inputs": inputs, "targets": targets})
    log_p = log_softmax(np.asarray(logits, np.float64), axis=-1)
    of_targets = np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return np.sum(of_targets, axis=-1, where=targets > 0)
