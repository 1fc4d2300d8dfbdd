"""The losses of Mesh TensorFlow and T5X, and the sums behind Mesh TensorFlow's metrics.

    loss = sum over targets > 0 of (cross entropy + z_loss * log(Z)**2) / denominator

The denominator is the number of entries of `targets` in the full batch, padding included, unless
the configuration sets another. Mesh TensorFlow adds z_loss in training only
(Unitransformer._compute_loss). T5X's metrics are made in t0repro.training.t5_model. At the end are
T-Few's losses over answer choices, and the functions of t5x.losses for a loss of your own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.choices import ChoiceLoss
from t0repro.config.run_config import ModelConfig
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, Batch, logits_of, of_inputs, text_to_self
from t0repro.partitioning.devices import parts_of

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
        kept = 1.0 - label_smoothing
        loss = loss + kept * math.log(kept) + label_smoothing * math.log(elsewhere)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    return loss


def of_each_target(
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
    size = 4 * rows * length * model.config.vocab_size // parts_of("batch", "vocab")
    parts = min(length, -(-size // LOGITS_BYTES))

    def of_part(part: tuple[Array, Array]) -> dict[str, Array]:
        return values(logits_of(model, parameters, part[0]), part[1])

    if parts <= 1:
        return of_part((hidden, targets))
    positions = -(-length // parts)

    def split(x: Array) -> Array:
        padding = [(0, 0), (0, parts * positions - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding).reshape(rows, parts, positions, *x.shape[2:]).swapaxes(0, 1)

    # prevent_cse=False: in a loop, XLA does not merge the recomputation with the forward pass, and
    # JAX's guard against that is slow.
    found = jax.lax.map(
        jax.checkpoint(of_part, prevent_cse=False), (split(hidden), split(jnp.asarray(targets)))
    )
    return {name: x.swapaxes(0, 1).reshape(rows, -1)[:, :length] for name, x in found.items()}


def with_loss_weights(config: ModelConfig, batch: Batch) -> Batch:
    """The full batch, with float32 `loss_weights` if its targets do not all count alike.

    Answer choices have weights of their own (`with_choice_weights`).

    With AVERAGE_PER_SEQUENCE each target counts 1 / (number of targets > 0 of its example), packed
    or not; `loss_weights` that the batch already has are scaled so that each example counts 1.
    Weights come from the full batch, before it is split into microbatches.
    """
    if config.choice_loss is not None:
        return with_choice_weights(batch)
    if config.loss_denominator != "AVERAGE_PER_SEQUENCE":
        return batch
    weights = batch.get("loss_weights")
    if weights is None:
        weights = (jnp.asarray(batch["targets"]) > 0).astype(jnp.float32)
    return {
        **batch,
        "loss_weights": _weights_per_example(weights, batch.get("targets_segmentation")),
    }


def _weights_per_example(
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
        of_example = jnp.sum(weights, axis=-1, keepdims=True)
    else:
        # At most `length` segments, and 0 for padding, which counts nothing.
        length, segments = weights.shape[-1], jnp.asarray(segments)
        weights = jnp.where(segments > 0, weights, 0.0)

        def of_row(weights: jax.Array, ids: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(weights, ids, num_segments=length + 1)[ids]

        of_example = jax.vmap(of_row)(weights, segments)
    return weights / jnp.where(of_example > 0, of_example, 1.0)


def loss_denominator(
    config: ModelConfig, batch: Mapping[str, Array | np.ndarray]
) -> float | Float[Array, ""]:
    """The divisor of the summed loss of a full batch, all microbatches together.

    Args:
      config: the model's configuration.
      batch: what `with_loss_weights` returned.
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

    of = of_each_target(model, parameters, hidden, jnp.asarray(batch["targets"]), values)
    loss = jnp.sum(of["loss"] * token_weights(config, batch)) / denominator
    return with_choice_losses(config, loss, of, batch)[0]


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
    return _with_loss(config, jnp.asarray(batch["targets"]))


def _with_loss(config: ModelConfig, targets: Int[Array, "batch length"]) -> Array:
    """Which targets count in the loss."""
    # 0 is padding, and Mesh TensorFlow negates the ids of tokens that it reads but does not score.
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

    They match Mesh TensorFlow's teacher-forced evaluation (tpu_estimator_model_fn): its loss, and
    the plain cross entropy and correct predictions over targets > 0.
    """
    batch = text_to_self(model.config, batch)
    hidden = model.apply({"params": parameters}, batch, hidden=True)
    assert isinstance(hidden, jax.Array)
    targets = jnp.asarray(batch["targets"])
    weights = (targets > 0).astype(jnp.float32)
    counted = _with_loss(model.config, targets)
    # These metrics leave a delimited_lm's inputs out whether or not its loss counts them.
    if model.config.model_type == "delimited_lm":
        weights = weights * ~of_inputs(targets)

    def values(logits: Array, targets: Array) -> dict[str, Array]:
        # No z_loss: Mesh TensorFlow adds it in training only.
        smoothing = model.config.label_smoothing
        return {
            "smoothed": cross_entropy(logits, targets, label_smoothing=smoothing),
            "plain": cross_entropy(logits, targets),
            "correct": jnp.argmax(logits, axis=-1) == targets,
        }

    of = of_each_target(model, parameters, hidden, targets, values)
    correct = of["correct"] * weights
    per_row = jnp.sum(weights, axis=-1)
    rows = (per_row > 0).astype(jnp.float32)
    return {
        "batches": jnp.float32(1.0),
        "loss": jnp.sum(of["smoothed"] * counted) / denominator,
        "cross_entropy": jnp.sum(of["plain"] * weights),
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


def count_targets(batch: Mapping[str, Any]) -> Any:
    """Number of targets in a batch, of numpy's or JAX's arrays, that carry loss."""
    return (batch["targets"] > 0).sum()


def count_inputs(batch: Mapping[str, Any]) -> Any:
    """Number of inputs in a batch that are not padding; 0 without inputs."""
    return (batch["inputs"] != 0).sum() if "inputs" in batch else 0


def count_examples(batch: Mapping[str, Any]) -> Any:
    """Number of examples in a batch: segments if packed, else rows not all padding."""
    if "targets_segmentation" in batch:
        # Segments of a row are numbered from 1, so the largest number is their count.
        return batch["targets_segmentation"].max(axis=-1).sum()
    return (batch["targets"] != 0).any(axis=-1).sum()


# ---- T-Few's losses over answer choices ----------------------------------------------------------

# A row holds one example: its input and its choices, the right one first, each in an equal part of
# the row of targets (t0repro.data.train_data):
#
#     inputs                3  8  5  1  0
#     targets               6  4  1  0 | 3  1  0  0 | 7  7  2  1
#     targets_segmentation  1  1  1  0 | 2  2  0  0 | 3  3  3  3
#
#     length-normalized loss  mean over examples of -log softmax(scores) at the right choice, where
#                             a choice's score is the mean log-likelihood of its tokens
#     unlikelihood            mean over the tokens of all wrong choices of -log(1 - p + 0.01)
#
# Both are of a full batch: its counts are in the weights that `with_choice_weights` adds, so that
# the losses of microbatches add up.
#
# Sources: Liu et al. 2022, https://arxiv.org/abs/2205.05638, equations 3 and 4; the 0.01, which
# keeps the logarithm finite and is not in the paper, and the means over a batch are of
# r-three/t-few, src/models/EncoderDecoder.py. Its reported unlikelihood is lower by a number that
# depends on no parameter, since its sum includes the padding and the right choice at p = exp(-100).


CHOICE_LOSSES = ("length_normalized_loss", "unlikelihood_loss")
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
    # -expm1(log p) is 1 - p, without the rounding of a p close to 1.
    unlikelihood = -jnp.log(_SPARED - jnp.expm1(log_p))
    values = (chosen * batch["example_weights"], unlikelihood * batch["unlikelihood_weights"])
    return {name: jnp.sum(value) for name, value in zip(CHOICE_LOSSES, values, strict=True)}


def with_choice_losses(
    config: ModelConfig, loss: Array, of: Mapping[str, Array], batch: Mapping[str, Array]
) -> tuple[Array, dict[str, jax.Array]]:
    """A loss with the two losses over answer choices added, and the two by name.

    Without a choice_loss in the configuration, the loss alone.

    Args:
      config: the model's configuration.
      loss: the loss of the right choices.
      of: what `losses_of` returned for each target.
      batch: what `with_loss_weights` returned, or a part of it.
    """
    if config.choice_loss is None:
        return loss, {}
    parts = choice_losses(config.choice_loss, of["log_p"], batch)
    factors = (config.choice_loss.length_normalized, config.choice_loss.unlikelihood)
    weighted = [f * parts[name] for f, name in zip(factors, CHOICE_LOSSES, strict=True)]
    return loss + sum(weighted, jnp.float32(0.0)), parts


# ---- The loss functions of t5x.losses, for a loss of your own ------------------------------------
#
# The trainer's own loss never holds all logits at once. These take the logits of a full batch, as a
# subclass of `BaseTransformerModel` computes them.


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
        weights = _weights_per_example(weights, batch.get("decoder_segment_ids"))
    return jnp.sum(weights), weights
