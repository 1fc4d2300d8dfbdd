"""The model objects that trainers train, under the names of t5x.models.

`BaseModel` is the interface a trainer needs. `T5Model` is a T5 with the loss that its
configuration describes. `EncoderDecoderModel` adds T5X's arguments, decoding and scores; the
commands train it, and T5X's usual extension, which overrides one method, is a subclass of it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.decoding import DecodingPlan
from t0repro.config.run import UserClass
from t0repro.model.features import Batch, rename_features, t5x_features
from t0repro.model.t5 import T5, shift_by_one
from t0repro.model.t5x_decoding import beam_search, t5_functions, temperature_sample
from t0repro.model.towers import count_scanned_layers
from t0repro.training.losses import (
    NormalizingFactor,
    SpecialLossNormalizingFactor,
    compute_weighted_cross_entropy,
    get_loss_normalizing_factor_and_weights,
)
from t0repro.training.metric_classes import Metric
from t0repro.training.optimizers import Optimizer
from t0repro.training.t5_model import BaseModel, LossFn, T5Model
from t0repro.training.t5x_metrics import compute_base_metrics, count_packed_examples
from t0repro.training.token_losses import cross_entropy

__all__ = [
    "BaseModel",
    "BaseTransformerModel",
    "DecoderParams",
    "EncoderDecoderModel",
    "LossFn",
    "T5Model",
    "compute_base_metrics",
    "count_packed_examples",
    "get_input_vocabulary",
    "get_output_vocabulary",
    "is_builtin",
    "model_of",
    "make_model",
    "find_summed_towers",
    "make_user_model",
]


class BaseTransformerModel(BaseModel):
    """A model that computes logits for each target, with T5X's loss and metrics on them.

    A subclass defines `_compute_logits` and `get_initial_variables`. Batches have T5X's feature
    names (t0repro.training.models).

    Args:
      module: the network.
      input_vocabulary, output_vocabulary: SeqIO's vocabularies of inputs and targets.
      optimizer_def: see BaseModel.
      decode_fn: decodes outputs, such as t0repro.model.t5x_decoding.beam_search.
      label_smoothing: mass that is spread over all tokens but the target.
      z_loss: coefficient of the added log(Z)**2.
      loss_normalizing_factor: divides the summed loss: a number, None for 1, or the name of one of
        `SpecialLossNormalizingFactor`.
    """

    def __init__(
        self,
        module: Any,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Optimizer | None,
        decode_fn: Callable[..., Any] | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: NormalizingFactor = None,
    ):
        BaseModel.__init__(self, optimizer_def)
        self.module = module
        self._input_vocabulary, self._output_vocabulary = input_vocabulary, output_vocabulary
        self._decode_fn, self._label_smoothing, self._z_loss = decode_fn, label_smoothing, z_loss
        self._loss_normalizing_factor = loss_normalizing_factor

    @property
    def input_vocabulary(self) -> Any:
        """The vocabulary of inputs."""
        return self._input_vocabulary

    @property
    def output_vocabulary(self) -> Any:
        """The vocabulary of targets."""
        return self._output_vocabulary

    @property
    def decode_fn(self) -> Callable[..., Any] | None:
        """The decoding function."""
        return self._decode_fn

    @abc.abstractmethod
    def _compute_logits(
        self, params: Any, batch: Batch, dropout_rng: jax.Array | None = None
    ) -> Any:
        """Float32 logits of each target, [batch, length, vocab]."""

    def loss_fn(
        self, params: Any, batch: Batch, dropout_rng: jax.Array | None, flax_mutables: Any = None
    ) -> tuple[jax.Array, Any]:
        """The cross entropy of `_compute_logits`, and what `_compute_metrics` makes of it."""
        assert flax_mutables is None
        logits = self._compute_logits(params, batch, dropout_rng)
        targets = jnp.asarray(batch["decoder_target_tokens"])
        factor, weights = self._loss_divisor(batch)
        loss, z_loss, _ = compute_weighted_cross_entropy(
            logits, targets, weights, self._label_smoothing, self._z_loss, factor
        )
        segments = {
            name.removesuffix("_segment_ids"): jnp.asarray(x)
            for name, x in batch.items()
            if name.endswith("_segment_ids")
        }
        unpacked = ("encoder_input_tokens", "decoder_target_tokens")
        segments = segments or {name: jnp.asarray(batch[name]) != 0 for name in unpacked}
        return loss, self._compute_metrics(logits, targets, weights, loss, z_loss, segments)

    def _loss_divisor(self, batch: Batch) -> tuple[Any, Any]:
        return get_loss_normalizing_factor_and_weights(self._loss_normalizing_factor, batch)

    def _compute_metrics(
        self,
        logits: jax.Array,
        targets: jax.Array,
        mask: jax.Array | None,
        loss: jax.Array,
        z_loss: jax.Array | None = None,
        segment_ids: Mapping[str, jax.Array] | None = None,
    ) -> dict[str, Metric]:
        """T5X's metrics of a batch; see `compute_base_metrics`."""
        return compute_base_metrics(logits, targets, mask, loss, z_loss, segment_ids)


@dataclasses.dataclass(frozen=True)
class DecoderParams:
    """Defaults of `EncoderDecoderModel.predict_batch_with_aux`; the last is not in T5X."""

    return_all_decodes: bool = False
    num_decodes: int = 1
    prompt_with_targets: bool = False


class EncoderDecoderModel(T5Model, BaseTransformerModel):
    """An encoder-decoder T5 with T5X's arguments, which trains, generates and scores.

    A subclass gets batches with T5X's feature names; each method here takes those and this
    project's. If a subclass overrides `_compute_logits` or `_compute_metrics`, its loss is computed
    from the logits of the full batch, all in memory.

    Args:
      module, input_vocabulary, output_vocabulary, optimizer_def, decode_fn, label_smoothing,
        z_loss, loss_normalizing_factor: see BaseTransformerModel.
      feature_converter_cls: None or seqio.EncDecFeatureConverter, as which examples are converted,
        or seqio.PassThroughFeatureConverter, with which they are the model's features already.
      default_decoder_params: what `predict_batch_with_aux` does by default.
    """

    def __init__(
        self,
        module: T5,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Optimizer | None,
        decode_fn: Callable[..., Any] = beam_search,
        feature_converter_cls: Callable[..., Any] | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: NormalizingFactor = None,
        default_decoder_params: DecoderParams | None = None,
    ):
        name = getattr(feature_converter_cls, "__name__", str(feature_converter_cls))
        if name not in ("None", "EncDecFeatureConverter", "PassThroughFeatureConverter"):
            raise ValueError(f"The model reads the features of EncDecFeatureConverter, not {name}.")
        # The network's configuration is where the loss reads its options, and how T5X computes it.
        config = dataclasses.replace(
            module.config,
            arithmetic=dataclasses.replace(
                module.config.arithmetic, smoothing_spares_target=True, z_loss_in_evaluation=True
            ),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            loss_denominator=_denominator(loss_normalizing_factor),
        )
        T5Model.__init__(self, T5(config, module.dtypes), optimizer_def)
        BaseTransformerModel.__init__(
            self,
            self.module,
            input_vocabulary,
            output_vocabulary,
            optimizer_def,
            decode_fn,
            label_smoothing,
            z_loss,
            loss_normalizing_factor,
        )
        self._default_decoder_params = default_decoder_params or DecoderParams()

    @classmethod
    def from_config(
        cls, module: T5, optimizer_def: Optimizer | None, **arguments: Any
    ) -> EncoderDecoderModel:
        """A model with the loss that the network's configuration sets; `arguments` override it.

        Unlike the constructor's, it may be Mesh TensorFlow's loss.
        """
        config = module.config
        options = {
            "input_vocabulary": None,
            "output_vocabulary": None,
            "label_smoothing": config.label_smoothing,
            "z_loss": config.z_loss,
            # In a configuration, None divides by all targets; in T5X, None divides by nothing.
            "loss_normalizing_factor": config.loss_denominator or "NUM_TOTAL_TARGET_TOKENS",
        }
        model = cls(module=module, optimizer_def=optimizer_def, **(options | arguments))
        config = dataclasses.replace(model.module.config, arithmetic=config.arithmetic)
        model.module = T5(config, module.dtypes)
        return model

    def has_own_loss(self) -> bool:
        """Whether the loss is this class's: no subclass replaces it, or the logits it reads."""
        return type(self).loss_fn is EncoderDecoderModel.loss_fn and not self._has_own_logits()

    def _has_own_logits(self) -> bool:
        kind, base = type(self), EncoderDecoderModel
        return (kind._compute_logits, kind._compute_metrics) != (
            base._compute_logits,
            base._compute_metrics,
        )

    def loss_fn(
        self, params: Any, batch: Batch, dropout_rng: jax.Array | None, flax_mutables: Any = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Loss and metrics of a batch, or of a microbatch if `whole_batch` gave the function."""
        kind: Any = BaseTransformerModel if self._has_own_logits() else T5Model
        return kind.loss_fn(self, params, batch, dropout_rng, flax_mutables)

    def _loss_divisor(self, batch: Batch) -> tuple[Any, Any]:
        # A copy made by `whole_batch` has the full batch's divisor; its weights are scaled already.
        if self._denominator is not None:
            return self._denominator, batch.get("decoder_loss_weights")
        return super()._loss_divisor(batch)

    def _compute_logits(
        self,
        params: Any,
        batch: Batch,
        dropout_rng: jax.Array | None = None,
        mutable: Any = False,
        other_variables: Mapping[str, Any] | None = None,
    ) -> Any:
        """Logits; with `mutable`, the variables of these collections after the pass too."""
        rngs = None if dropout_rng is None else {"dropout": dropout_rng}
        variables = {"params": params, **(other_variables or {})}
        return self.module.apply(
            variables,
            rename_features(batch),
            deterministic=rngs is None,
            rngs=rngs,
            mutable=mutable,
        )

    def features(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The features that T5 reads; a subclass gets all of T5X's, under T5X's names.

        Raises:
          UserError: if there are no targets or no inputs.
        """
        renamed = super().features(batch)
        if type(self) is EncoderDecoderModel:
            return renamed
        return t5x_features(renamed if "inputs" in batch else batch)

    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: int | None = None,
        prompt_with_targets: bool | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Generates targets: (tokens [batch, length], {"scores": [batch]}).

        With `return_all_decodes`, tokens are [batch, decodes, length] and scores [batch, decodes],
        ascending by score.

        Args:
          params: the parameters.
          batch: under T5X's names or ours, `inputs` and the decoder's inputs, or the targets in
            their place; their length is the outputs'.
          rng: PRNG key for sampling.
          decoder_params: arguments of `decode_fn`, besides those that this method gives.
          return_all_decodes: whether all decodes are returned, or the best.
          num_decodes: beams or samples of each row.
          prompt_with_targets: whether outputs begin with the decoder's inputs.

        Raises:
          ValueError: if there are two PRNG keys.
        """
        batch, defaults = rename_features(batch), self._default_decoder_params
        all_decodes = (
            defaults.return_all_decodes if return_all_decodes is None else return_all_decodes
        )
        options = {"eos_id": getattr(self.output_vocabulary, "eos_id", None) or 1}
        options |= dict(decoder_params or {})
        if rng is not None:
            if options.get("decode_rng") is not None:
                raise ValueError(
                    "There is a PRNG key in `rng` and one in decoder_params; give one."
                )
            options["decode_rng"] = rng
        count = num_decodes or defaults.num_decodes
        inputs, prompt = jnp.asarray(batch["inputs"], jnp.int32), batch.get("decoder_inputs")
        # The decoder's inputs lack the last target.
        prompt = (
            shift_by_one(jnp.asarray(batch["targets"])) if prompt is None else jnp.asarray(prompt)
        )
        prompt = prompt.astype(jnp.int32)
        prompts = (
            defaults.prompt_with_targets if prompt_with_targets is None else prompt_with_targets
        )
        # Without EOS, as in T5X: decoding would end where the prompt does.
        prompt = jnp.where(prompts & (prompt != options["eos_id"]), prompt, 0)
        assert self._decode_fn is not None
        cache, tokens_to_logits = t5_functions(self.module, params, inputs, count, prompt.shape[1])
        tokens, scores = self._decode_fn(
            inputs=prompt,
            cache=cache,
            tokens_to_logits=tokens_to_logits,
            num_decodes=count,
            **options,
        )
        if all_decodes:
            return tokens, {"scores": scores}
        return tokens[:, -1], {"scores": scores[:, -1]}

    def score_batch(self, params: Any, batch: Batch, return_intermediates: bool = False) -> Any:
        """Log-likelihood of each row's targets, EOS included: natural log, not normalized, [batch].

        Args:
          params: the parameters.
          batch: as for `predict_batch_with_aux`; `decoder_loss_weights` weigh the targets.
          return_intermediates: whether {"decoder": {"token_scores", "target_tokens",
            "loss_weights"}} is returned too, each in a tuple of one.
        """
        renamed = rename_features(batch)
        targets = jnp.asarray(renamed["targets"])
        weights = jnp.asarray(renamed.get("loss_weights", targets > 0), jnp.float32)
        scores = -cross_entropy(self._compute_logits(params, batch), targets) * weights
        if not return_intermediates:
            return jnp.sum(scores, axis=-1)
        values = {"token_scores": scores, "target_tokens": targets, "loss_weights": weights}
        return jnp.sum(scores, axis=-1), {"decoder": {name: (x,) for name, x in values.items()}}


def get_input_vocabulary(model: BaseTransformerModel) -> Any:
    """The vocabulary of a model's inputs."""
    return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Any:
    """The vocabulary of a model's targets."""
    return model.output_vocabulary


def make_model(module: T5, optimizer_def: Optimizer | None = None) -> T5Model:
    """The model that a command trains, if the user has none: the network with its own loss."""
    if module.config.decoder_only:
        return T5Model(module, optimizer_def)
    return EncoderDecoderModel.from_config(module, optimizer_def)


def model_of(
    module: T5,
    optimizer: Optimizer | None = None,
    user_class: UserClass | None = None,
    *,
    where: str | None = None,
    vocabularies: tuple[Any, Any] = (None, None),
    decoding: DecodingPlan | None = None,
) -> T5Model:
    """The model of a training run: the user's, or T5 with its own loss.

    Args:
      module: the network.
      optimizer: the optimizer.
      user_class: the user's class, if there is one.
      where: where it was bound, for messages.
      vocabularies: SeqIO's of inputs and targets, which a user's model may read.
      decoding: how a user's model generates unless it says otherwise.
    """
    if user_class is None:
        return make_model(module, optimizer)
    return make_user_model(user_class, module, optimizer, vocabularies, decoding, where)


def make_user_model(
    user_class: UserClass,
    module: T5,
    optimizer: Optimizer | None,
    vocabularies: tuple[Any, Any],
    decoding: DecodingPlan | None,
    where: str | None = None,
) -> T5Model:
    """A user's subclass of EncoderDecoderModel with T5X's arguments; see `model_of`."""
    plan, loss = decoding or DecodingPlan(), module.config
    function = beam_search if plan.method == "beam_search" else temperature_sample
    # EncoderDecoderModel supplies these itself.
    options = {
        name: x
        for name, x in plan.function_options().items()
        if name not in ("eos_id", "num_decodes")
    }
    supplied = {
        "module": module,
        "input_vocabulary": vocabularies[0],
        "output_vocabulary": vocabularies[1],
        "optimizer_def": optimizer,
        "decode_fn": functools.partial(function, **options),
        "label_smoothing": loss.label_smoothing,
        "z_loss": loss.z_loss,
        "loss_normalizing_factor": loss.loss_denominator or "NUM_TOTAL_TARGET_TOKENS",
        "default_decoder_params": DecoderParams(
            plan.return_all_decodes, plan.num_decodes, plan.prompt_with_targets
        ),
    }
    return user_class.made(supplied, where)


def is_builtin(model: BaseModel) -> TypeGuard[T5Model]:
    """Whether a model is this project's own, and not a user's subclass."""
    return type(model) in (T5Model, EncoderDecoderModel)


def _denominator(factor: NormalizingFactor) -> Any:
    """T5X's divisor of a loss as the configuration's."""
    if factor is None:
        return 1.0
    name = factor.name if isinstance(factor, SpecialLossNormalizingFactor) else factor
    if not isinstance(name, str):
        return float(name)
    return None if name.upper() == "NUM_TOTAL_TARGET_TOKENS" else name.upper()


def find_summed_towers(model: BaseModel, loss_fn: LossFn) -> dict[str, int]:
    """Towers whose backward pass may add up its layers' gradients: name -> number of layers.

    Only for T5Model's own loss, which reads each layer once, inside its tower. A user's loss may
    read layers elsewhere, and shared layers get gradients from both towers.

    Args:
      model: the model.
      loss_fn: what its `whole_batch` returned.
    """
    own_losses = (T5Model.loss_fn, EncoderDecoderModel.loss_fn)
    if not isinstance(model, T5Model) or not model.has_own_loss():
        return {}
    if getattr(loss_fn, "__func__", None) not in own_losses:
        return {}
    return count_scanned_layers(model.module.config)
