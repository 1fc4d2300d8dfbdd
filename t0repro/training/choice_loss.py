"""T-Few's two losses over the answer choices of an example, beside the loss of its right choice.

A row holds one example: its input and its choices, the right one first, each in an equal part of
the row of targets (t0repro.data.choices):

    inputs                3  8  5  1  0
    targets               6  4  1  0 | 3  1  0  0 | 7  7  2  1
    targets_segmentation  1  1  1  0 | 2  2  0  0 | 3  3  3  3

    length-normalized loss  mean over examples of -log softmax(scores) at the right choice, where a
                            choice's score is the mean log-likelihood of its tokens
    unlikelihood            mean over the tokens of all wrong choices of -log(1 - p + 0.01)

Both are of a full batch: its counts are in the weights that `with_choice_weights` adds, so that the
losses of microbatches add up.

Sources: Liu et al. 2022, https://arxiv.org/abs/2205.05638, equations 3 and 4; the 0.01, which keeps
the logarithm finite and is not in the paper, and the means over a batch are of r-three/t-few,
src/models/EncoderDecoder.py. Its reported unlikelihood is lower by a number that depends on no
parameter, since its sum includes the padding and the right choice at p = exp(-100).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from t0repro.config.choices import ChoiceLoss
from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import Batch

PARTS = ("length_normalized_loss", "unlikelihood_loss")
_SPARED = 0.01  # T-Few adds it to 1 - p
_NEVER = -1e9  # the score of a choice that is not there


def with_choice_weights(batch: Batch) -> Batch:
    """The full batch with the weights of its losses, float32.

    `loss_weights` are 1 at the right choice's tokens. The others are divided by the batch's counts.
    """
    segments = jnp.asarray(batch["targets_segmentation"])
    right, wrong = ((segments == 1).astype("float32"), (segments > 1).astype("float32"))
    examples = jnp.max(right, axis=-1)
    return {
        **batch,
        "loss_weights": right,
        "unlikelihood_weights": wrong / jnp.maximum(jnp.sum(wrong), 1.0),
        "example_weights": examples / jnp.maximum(jnp.sum(examples), 1.0),
    }


def choice_losses(
    loss: ChoiceLoss, log_p: Float[Array, "batch length"], batch: Mapping[str, Array]
) -> dict[str, jax.Array]:
    """The two losses of a batch or microbatch by name, float32 scalars, not yet weighted.

    Args:
      loss: gives the number of choices.
      log_p: log-probability of each target.
      batch: what `with_choice_weights` returned, or a part of it.
    """
    rows = log_p.shape[0]
    real = jnp.asarray(batch["targets_segmentation"]).reshape(rows, loss.choices, -1) > 0
    lengths = jnp.sum(real, axis=-1)
    sums = jnp.sum(jnp.where(real, log_p.reshape(real.shape), 0.0), axis=-1)
    scores = jnp.where(lengths > 0, sums / jnp.maximum(lengths, 1), _NEVER)
    chosen = jax.nn.logsumexp(scores, axis=-1) - scores[:, 0]
    unlikelihood = -jnp.log(_SPARED - jnp.expm1(log_p))
    values = (chosen * batch["example_weights"], unlikelihood * batch["unlikelihood_weights"])
    return {name: jnp.sum(value) for name, value in zip(PARTS, values, strict=True)}


def weighted(loss: ChoiceLoss, parts: Mapping[str, jax.Array]) -> jax.Array:
    """What the two losses add to a batch's."""
    factors = (loss.length_normalized, loss.unlikelihood)
    return sum((f * parts[name] for f, name in zip(factors, PARTS, strict=True)), jnp.float32(0.0))
