"""The loss functions of t5x.losses, for a loss of your own.

The trainer's own loss never holds all logits at once. These take the logits of a full batch, as a
subclass of `BaseTransformerModel` computes them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.model.shapes import Array, Float, Int
from t0repro.training.token_losses import cross_entropy, weights_per_example


@enum.unique
class SpecialLossNormalizingFactor(enum.Enum):
    """Divisors of a loss that depend on the batch.

    Attributes:
      NUM_REAL_TARGET_TOKENS: the sum of the targets' weights.
      NUM_TOTAL_TARGET_TOKENS: the number of targets, padding included.
      AVERAGE_PER_SEQUENCE: the mean over examples of each example's mean over its targets.
    """

    NUM_REAL_TARGET_TOKENS = 1
    NUM_TOTAL_TARGET_TOKENS = 2
    AVERAGE_PER_SEQUENCE = 3


NormalizingFactor = float | int | str | SpecialLossNormalizingFactor | None


def convert_special_loss_normalizing_factor_to_enum(x: str) -> SpecialLossNormalizingFactor:
    """The divisor of this name, in any case.

    Raises:
      ValueError: if there is no such divisor.
    """
    if x.upper() not in SpecialLossNormalizingFactor.__members__:
        known = ", ".join(SpecialLossNormalizingFactor.__members__)
        raise ValueError(f"{x!r} does not name a way to normalize a loss. Known: {known}.")
    return SpecialLossNormalizingFactor[x.upper()]


def cross_entropy_with_logits(
    logits: Float[Array, "*batch vocab"],
    targets: Float[Array, "*batch vocab"],
    z_loss: float,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Cross entropy with a distribution over the vocabulary, in nats: (loss, its z_loss part).

    Args:
      logits: float32.
      targets: the distribution, for instance one-hot.
      z_loss: coefficient of the added log(Z)**2.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    z = z_loss * jnp.square(log_z)
    return -jnp.sum(targets * (logits - log_z[..., None]), axis=-1) + z, z


def compute_weighted_cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    weights: Float[Array | np.ndarray, "*batch"] | Int[Array | np.ndarray, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: float | Float[Array, ""] | Int[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], Any]:
    """The summed loss of a batch, its z_loss part, and the sum of the weights.

    Args:
      logits: float32.
      targets: token ids.
      weights: how much each target counts; None counts each once.
      label_smoothing: mass that is spread over all tokens but the target.
      z_loss: coefficient of the added log(Z)**2.
      loss_normalizing_factor: divides the first two sums; None leaves them.

    Raises:
      ValueError: if the shapes do not fit.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"Logits {logits.shape} do not fit targets {targets.shape}.")
    # T5X's smoothing: the mass goes to the other tokens only, and the least loss is 0.
    loss = cross_entropy(
        logits, targets, label_smoothing=label_smoothing, spares_target=True, z_loss=z_loss
    )
    # Once more by itself: T5X reports it, and `cross_entropy` returns only the sum.
    z = z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    total: Any = math.prod(targets.shape)
    if weights is not None:
        loss, z, total = loss * weights, z * weights, jnp.sum(weights)
    divisor = 1.0 if loss_normalizing_factor is None else loss_normalizing_factor
    return jnp.sum(loss / divisor), jnp.sum(z / divisor), total


def get_loss_normalizing_factor_and_weights(
    loss_normalizing_factor: NormalizingFactor, batch: Mapping[str, Array | np.ndarray]
) -> tuple[Any, Any]:
    """The divisor of a batch's loss and the weights of its targets.

    Args:
      loss_normalizing_factor: a number or None, which are returned as they are, or a divisor that
        depends on the batch, also by its name.
      batch: a batch with T5X's feature names.
    """
    weights, factor = batch.get("decoder_loss_weights"), loss_normalizing_factor
    # gin files give the name, and T5X's own code the member.
    if isinstance(factor, str):
        factor = convert_special_loss_normalizing_factor_to_enum(factor)
    if not isinstance(factor, SpecialLossNormalizingFactor):
        return factor, weights
    targets = jnp.asarray(batch["decoder_target_tokens"])
    if weights is None:
        weights = (targets > 0).astype(jnp.float32)
    if factor is SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS:
        return float(targets.size), weights
    if factor is SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE:
        # So that the sum of the weights below is the number of examples.
        weights = weights_per_example(weights, batch.get("decoder_segment_ids"))
    return jnp.sum(weights), weights
