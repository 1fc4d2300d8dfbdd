"""Log-likelihoods of targets, as Mesh TensorFlow's mode "score" computes them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import T5
from t0repro.training.loss import cross_entropy


def score_batches(
    params: dict, model: T5, batches: Iterable[Mapping[str, np.ndarray]]
) -> np.ndarray:
    """Log-likelihood of each row's targets: float32 [rows of all batches], natural log.

    It is the sum over targets > 0 of log p, EOS included, given the row's inputs; it is not divided
    by the length. Each row is one example and zeros are padding: segmentation is not read, as in
    Mesh TensorFlow's mode "score" (tpu_estimator_model_fn).

    Args:
      params: the model's parameters, a nested dictionary.
      model: the model; its dtype policy governs activations, the log-softmax is float32.
      batches: `inputs` and `targets`, int32 [batch, length]; each new shape is compiled once.
    """
    scores: list[jax.Array] = []
    for batch in batches:
        scores.append(_score(model, params, batch["inputs"], batch["targets"]))
    # Read only here: while the host prepares a batch the device works on the one before.
    return np.concatenate([np.zeros(0, np.float32), *jax.device_get(scores)])


@functools.partial(jax.jit, static_argnums=0)
def _score(model: T5, params: dict, inputs: Array, targets: Array) -> Float[Array, " batch"]:
    """Scores of one batch on the device."""
    logits = model.apply({"params": params}, {"inputs": inputs, "targets": targets})
    assert isinstance(logits, jax.Array)
    losses = cross_entropy(logits, targets)
    return -jnp.sum(losses * (targets > 0), axis=-1)
