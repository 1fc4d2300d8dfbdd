"""T5X's loss of a batch, the sums behind T5X's metrics, and those metrics.

The names are those of t5x.models.compute_base_metrics (google-research/t5x at cc342d4). Sums add
up over microbatches, steps and batches, and so do the metrics that `metrics_of` makes from them.
Real tokens are those > 0 or, if a batch has weights, their sum, as in T5X. With
AVERAGE_PER_SEQUENCE tokens are counted, where T5X sums weights divided by each example's.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.model.features import Batch
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import T5, text_to_self
from t0repro.training.choice_losses import CHOICE_LOSSES, add_choice_losses
from t0repro.training.metric_classes import (
    Average,
    AveragePerStep,
    Metric,
    StepsPerTime,
    Sum,
    Time,
    TimeRate,
)
from t0repro.training.token_losses import (
    losses_of,
    map_targets,
    token_weights,
)

Sums = dict[str, jax.Array]


def loss_and_sums(
    model: T5,
    parameters: dict,
    batch: Batch,
    *,
    denominator: float | Float[Array, ""],
    dropout_key: Array | None = None,
    z_loss: bool = True,
) -> tuple[Float[Array, ""], Sums]:
    """The float32 loss of a batch or microbatch, and its sums; without a key, no dropout.

    Args:
      model: the model; its configuration has the options of the loss.
      parameters: the model's parameters.
      batch: what `add_loss_weights` returned, or a part of it.
      denominator: the divisor of the full batch's loss, so that the losses of its microbatches add
        up.
      dropout_key: PRNG key for this microbatch's dropout.
      z_loss: whether to add z_loss.
    """
    config = model.config
    # A language model's inputs are targets too, and T5X counts them so.
    batch = text_to_self(config, batch)
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    hidden = model.apply(
        {"params": parameters}, batch, deterministic=dropout_key is None, rngs=rngs, hidden=True
    )
    assert isinstance(hidden, jax.Array)
    targets, weights = jnp.asarray(batch["targets"]), token_weights(config, batch)
    coefficient = config.z_loss if z_loss else 0.0

    def values(logits: Array, targets: Array) -> Sums:
        losses = losses_of(config, logits, targets, coefficient)
        # Only reported: it must not add to the gradient.
        log_z = jax.nn.logsumexp(jax.lax.stop_gradient(logits), axis=-1)
        return losses | {"log_z": log_z, "correct": jnp.argmax(logits, axis=-1) == targets}

    per_target = map_targets(model, parameters, hidden, targets, values)
    loss = jnp.sum(per_target["loss"] * weights) / denominator
    correct = per_target["correct"] & (weights > 0)
    is_averaged = config.loss_denominator == "AVERAGE_PER_SEQUENCE"
    sums = {
        "loss": loss,
        "z_loss": jnp.sum(coefficient * jnp.square(per_target["log_z"]) * weights) / denominator,
        "correct": _count(correct),
        "scored": _count(weights > 0),
        "real_losses": _count(weights > 0 if is_averaged else weights),
    }
    loss, parts = add_choice_losses(config, loss, per_target, batch)
    if parts:
        sums |= {**parts, "total_loss": loss}
    return loss, sums | token_counts(batch)


def token_counts(batch: Batch) -> Sums:
    """Token and example counts of a batch, float32 scalars; without inputs, only the targets'."""
    counts = {"rows": jnp.float32(np.shape(batch["targets"])[0])}
    for side in ("inputs", "targets") if "inputs" in batch else ("targets",):
        tokens = jnp.asarray(batch[side])
        segments = jnp.asarray(batch.get(f"{side}_segmentation", tokens > 0)).astype(jnp.int32)
        counts[f"all_{side}"] = jnp.float32(tokens.size)
        counts[f"real_{side}"] = _count(segments != 0)
        # Segments of a row are numbered from 1; an unpacked row is one example.
        counts[f"examples_{side}"] = jnp.sum(jnp.max(segments, axis=-1)).astype(jnp.float32)
    return counts


def metrics_of(sums: Sums, *, packed: bool) -> dict[str, Metric]:
    """T5X's metrics of a batch or microbatch, which merge over microbatches and steps.

    Args:
      sums: Sums over the batch.
      packed: Whether rows hold several examples, which decides the metrics' names, as in T5X.
    """
    loss, z_loss = sums["loss"], sums["z_loss"]
    all_targets, real = sums["all_targets"], sums["real_losses"]
    plain = loss - z_loss
    metrics: dict[str, Metric] = {
        "accuracy": Average(sums["correct"], sums["scored"]),
        "loss": AveragePerStep(sums.get("total_loss", loss)),
        "loss_per_nonpadding_target_token": Average(loss, real),
        "loss_per_all_target_tokens": Average(loss, all_targets),
        "z_loss": AveragePerStep(z_loss),
        "z_loss_per_all_target_tokens": Average(z_loss, all_targets),
        "cross_ent_loss": AveragePerStep(plain),
        "cross_ent_loss_per_all_target_tokens": Average(plain, all_targets),
        "non_padding_fraction/loss_weights": Average(real, all_targets),
    }
    metrics |= {name: AveragePerStep(sums[name]) for name in CHOICE_LOSSES if name in sums}
    names = {"inputs": "encoder", "targets": "decoder"}
    if not packed:
        names = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
    if "all_inputs" not in sums:
        del names["inputs"]
    for side, name in names.items():
        rows, tokens = sums["rows"], sums[f"all_{side}"]
        metrics[f"effective_batch_size/{name}"] = AveragePerStep(sums[f"examples_{side}"])
        metrics[f"non_padding_fraction/{name}"] = Average(sums[f"real_{side}"], tokens)
        if packed:
            metrics[f"examples_per_row/{name}"] = Average(sums[f"examples_{side}"], rows)
    real_tokens, tokens = (
        sum(sums[f"{kind}_{side}"] for side in names) for kind in ("real", "all")
    )
    return metrics | {"non_padding_fraction/overall": Average(real_tokens, tokens)} | rates(sums)


def compute_base_metrics(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    mask: Array | None,
    loss: Float[Array, ""],
    z_loss: Float[Array, ""] | None = None,
    segment_ids: Mapping[str, Array] | None = None,
) -> dict[str, Metric]:
    """T5X's metrics from logits and targets: those of `metrics_of` that these two determine.

    Args:
      logits: float32.
      targets: token ids.
      mask: which targets count, or their weights; None for all.
      loss: the loss of the batch.
      z_loss: the part of it that is z_loss, for the metrics of the parts.
      segment_ids: for each side's name, which example of its row a token belongs to; 0 is padding.
    """
    size, rows = jnp.float32(targets.size), jnp.float32(targets.shape[0])
    weights = jnp.ones(targets.shape) if mask is None else jnp.asarray(mask, jnp.float32)
    real, sides = jnp.sum(weights), dict(segment_ids or {})
    correct = (jnp.argmax(logits, axis=-1) == targets) & (weights != 0)
    metrics: dict[str, Metric] = {
        "accuracy": Average(_count(correct), _count(weights != 0)),
        "loss": AveragePerStep(loss),
        "loss_per_nonpadding_target_token": Average(loss, real),
        "loss_per_all_target_tokens": Average(loss, size),
        "non_padding_fraction/loss_weights": Average(real, size),
    }
    if z_loss is not None:
        for name, part in (("z_loss", z_loss), ("cross_ent_loss", loss - z_loss)):
            metrics[name] = AveragePerStep(part)
            metrics[f"{name}_per_all_target_tokens"] = Average(part, size)
    for name, segments in sides.items():
        metrics[f"effective_batch_size/{name}"] = AveragePerStep(count_packed_examples(segments))
        filled = Average(_count(segments != 0), jnp.float32(segments.size))
        metrics[f"non_padding_fraction/{name}"] = filled
    if sides:
        tokens = sum(_count(segments != 0) for segments in sides.values())
        entries = float(sum(segments.size for segments in sides.values()))
        metrics["non_padding_fraction/overall"] = Average(tokens, jnp.float32(entries))
    return metrics | rates({"rows": rows, "all_targets": size})


def count_packed_examples(segment_ids: Int[Array, "batch length"] | Array) -> jax.Array:
    """Number of examples in a packed batch, float32: the segments of all rows, 0 not counted."""
    ids = jnp.asarray(segment_ids).astype(jnp.int32)
    begins = ids != jnp.pad(ids[:, :-1], ((0, 0), (1, 0)))
    return _count(begins & (ids != 0))


def rates(sums: Sums) -> dict[str, Metric]:
    """T5X's timing metrics, and those of tokens that are not padding."""
    # T5X's names say core for what jax calls a device.
    devices = jax.device_count()
    sequences, targets = sums["rows"], sums["all_targets"]
    real = {
        f"timing/real_{side}_tokens_per_second": TimeRate(sums[f"real_{side}s"])
        for side in ("input", "target")
        if f"real_{side}s" in sums
    }
    return {
        "timing/seconds": Time(),
        "timing/seqs": Sum(sequences),
        "timing/steps_per_second": StepsPerTime(),
        "timing/seqs_per_second": TimeRate(sequences),
        "timing/seqs_per_second_per_core": TimeRate(sequences / devices),
        "timing/target_tokens_per_second": TimeRate(targets),
        "timing/target_tokens_per_second_per_core": TimeRate(targets / devices),
        **real,
    }


def _count(truths: jax.Array) -> jax.Array:
    # Summed as integers: a float32 sum of ones stops growing at 2**24.
    return jnp.sum(truths).astype(jnp.float32)
