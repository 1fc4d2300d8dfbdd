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
import numpy as np

from t0repro.errors import UserError
from t0repro.model.features import FEATURE_NAMES, Batch, rename_features
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.metric_classes import (
    AveragePerStep,
    Metric,
)
from t0repro.training.optimizers import Optimizer
from t0repro.training.t5x_metrics import loss_and_sums, metrics_of
from t0repro.training.token_losses import (
    add_loss_weights,
    count_targets,
    loss_denominator,
    training_loss,
)

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
        config, renamed = self.module.config, rename_features(batch)
        weighted = add_loss_weights(config, renamed)
        # A copy, since the divisor belongs to this batch only.
        model = copy.copy(self)
        model._denominator = loss_denominator(config, weighted)
        if renamed is batch:
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
        config, denominator, batch = self.module.config, self._denominator, rename_features(batch)
        if denominator is None:
            batch = add_loss_weights(config, batch)
            denominator = loss_denominator(config, batch)
        # At a rate of 0, sample no dropout mask at all.
        key = dropout_rng if config.draws_dropout else None
        options = {"denominator": denominator, "dropout_key": key}
        if not self._measured:
            loss = training_loss(self.module, params, batch, **options)
            return loss, {"loss": AveragePerStep(loss)}
        loss, sums = loss_and_sums(self.module, params, batch, **options)
        return loss, metrics_of(sums, packed="targets_segmentation" in batch)

    def count_targets(self, batch: Mapping[str, Any]) -> Any:
        """Number of targets in a batch that carry loss."""
        return count_targets(batch, self.module.config)

    def loss_per_target_token(self, loss: float, tokens: int, batch: Batch) -> float | None:
        """A batch's loss as a mean over its target tokens, whatever the loss is divided by.

        Args:
          loss: the loss of `loss_fn`.
          tokens: those of the batch, by `count_targets`.
          batch: the full batch, or the part of one process with the full batch's shape.
        """
        config = self.module.config
        if not self.has_own_loss() or config.choice_loss is not None:
            return None
        # By name, the divisor counts target tokens already, or the sequences of such means.
        if isinstance(config.loss_denominator, str):
            return loss
        return loss * float(loss_denominator(config, rename_features(batch))) / max(tokens, 1)

    def summary_loss_per_target_token(self, summary: Mapping[str, float]) -> float | None:
        """As `loss_per_target_token`, from T5X's metrics over several batches of one shape.

        None for a summary without a loss, such as the metrics of generated text.
        """
        config, names = self.module.config, ("nonpadding_target_token", "all_target_tokens")
        per_real, per_any = (summary.get(f"loss_per_{name}") for name in names)
        if not self.has_own_loss() or config.choice_loss is not None or not per_real or not per_any:
            return None
        if isinstance(config.loss_denominator, str):
            return summary["loss"]
        # By default, a batch's loss is divided by its targets, padding included.
        return per_real * (config.loss_denominator or summary["loss"] / per_any)

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
        batch = add_loss_weights(config, rename_features(batch))
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
        renamed = rename_features(batch)
        needed = ("targets",) if self.module.config.decoder_only else ("inputs", "targets")
        missing = [name for name in needed if name not in renamed]
        if missing:
            raise UserError(
                f"A batch has no {' and no '.join(missing)}; it has {', '.join(sorted(batch))}.",
                where="the batches",
                fix=f"Train this model on a task with {' and '.join(needed)}.",
            )
        # Of data that processes share, a process has seen its own rows before they were shared.
        is_here = getattr(renamed["targets"], "is_fully_addressable", True)
        if self.module.config.input_full_attention and "loss_weights" in renamed and is_here:
            check_full_attention(renamed)
        return {name: renamed[name] for name in FEATURE_NAMES.values() if name in renamed}


def check_full_attention(batch: Batch) -> None:
    """Checks that a batch of T5X's says which positions attend in both directions.

    Raises:
      UserError: If it has no decoder_causal_attention, or marks positions after others of the same
        example.
    """
    fix = (
        "Give lengths of inputs and targets, or bind"
        " models.DecoderOnlyModel.inputs_bidirectional_attention = False."
    )
    where = "models.DecoderOnlyModel.inputs_bidirectional_attention"
    if "full_attention" not in batch:
        raise UserError("A batch has no decoder_causal_attention.", where=where, fix=fix)
    marked, targets = np.asarray(batch["full_attention"]) > 0, np.asarray(batch["targets"])
    segments = np.asarray(batch.get("targets_segmentation", np.ones_like(targets)))
    again = marked[:, 1:] & ~marked[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    # The mask (t0repro.model.t5.language_model_mask) is T5X's if an example begins with them.
    if (again & (targets[:, 1:] > 0)).any():
        raise UserError(
            "decoder_causal_attention marks positions after others of the same example.",
            where=where,
            fix="Mark the first positions of each example.",
        )
