"""T5X's loss with the sums of a batch that T5X's metrics are made of, and the metrics.

The names are those of t5x.models.compute_base_metrics (google-research/t5x at cc342d4). Sums of
microbatches, steps and batches add up; `summary` makes metrics of them. Real tokens are those
> 0: with AVERAGE_PER_SEQUENCE, T5X counts sums of weights in their place.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.model.shapes import Array, Float
from t0repro.model.t5 import T5, Batch
from t0repro.training.loss import (
    cross_entropy,
    loss_denominator,
    of_each_target,
    token_weights,
    with_loss_weights,
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
      model: an encoder-decoder; its configuration has the options of the loss.
      parameters: the model's parameters.
      batch: what `with_loss_weights` returned, or a part of it.
      denominator: the whole batch's, so that the losses of its microbatches add up.
      dropout_key: PRNG key for this microbatch's dropout.
      z_loss: whether the loss has its z_loss.
    """
    config = model.config
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    hidden = model.apply(
        {"params": parameters}, batch, deterministic=dropout_key is None, rngs=rngs, hidden=True
    )
    assert isinstance(hidden, jax.Array)
    targets, weights = jnp.asarray(batch["targets"]), token_weights(config, batch)
    coefficient = config.z_loss if z_loss else 0.0

    def values(logits: Array, targets: Array) -> Sums:
        loss = cross_entropy(
            logits,
            targets,
            label_smoothing=config.label_smoothing,
            spares_target=config.arithmetic.smoothing_spares_target,
            z_loss=coefficient,
        )
        # Only reported: it must not add to the gradient.
        log_z = jax.nn.logsumexp(jax.lax.stop_gradient(logits), axis=-1)
        return {"loss": loss, "log_z": log_z, "correct": jnp.argmax(logits, axis=-1) == targets}

    of = of_each_target(model, parameters, hidden, targets, values)
    loss = jnp.sum(of["loss"] * weights) / denominator
    correct = of["correct"] & (targets > 0)
    sums = {
        "loss": loss,
        "z_loss": jnp.sum(coefficient * jnp.square(of["log_z"]) * weights) / denominator,
        "correct": _count(correct),
    }
    return loss, sums | token_counts(batch)


def measured_evaluation(model: T5, parameters: dict, batch: Batch) -> Sums:
    """The sums of a whole batch of an evaluation: no dropout, z_loss as the model has it there."""
    config = model.config
    batch = with_loss_weights(config, batch)
    _, sums = loss_and_sums(
        model,
        parameters,
        batch,
        denominator=loss_denominator(config, batch),
        z_loss=config.arithmetic.z_loss_in_evaluation,
    )
    return sums


def token_counts(batch: Batch) -> Sums:
    """Numbers of tokens and examples of a batch, as float32 scalars."""
    counts = {"rows": jnp.float32(np.shape(batch["targets"])[0])}
    for side in ("inputs", "targets"):
        tokens = jnp.asarray(batch[side])
        segments = jnp.asarray(batch.get(f"{side}_segmentation", tokens > 0)).astype(jnp.int32)
        counts[f"all_{side}"] = jnp.float32(tokens.size)
        counts[f"real_{side}"] = _count(segments != 0)
        # Segments of a row are numbered from 1; an unpacked row is one example.
        counts[f"examples_{side}"] = jnp.sum(jnp.max(segments, axis=-1)).astype(jnp.float32)
    counts["real_losses"] = _count(jnp.asarray(batch["targets"]) > 0)
    return counts


def summary(sums: Mapping[str, float], steps: int, *, packed: bool) -> dict[str, float]:
    """T5X's metrics of some steps, or batches of an evaluation.

    Args:
      sums: the sums of all of them.
      steps: how many they are.
      packed: whether rows hold several examples, which decides names as in T5X.
    """
    loss, z_loss = sums["loss"], sums["z_loss"]
    # At least 1, so that batches of padding give zeros rather than NaN.
    all_targets, real = sums["all_targets"], max(sums["real_losses"], 1.0)
    metrics = {
        "accuracy": sums["correct"] / real,
        "loss": loss / steps,
        "loss_per_nonpadding_target_token": loss / real,
        "loss_per_all_target_tokens": loss / all_targets,
        "z_loss": z_loss / steps,
        "z_loss_per_all_target_tokens": z_loss / all_targets,
        "cross_ent_loss": (loss - z_loss) / steps,
        "cross_ent_loss_per_all_target_tokens": (loss - z_loss) / all_targets,
        "non_padding_fraction/loss_weights": sums["real_losses"] / all_targets,
    }
    names = {"inputs": "encoder", "targets": "decoder"}
    if not packed:
        names = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
    for side, name in names.items():
        metrics[f"effective_batch_size/{name}"] = sums[f"examples_{side}"] / steps
        metrics[f"non_padding_fraction/{name}"] = sums[f"real_{side}"] / sums[f"all_{side}"]
    tokens = sums["all_inputs"] + all_targets
    real_tokens = sums["real_inputs"] + sums["real_targets"]
    return metrics | {"non_padding_fraction/overall": real_tokens / tokens}


def rates(sums: Mapping[str, float], steps: int, seconds: float, devices: int) -> dict[str, float]:
    """T5X's timing metrics of some steps that took so long."""
    sequences, targets = sums["rows"], sums["all_targets"]
    per_second = 1.0 / max(seconds, 1e-9)
    return {
        "timing/seconds": seconds,
        "timing/seqs": sequences,
        "timing/steps_per_second": steps * per_second,
        "timing/seqs_per_second": sequences * per_second,
        "timing/seqs_per_second_per_core": sequences * per_second / devices,
        "timing/target_tokens_per_second": targets * per_second,
        "timing/target_tokens_per_second_per_core": targets * per_second / devices,
    }


def _count(truths: jax.Array) -> jax.Array:
    return jnp.sum(truths).astype(jnp.float32)
