"""T-Few's losses over answer choices.

A row holds one example: its input and its choices, the right one first, each in an equal part of
the row of targets (t0repro.data.train_data):

    inputs                3  8  5  1  0
    targets               6  4  1  0 | 3  1  0  0 | 7  7  2  1
    targets_segmentation  1  1  1  0 | 2  2  0  0 | 3  3  3  3

    length-normalized loss  mean over examples of -log softmax(scores) at the right choice, where
                            a choice's score is the mean log-likelihood of its tokens
    unlikelihood            mean over the tokens of all wrong choices of -log(1 - p + 0.01)

Both are of a full batch: its counts are in the weights that `add_choice_weights` adds, so that
the losses of microbatches add up.

Sources: Liu et al. 2022, https://arxiv.org/abs/2205.05638, equations 3 and 4; the 0.01, which
keeps the logarithm finite and is not in the paper, and the means over a batch are of
r-three/t-few, src/models/EncoderDecoder.py. Its reported unlikelihood is lower by a number that
depends on no parameter, since its sum includes the padding and the right choice at p = exp(-100).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from t0repro.config.choices import ChoiceLoss
from t0repro.config.model import ModelConfig
from t0repro.model.features import Batch
from t0repro.model.shapes import Array, Float

CHOICE_LOSSES = ("length_normalized_loss", "unlikelihood_loss")
_SPARED = 0.01  # T-Few adds it to 1 - p
_NEVER = -1e9  # the score of a choice that is not there


def add_choice_weights(batch: Batch) -> Batch:
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
      batch: what `add_choice_weights` returned, or a part of it.
    """
    rows = log_p.shape[0]
    real = jnp.asarray(batch["targets_segmentation"]).reshape(rows, loss.choices, -1) > 0
    lengths = jnp.sum(real, axis=-1)
    sums = jnp.sum(jnp.where(real, log_p.reshape(real.shape), 0.0), axis=-1)
    scores = jnp.where(lengths > 0, sums / jnp.maximum(lengths, 1), _NEVER)
    chosen = jax.nn.logsumexp(scores, axis=-1) - scores[:, 0]
    # -expm1(log p) is 1 - p, without the rounding of a p close to 1.
    unlikelihood = -jnp.log(_SPARED - jnp.expm1(log_p))
    values = (chosen * batch["example_weights"], unlikelihood * batch["unlikelihood_weights"])
    return {name: jnp.sum(value) for name, value in zip(CHOICE_LOSSES, values, strict=True)}


def add_choice_losses(
    config: ModelConfig, loss: Array, of: Mapping[str, Array], batch: Mapping[str, Array]
) -> tuple[Array, dict[str, jax.Array]]:
    """A loss with the two losses over answer choices added, and the two by name.

    Without a choice_loss in the configuration, the loss alone.

    Args:
      config: the model's configuration.
      loss: the loss of the right choices.
      of: what `losses_of` returned for each target.
      batch: what `add_loss_weights` returned, or a part of it.
    """
    if config.choice_loss is None:
        return loss, {}
    parts = choice_losses(config.choice_loss, of["log_p"], batch)
    factors = (config.choice_loss.length_normalized, config.choice_loss.unlikelihood)
    weighted = [f * parts[name] for f, name in zip(factors, CHOICE_LOSSES, strict=True)]
    return loss + sum(weighted, jnp.float32(0.0)), parts
