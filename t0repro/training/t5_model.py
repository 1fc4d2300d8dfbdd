"""The interface of a trainer's model, and a T5 with the loss that its configuration describes.

T5X's other models are in t0repro.training.models, where all of them are found. At the end are T5X's
loss, its sums over a batch and the metrics made of them.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.errors import UserError
from t0repro.model.shapes import Array, Float, Int
from t0repro.model.t5 import (
    OWN_NAMES,
    T5,
    Batch,
    initial_parameters,
    own_features,
    text_to_self,
)
from t0repro.training.losses import (
    CHOICE_LOSSES,
    loss_denominator,
    losses_of,
    of_each_target,
    token_weights,
    training_loss,
    with_choice_losses,
    with_loss_weights,
)
from t0repro.training.metric_classes import (
    Average,
    AveragePerStep,
    Metric,
    StepsPerTime,
    Sum,
    Time,
    TimeRate,
)
from t0repro.training.optimizers import Optimizer

# (params, batch, dropout_rng) -> (loss, metrics); with flax mutables as a fourth argument,
# (loss, (metrics, mutables after the batch)).
LossFn = Callable[..., tuple[jax.Array, Any]]


class BaseModel(abc.ABC):
    """The interface that a trainer needs. Subclass it and define `loss_fn` and the variables.

    Args:
      optimizer_def: the optimizer, for `TrainState.create`; from t0repro.training.optimizers, or
        one of optax's.
    """

    def __init__(self, optimizer_def: Optimizer | None = None):
        self.optimizer_def = optimizer_def

    @abc.abstractmethod
    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, tuple[int, ...]],
        input_types: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`params`, and the collections of variables that are not trained (flax mutables)."""

    @abc.abstractmethod
    def loss_fn(
        self,
        params: Any,
        batch: Batch,
        dropout_rng: jax.Array | None,
        flax_mutables: Any = None,
    ) -> tuple[jax.Array, Any]:
        """The loss of a batch or microbatch, and its metrics by name.

        Losses and gradients of microbatches are added up. A model with flax mutables returns
        (loss, (metrics, mutables)) and gets them from the microbatch before.

        Args:
          params: the parameters.
          batch: the features of `features`, on devices.
          dropout_rng: PRNG key of this microbatch; None in an evaluation, without dropout.
          flax_mutables: given only if the train state has some.
        """

    def eval_fn(self, params: Any, batch: Batch, flax_mutables: Any = None) -> tuple[Any, Any]:
        """The loss and the metrics of a batch of an evaluation; by default `loss_fn`'s."""
        if flax_mutables is None:
            return self.loss_fn(params, batch, None)
        loss, (metrics, _) = self.loss_fn(params, batch, None, flax_mutables)
        return loss, metrics

    def predict_batch(self, params: Any, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
        """What the model generates for a batch: the first result of `predict_batch_with_aux`."""
        return self.predict_batch_with_aux(params=params, batch=batch, rng=rng)[0]

    def predict_batch_with_aux(
        self, params: Any, batch: Batch, rng: jax.Array | None = None
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """What the model generates, and further results by name; defined by models that generate.

        Args:
          params: the parameters.
          batch: the features of `features`, on devices.
          rng: PRNG key for sampling.
        """
        raise NotImplementedError(f"{type(self).__name__} has no predict_batch_with_aux.")

    def score_batch(self, params: Any, batch: Batch, return_intermediates: bool = False) -> Any:
        """The log-likelihood of each row's targets; defined by models that score."""
        raise NotImplementedError(f"{type(self).__name__} has no score_batch.")

    def whole_batch(self, batch: Batch) -> tuple[Batch, LossFn]:
        """The batch to be split into microbatches, and the loss function of one.

        Override it if the loss is normalized by something of the full batch, such as its number of
        targets: losses that each microbatch normalizes by itself do not add up to the loss of the
        batch.
        """
        return batch, self.loss_fn

    def features(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The part of a batch that is sent to the devices; by default all of it."""
        return dict(batch)


class T5Model(BaseModel):
    """T5 with Mesh TensorFlow's or T5X's loss, as its configuration sets.

    Args:
      module: the network.
      optimizer_def: see BaseModel.
      measured: whether to compute T5X's metrics in addition to the loss.
    """

    def __init__(
        self, module: T5, optimizer_def: Optimizer | None = None, *, measured: bool = True
    ):
        # Not super(), which for EncoderDecoderModel is BaseTransformerModel with its arguments.
        BaseModel.__init__(self, optimizer_def)
        self.module, self._measured = module, measured
        self._denominator: float | jax.Array | None = None  # of the batch that a copy is for

    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, tuple[int, ...]] | None = None,
        input_types: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Parameters alone; their shapes do not depend on the batch's."""
        del input_shapes, input_types
        return {"params": initial_parameters(self.module, rng)}

    def whole_batch(self, batch: Batch) -> tuple[Batch, LossFn]:
        """Adds the targets' weights; divides each microbatch's loss by the full batch's divisor.

        The loss function is `loss_fn`, so a subclass trains on its own.
        """
        config, own = self.module.config, own_features(batch)
        weighted = with_loss_weights(config, own)
        # A copy, since the divisor belongs to this batch only.
        model = copy.copy(self)
        model._denominator = loss_denominator(config, weighted)
        if own is batch:
            return weighted, model.loss_fn
        if "loss_weights" in weighted:
            batch = {**batch, "decoder_loss_weights": weighted["loss_weights"]}
        return batch, model.loss_fn

    def loss_fn(
        self, params: Any, batch: Batch, dropout_rng: jax.Array | None, flax_mutables: Any = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """The loss of a batch and its metrics; of a microbatch, if `whole_batch` gave the function.

        Otherwise a microbatch is normalized by itself.
        """
        assert flax_mutables is None
        config, denominator, batch = self.module.config, self._denominator, own_features(batch)
        if denominator is None:
            batch = with_loss_weights(config, batch)
            denominator = loss_denominator(config, batch)
        # At a rate of 0, sample no dropout mask at all.
        key = dropout_rng if config.draws_dropout else None
        options = {"denominator": denominator, "dropout_key": key}
        if not self._measured:
            loss = training_loss(self.module, params, batch, **options)
            return loss, {"loss": AveragePerStep(loss)}
        loss, sums = loss_and_sums(self.module, params, batch, **options)
        return loss, metrics_of(sums, packed="targets_segmentation" in batch)

    def per_target_token(self, loss: float, tokens: int, batch: Batch) -> float | None:
        """A batch's loss as a mean over its target tokens, whatever the loss is divided by.

        Args:
          loss: the loss of `loss_fn`.
          tokens: target tokens of the batch, without padding.
          batch: the full batch, or the part of one process with the full batch's shape.
        """
        config = self.module.config
        if not self.has_own_loss() or config.choice_loss is not None:
            return None
        # By name, the divisor counts target tokens already, or the sequences of such means.
        if isinstance(config.loss_denominator, str):
            return loss
        return loss * float(loss_denominator(config, own_features(batch))) / max(tokens, 1)

    def has_own_loss(self) -> bool:
        """Whether the loss is this class's, and not one of a subclass."""
        return type(self).loss_fn is T5Model.loss_fn

    def eval_fn(self, params: Any, batch: Batch, flax_mutables: Any = None) -> tuple[Any, Any]:
        """Without dropout; with z_loss if the configuration's arithmetic adds it in evaluations.

        A subclass with a loss of its own is evaluated with that.
        """
        if not self.has_own_loss():
            return BaseModel.eval_fn(self, params, batch, flax_mutables)
        assert flax_mutables is None
        config = self.module.config
        batch = with_loss_weights(config, own_features(batch))
        loss, sums = loss_and_sums(
            self.module,
            params,
            batch,
            denominator=loss_denominator(config, batch),
            z_loss=config.arithmetic.z_loss_in_evaluation,
        )
        return loss, metrics_of(sums, packed="targets_segmentation" in batch)

    def features(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The features that T5 and its loss read, under this project's names.

        Raises:
          UserError: if there are no targets, or no inputs for an encoder.
        """
        own = own_features(batch)
        needed = ("targets",) if self.module.config.decoder_only else ("inputs", "targets")
        missing = [name for name in needed if name not in own]
        if missing:
            raise UserError(
                f"A batch has no {' and no '.join(missing)}; it has {', '.join(sorted(batch))}.",
                where="the batches",
                fix=f"Train this model on a task with {' and '.join(needed)}.",
            )
        return {name: own[name] for name in OWN_NAMES.values() if name in own}


# ---- Names of a batch's features -----------------------------------------------------------------

#     encoder_input_tokens    inputs                    decoder_target_tokens   targets
#     encoder_segment_ids     inputs_segmentation       decoder_segment_ids     targets_segmentation
#     encoder_positions       (from the segments)       decoder_positions       (from the segments)
#     decoder_loss_weights    (of targets > 0)          decoder_input_tokens    (targets, shifted)
#
# Those in brackets are derived, as seqio.EncDecFeatureConverter does, unless the batch has them.


def t5x_features(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of the host under T5X's names, int32, with those that can be derived.

    Args:
      batch: `inputs` and `targets`, [batch, length], packed or not; under T5X's names, or ours.
    """
    own = own_features(batch)
    named = {
        name: np.asarray(own[ours], np.int32) for name, ours in OWN_NAMES.items() if ours in own
    }
    targets = named["decoder_target_tokens"]
    # Negative ids are tokens without loss, which the decoder reads like any other.
    read = np.abs(_delayed(targets))
    derived = {"decoder_loss_weights": (targets > 0).astype(np.int32)}
    for side in ("encoder", "decoder"):
        if f"{side}_segment_ids" in named:
            segments = named[f"{side}_segment_ids"]
            begins = segments != _delayed(segments)
            begins[:, 0] = True
            index = np.arange(segments.shape[1], dtype=np.int32)
            first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
            # Padding is at position 0, as SeqIO packs it.
            derived[f"{side}_positions"] = np.where(segments == 0, 0, index - first)
            if side == "decoder":
                read = np.where(begins, 0, read)
    # What the batch has is kept, a user's own features too.
    return {**derived, "decoder_input_tokens": read, **(named if own is batch else batch)}


def _delayed(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (1, 0)))[:, :-1]


# ---- T5X's loss of a batch, the sums behind T5X's metrics, and those metrics ---------------------
#
# The names are those of t5x.models.compute_base_metrics (google-research/t5x at cc342d4). Sums add
# up over microbatches, steps and batches, and so do the metrics that `metrics_of` makes from them.
# Real tokens are those > 0; with AVERAGE_PER_SEQUENCE, T5X counts sums of weights instead.

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
      batch: what `with_loss_weights` returned, or a part of it.
      denominator: the divisor of the full batch's loss, so that the losses of its microbatches add
        up.
      dropout_key: PRNG key for this microbatch's dropout.
      z_loss: whether to add z_loss.
    """
    config = model.config
    # Count first: a language model's inputs are about to be joined to its targets.
    counts, batch = token_counts(batch), text_to_self(config, batch)
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    hidden = model.apply(
        {"params": parameters}, batch, deterministic=dropout_key is None, rngs=rngs, hidden=True
    )
    assert isinstance(hidden, jax.Array)
    targets, weights = jnp.asarray(batch["targets"]), token_weights(config, batch)
    coefficient = config.z_loss if z_loss else 0.0

    def values(logits: Array, targets: Array) -> Sums:
        found = losses_of(config, logits, targets, coefficient)
        # Only reported: it must not add to the gradient.
        log_z = jax.nn.logsumexp(jax.lax.stop_gradient(logits), axis=-1)
        return found | {"log_z": log_z, "correct": jnp.argmax(logits, axis=-1) == targets}

    of = of_each_target(model, parameters, hidden, targets, values)
    loss = jnp.sum(of["loss"] * weights) / denominator
    correct = of["correct"] & (weights > 0)
    sums = {
        "loss": loss,
        "z_loss": jnp.sum(coefficient * jnp.square(of["log_z"]) * weights) / denominator,
        "correct": _count(correct),
        "real_losses": _count(weights > 0),
    }
    loss, parts = with_choice_losses(config, loss, of, batch)
    if parts:
        sums |= {**parts, "total_loss": loss}
    return loss, sums | counts


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
        "accuracy": Average(sums["correct"], real),
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
