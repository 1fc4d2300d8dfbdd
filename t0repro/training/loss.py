"""Mesh TensorFlow's loss, and the sums from which evaluation metrics are computed.

    loss = sum over targets > 0 of (cross entropy + z_loss * log(Z)**2) / denominator

The denominator is the number of entries of `targets` in the whole batch, padding included, unless
the configuration sets another. z_loss is added in training only (Unitransformer._compute_loss).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.run_config import ModelConfig
from t0repro.model.decoder_only import of_inputs, text_to_self
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, Batch


def cross_entropy(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Float[Array, "batch length"]:
    """Cross entropy of each target in nats, unweighted and padding included.

    Args:
      logits: float32.
      targets: ids; negative ones count as 0.
      label_smoothing: mass spread evenly over the whole vocabulary, the target's entry included:
        1 - s + s / V at the target, s / V elsewhere.
      z_loss: coefficient of the added log(Z)**2.
    """
    vocab = logits.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)  # [batch, length]
    at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    # The smoothed target distribution sums to 1, so log_z enters with a factor of 1.
    loss = log_z - (1.0 - label_smoothing) * at_target
    if label_smoothing:
        loss = loss - (label_smoothing / vocab) * jnp.sum(logits, axis=-1)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    return loss


def loss_denominator(config: ModelConfig, batch: Mapping[str, Array | np.ndarray]) -> float:
    """The divisor of the summed loss of a whole batch, all microbatches together."""
    if config.loss_denominator is not None:
        return float(config.loss_denominator)
    size = batch["targets"].size
    if config.model_type == "delimited_lm" and "inputs" in batch:
        size += batch["inputs"].size  # they become targets too
    return float(size)


def training_loss(
    model: T5,
    parameters: dict,
    batch: Batch,
    *,
    denominator: float | Float[Array, ""],
    dropout_key: Array | None = None,
) -> Float[Array, ""]:
    """The float32 loss of a batch or microbatch; without a key there is no dropout.

    Args:
      model: the model; its configuration also gives label smoothing and z_loss.
      parameters: the model's parameters.
      batch: int32 arrays [batch, length].
      denominator: the whole batch's, so that the losses of its microbatches add up.
      dropout_key: PRNG key for this microbatch's dropout.
    """
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    batch = text_to_self(model.config, batch)
    logits = model.apply(
        {"params": parameters}, batch, deterministic=dropout_key is None, rngs=rngs
    )
    assert isinstance(logits, jax.Array)
    targets = jnp.asarray(batch["targets"])
    config = model.config
    losses = cross_entropy(
        logits, targets, label_smoothing=config.label_smoothing, z_loss=config.z_loss
    )
    return jnp.sum(losses * _with_loss(config, targets)) / denominator


def _with_loss(config: ModelConfig, targets: Int[Array, "batch length"]) -> Array:
    """Which targets count in the loss."""
    counted = targets > 0
    return counted & ~of_inputs(targets) if config.loss_on_targets_only else counted


def evaluation_sums(
    model: T5,
    parameters: dict,
    batch: Batch,
    *,
    denominator: float | Float[Array, ""],
) -> dict[str, Array]:
    """Per-batch sums, float32 scalars, that `evaluation_metrics` averages.

    They are those of Mesh TensorFlow's teacher-forced evaluation (tpu_estimator_model_fn): its
    loss, and the plain cross entropy and correct predictions over targets > 0.
    """
    batch = text_to_self(model.config, batch)
    logits = model.apply({"params": parameters}, batch)
    assert isinstance(logits, jax.Array)
    targets = jnp.asarray(batch["targets"])
    weights = (targets > 0).astype(jnp.float32)
    counted = _with_loss(model.config, targets)
    if model.config.model_type == "delimited_lm":
        weights = weights * ~of_inputs(targets)
    smoothed = cross_entropy(logits, targets, label_smoothing=model.config.label_smoothing)
    plain = cross_entropy(logits, targets)
    correct = (jnp.argmax(logits, axis=-1) == targets) * weights
    per_row = jnp.sum(weights, axis=-1)
    rows = (per_row > 0).astype(jnp.float32)
    return {
        "batches": jnp.float32(1.0),
        "loss": jnp.sum(smoothed * counted) / denominator,
        "cross_entropy": jnp.sum(plain * weights),
        "correct_tokens": jnp.sum(correct),
        "correct_rows": jnp.sum((jnp.sum(correct, axis=-1) == per_row) * rows),
        "tokens": jnp.sum(weights),
        "rows": jnp.sum(rows),
        "labels": jnp.sum(targets * weights),
    }


def evaluation_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The mean loss over batches, and Mesh TensorFlow's metrics under their names there."""
    # At least 1, so that an evaluation without targets gives zeros rather than NaN.
    tokens, rows = max(sums["tokens"], 1.0), max(sums["rows"], 1.0)
    return {
        "loss": sums["loss"] / max(sums["batches"], 1.0),
        "neg_log_perplexity": -sums["cross_entropy"] / tokens,
        "token_accuracy": sums["correct_tokens"] / tokens,
        "sequence_accuracy": sums["correct_rows"] / rows,
        "num_eval_tokens": sums["tokens"],
    }


def count_targets(batch: Mapping[str, np.ndarray]) -> int:
    """Number of targets in a numpy batch that carry loss."""
    return int(np.count_nonzero(np.asarray(batch["targets"]) > 0))


def count_examples(batch: Mapping[str, np.ndarray]) -> int:
    """Number of examples in a numpy batch: segments if packed, else rows not all padding."""
    if "targets_segmentation" in batch:
        # Segments of a row are numbered from 1, so the largest number is their count.
        return int(np.max(np.asarray(batch["targets_segmentation"]), axis=-1).sum())
    return int(np.count_nonzero(np.any(np.asarray(batch["targets"]) != 0, axis=-1)))
