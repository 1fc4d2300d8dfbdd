"""The losses of Mesh TensorFlow and T5X, and the sums behind Mesh TensorFlow's metrics.

    loss = sum over targets > 0 of (cross entropy + z_loss * log(Z)**2) / denominator

The denominator is the number of entries of `targets` in the full batch, padding included, unless
the configuration sets another. Mesh TensorFlow adds z_loss in training only
(Unitransformer._compute_loss). T5X's metrics are made in t0repro.training.t5x_metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.model import ModelConfig
from t0repro.model.features import Batch
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, logits_of, mark_inputs, text_to_self
from t0repro.partitioning.devices import count_shards
from t0repro.training.choice_losses import add_choice_losses, add_choice_weights

# Bytes of float32 logits that a device holds at a time.
LOGITS_BYTES = 1 << 28


def cross_entropy(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    *,
    label_smoothing: float = 0.0,
    spares_target: bool = False,
    z_loss: float = 0.0,
) -> Float[Array, "batch length"]:
    """Cross entropy of each target in nats, unweighted and padding included.

    Args:
      logits: float32.
      targets: ids; negative ones count as 0.
      label_smoothing: mass spread evenly over the whole vocabulary, the target's entry included:
        1 - s + s / V at the target, s / V elsewhere.
      spares_target: spread that mass over the other entries only, 1 - s at the target and s / (V -
        1) elsewhere, and subtract the entropy of this distribution, so that the least loss is 0.
      z_loss: coefficient of the added log(Z)**2.
    """
    vocab = logits.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)  # [batch, length]
    at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    # The smoothed target distribution sums to 1, so log_z enters with a factor of 1. The sum over
    # logits below includes the target's; if it is spared, that share is taken out here.
    elsewhere = label_smoothing / ((vocab - 1) if spares_target else vocab)
    at_once = 1.0 - label_smoothing - (elsewhere if spares_target else 0.0)
    loss = log_z - at_once * at_target
    if label_smoothing:
        loss = loss - elsewhere * jnp.sum(logits, axis=-1)
    if label_smoothing and spares_target:
        target_mass = 1.0 - label_smoothing
        loss = loss + target_mass * math.log(target_mass) + label_smoothing * math.log(elsewhere)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    return loss


def map_targets(
    model: T5,
    parameters: Mapping[str, Any],
    hidden: Float[Array, "batch length d_model"],
    targets: Int[Array, "batch length"],
    values: Callable[[Array, Array], dict[str, Array]],
) -> dict[str, Array]:
    """Values per target computed from its logits, with logits for a slice of positions at a time.

    1,024 rows of 256 targets have 34 GB of logits. Above `LOGITS_BYTES` per device, logits are
    computed for one slice of positions after another, and recomputed in the backward pass.

    Args:
      model: the model.
      parameters: its parameters.
      hidden: the model's output when called with `hidden=True`.
      targets: token ids to predict.
      values: (logits, targets) of some positions -> arrays [batch, positions].
    """
    rows, length = targets.shape
    # 4 bytes each: logits are float32, whatever the activations are.
    size = 4 * rows * length * model.config.vocab_size // count_shards("batch", "vocab")
    slices = min(length, -(-size // LOGITS_BYTES))

    def map_slice(part: tuple[Array, Array]) -> dict[str, Array]:
        return values(logits_of(model, parameters, part[0]), part[1])

    if slices <= 1:
        return map_slice((hidden, targets))
    positions = -(-length // slices)

    def split(x: Array) -> Array:
        padding = [(0, 0), (0, slices * positions - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding).reshape(rows, slices, positions, *x.shape[2:]).swapaxes(0, 1)

    # prevent_cse=False: in a loop, XLA does not merge the recomputation with the forward pass, and
    # JAX's guard against that is slow.
    results = jax.lax.map(
        jax.checkpoint(map_slice, prevent_cse=False), (split(hidden), split(jnp.asarray(targets)))
    )
    return {name: x.swapaxes(0, 1).reshape(rows, -1)[:, :length] for name, x in results.items()}


def add_loss_weights(config: ModelConfig, batch: Batch) -> Batch:
    """The full batch, with float32 `loss_weights` if its targets do not all count alike.

    Answer choices have weights of their own (`add_choice_weights`).

    With AVERAGE_PER_SEQUENCE each target counts 1 / (number of targets > 0 of its example), packed
    or not; `loss_weights` that the batch already has are scaled so that each example counts 1.
    Weights come from the full batch, before it is split into microbatches.
    """
    if config.choice_loss is not None:
        return add_choice_weights(batch)
    if config.loss_denominator != "AVERAGE_PER_SEQUENCE":
        return batch
    weights = batch.get("loss_weights")
    if weights is None:
        weights = (jnp.asarray(batch["targets"]) > 0).astype(jnp.float32)
    return {
        **batch,
        "loss_weights": weights_per_example(weights, batch.get("targets_segmentation")),
    }


def weights_per_example(
    weights: Array | np.ndarray,
    segments: Int[Array | np.ndarray, "batch length"] | None,
) -> Float[Array, "batch length"]:
    """Each target's weight over the sum of its example's weights, so that an example counts 1.

    Args:
      weights: not negative.
      segments: which example of its row a target belongs to; None for one example per row.
    """
    weights = jnp.asarray(weights, jnp.float32)
    if segments is None:
        per_example = jnp.sum(weights, axis=-1, keepdims=True)
    else:
        # At most `length` segments, and 0 for padding, which counts nothing.
        length, segments = weights.shape[-1], jnp.asarray(segments)
        weights = jnp.where(segments > 0, weights, 0.0)

        def sum_row(weights: jax.Array, ids: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(weights, ids, num_segments=length + 1)[ids]

        per_example = jax.vmap(sum_row)(weights, segments)
    return weights / jnp.where(per_example > 0, per_example, 1.0)


def loss_denominator(
    config: ModelConfig, batch: Mapping[str, Array | np.ndarray]
) -> float | Float[Array, ""]:
    """The divisor of the summed loss of a full batch, all microbatches together.

    Args:
      config: the model's configuration.
      batch: what `add_loss_weights` returned.
    """
    if config.loss_denominator == "NUM_REAL_TARGET_TOKENS":
        if "loss_weights" in batch:
            return jnp.sum(jnp.asarray(batch["loss_weights"], jnp.float32))
        return jnp.maximum(jnp.sum(jnp.asarray(batch["targets"]) > 0), 1).astype(jnp.float32)
    if config.loss_denominator == "AVERAGE_PER_SEQUENCE":
        return jnp.maximum(jnp.sum(jnp.asarray(batch["loss_weights"])), 1.0)
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
      denominator: the full batch's, so that the losses of its microbatches add up.
      dropout_key: PRNG key for this microbatch's dropout.
    """
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    batch = text_to_self(model.config, batch)
    hidden = model.apply(
        {"params": parameters}, batch, deterministic=dropout_key is None, rngs=rngs, hidden=True
    )
    assert isinstance(hidden, jax.Array)
    config = model.config

    def values(logits: Array, targets: Array) -> dict[str, Array]:
        return losses_of(config, logits, targets, config.z_loss)

    per_target = map_targets(model, parameters, hidden, jnp.asarray(batch["targets"]), values)
    loss = jnp.sum(per_target["loss"] * token_weights(config, batch)) / denominator
    return add_choice_losses(config, loss, per_target, batch)[0]


def losses_of(
    config: ModelConfig, logits: Array, targets: Int[Array, "batch length"], z_loss: float
) -> dict[str, Array]:
    """`loss` of each target and, if the configuration has a choice_loss, `log_p`.

    Args:
      config: the model's configuration.
      logits: float32, [batch, length, vocab].
      targets: token ids.
      z_loss: coefficient of the added log(Z)**2.
    """
    loss = cross_entropy(
        logits,
        targets,
        label_smoothing=config.label_smoothing,
        spares_target=config.arithmetic.smoothing_spares_target,
        z_loss=z_loss,
    )
    if config.choice_loss is None:
        return {"loss": loss}
    # Neither smoothing nor z_loss, so that it is the logarithm of a probability.
    return {"loss": loss, "log_p": -cross_entropy(logits, targets)}


def token_weights(config: ModelConfig, batch: Batch) -> Array:
    """How much each target counts in the summed loss, [batch, length]: 0 or 1, or its weight."""
    if "loss_weights" in batch:
        return jnp.asarray(batch["loss_weights"])
    return _mark_scored(config, jnp.asarray(batch["targets"]))


def _mark_scored(config: ModelConfig, targets: Int[Array, "batch length"]) -> Array:
    """Which targets count in the loss."""
    # 0 is padding, and Mesh TensorFlow negates the ids of tokens that it reads but does not score.
    counted = targets > 0
    return counted & ~mark_inputs(targets) if config.loss_on_targets_only else counted


def evaluation_sums(
    model: T5,
    parameters: dict,
    batch: Batch,
    *,
    denominator: float | Float[Array, ""],
) -> dict[str, Array]:
    """Per-batch sums, float32 scalars, that `evaluation_metrics` averages.

    They match Mesh TensorFlow's teacher-forced evaluation (tpu_estimator_model_fn): its loss, and
    the plain cross entropy and correct predictions over targets > 0.
    """
    batch = text_to_self(model.config, batch)
    hidden = model.apply({"params": parameters}, batch, hidden=True)
    assert isinstance(hidden, jax.Array)
    targets = jnp.asarray(batch["targets"])
    weights = (targets > 0).astype(jnp.float32)
    counted = _mark_scored(model.config, targets)
    # These metrics leave a delimited_lm's inputs out whether or not its loss counts them.
    if model.config.model_type == "delimited_lm":
        weights = weights * ~mark_inputs(targets)

    def values(logits: Array, targets: Array) -> dict[str, Array]:
        # No z_loss: Mesh TensorFlow adds it in training only.
        smoothing = model.config.label_smoothing
        return {
            "smoothed": cross_entropy(logits, targets, label_smoothing=smoothing),
            "plain": cross_entropy(logits, targets),
            "correct": jnp.argmax(logits, axis=-1) == targets,
        }

    per_target = map_targets(model, parameters, hidden, targets, values)
    correct = per_target["correct"] * weights
    per_row = jnp.sum(weights, axis=-1)
    rows = (per_row > 0).astype(jnp.float32)
    return {
        "batches": jnp.float32(1.0),
        "loss": jnp.sum(per_target["smoothed"] * counted) / denominator,
        "cross_entropy": jnp.sum(per_target["plain"] * weights),
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


def count_targets(batch: Mapping[str, Any], config: ModelConfig | None = None) -> Any:
    """Number of targets in a batch, of numpy's or JAX's arrays, that carry loss.

    Args:
      batch: the arrays.
      config: the model's; a language model may read inputs as targets, with loss or without.
    """
    if "loss_weights" not in batch and config is not None:
        if config.loss_on_targets_only or config.model_type == "delimited_lm":
            return token_weights(config, text_to_self(config, batch)).sum()
    return (batch.get("loss_weights", batch["targets"]) > 0).sum()


def count_inputs(batch: Mapping[str, Any]) -> Any:
    """Number of inputs in a batch that are not padding; 0 without inputs."""
    return (batch["inputs"] != 0).sum() if "inputs" in batch else 0


def count_examples(batch: Mapping[str, Any]) -> Any:
    """Number of examples in a batch: segments if packed, else rows not all padding."""
    if "targets_segmentation" in batch:
        # Segments of a row are numbered from 1, so the largest number is their count.
        return batch["targets_segmentation"].max(axis=-1).sum()
    return (batch["targets"] != 0).any(axis=-1).sum()
