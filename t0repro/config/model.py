"""The model of a run: its shape, arithmetic and dtypes, and how it is sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from t0repro.adapters import Adapter, is_even
from t0repro.config.choices import ChoiceLoss
from t0repro.config.settings import RULE, Mtf, Only, Range, T5x, arguments, shared_values
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape

DType = Literal["float32", "bfloat16"]
ModelType = Literal["bitransformer", "lm", "delimited_lm"]
# Mesh TensorFlow's names, in which `gelu` is the tanh approximation. `gelu_exact` is the one with
# the error function, which transformers calls "gelu"; `silu` is another name for `swish`.
Activation = Literal["relu", "gelu", "gelu_exact", "swish", "silu", "sigmoid", "tanh", "linear"]
# T5X's names for two divisors of the loss that depend on the batch: its number of targets > 0; or
# its number of examples, after each token's loss is divided by its example's number of targets.
LossDenominator = Literal["NUM_REAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"]
Recompute = Literal["none", "minimal", "full", "offload"]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Choices where a model can be computed in two ways; the defaults are Mesh TensorFlow's.

    Most of them make a difference only in bfloat16.

    Attributes:
      float32_attention_logits: Whether attention's logits and softmax are float32 rather than in
        the activations' dtype.
      float32_vocabulary_logits: Whether both inputs of the vocabulary's logits matmul are float32,
        rather than its result only.
      cast_before_norm_scale: Whether a norm is rounded to the activations' dtype before it is
        multiplied by its scale, rather than after.
      epsilon_in_position_bucket: Whether float32's epsilon is added to the argument of the bucket's
        logarithm.
      encoder_output_dropout_per_position: Whether dropout on the encoder's outputs samples a new
        mask for every position.
      smoothing_spares_target: Whether label smoothing spreads its mass over the other entries only,
        s / (V - 1) each, and subtracts the entropy of that distribution.
      z_loss_in_evaluation: Whether an evaluation's loss includes the z_loss.
      rescaled_truncated_normal: Whether initial kernels of the feed-forward layers and the logits
        are rescaled to the intended standard deviation.
      one_way_position_buckets: Whether a language model whose inputs attend in both directions
        counts all later positions as distance 0, rather than with buckets for both directions.
    """

    # Mesh TensorFlow's default; T5X's network does it only if gin binds the argument of this name.
    float32_attention_logits: Annotated[
        bool, T5x("network.T5Config.float32_attention_logits", default=False), Only(mtf=True)
    ] = True
    # In bfloat16, this and the next can flip close calls of rank classification between the stacks.
    float32_vocabulary_logits: Annotated[bool, Only(mtf=False, t5x=True)] = False
    cast_before_norm_scale: Annotated[bool, Only(mtf=False, t5x=True)] = False
    # It changes no bucket up to a distance of 2,048 (tests/model/test_arithmetic.py).
    epsilon_in_position_bucket: Annotated[bool, Only(mtf=False, t5x=True)] = False
    # All other dropout in the model has one mask for all positions.
    encoder_output_dropout_per_position: Annotated[bool, Only(mtf=False, t5x=True)] = False
    # T5X subtracts the entropy so that the least loss is 0.
    smoothing_spares_target: Annotated[bool, Only(mtf=False, t5x=True)] = False
    z_loss_in_evaluation: Annotated[bool, Only(mtf=False, t5x=True)] = False
    # Truncating a normal at two standard deviations leaves 0.88 of its standard deviation.
    rescaled_truncated_normal: Annotated[bool, Only(mtf=False, t5x=True)] = False
    # Mesh TensorFlow looks at whether the model is autoregressive throughout.
    one_way_position_buckets: Annotated[bool, Only(mtf=False, t5x=True)] = False


@arguments(t5x="network.T5Config", mtf="transformer.Unitransformer")
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a T5 (1.0 or 1.1), with an encoder or without one.

    Attributes:
      num_encoder_layers: Number of encoder layers; 0 in a model without an encoder.
      vocab_size: Rows of the embedding, padded to a multiple of Mesh TensorFlow's vocab_divisor.
      activations: Activations of the feed-forward layer: one name for T5 1.0 (`relu`), two for the
        gated form of T5 1.1 (`gelu`, `linear`), with one kernel `wi_<n>` each.
      logits_from_embedding: Whether the softmax is tied to the embedding, as in T5 1.0; T5 1.1 has
        a separate kernel for the logits.
      dropout_rate: Rate of every dropout in the model; zero outside training.
      label_smoothing: Mass spread evenly over the whole padded vocabulary, the target included.
      z_loss: Coefficient of log(Z)**2, in training only.
      loss_denominator: Divides the summed loss; None stands for targets.size * num_microbatches,
        that is, all targets of the batch, padding included; 1 for T5X's plain sum.
      model_type: Mesh TensorFlow's model_type. The two language models have no encoder;
        `delimited_lm` reads inputs and targets, one after the other, as one sequence.
      input_full_attention: In a language model, whether positions up to an example's first EOS
        attend to each other in both directions.
      loss_on_targets_only: In a language model, whether tokens up to an example's first EOS carry
        no loss.
      shared_towers: Whether the encoder uses the decoder's parameters (bi_v1_shared).
      recompute: Which activations of a layer the backward pass rematerializes: `none`; `minimal`,
        all but the outputs of matmuls with parameters; `full`, all but the layer's input;
        `offload`, like minimal, with the saved activations in host memory. None decides by the
        devices' memory (t0repro.training.rematerialization).
      norm_names: The name of Mesh TensorFlow's norm variables.
      relative_attention_max_distance: Distances from this one on share one bucket of the position
        bias.
      position_bias_per_layer: Whether each layer has its own position bias, as in umT5; otherwise
        all layers of a tower share one.
      rms_norm_epsilon: Added to the mean square in every layer norm.
      scan_layers: Whether to scan one compiled body over all layers of a tower; None decides by
        depth.
      scale_tied_logits: Whether logits from the embedding are scaled by d_model**-0.5.
      scale_queries: Whether attention divides its queries' inputs by d_kv**0.5, in addition to that
        factor in the queries' initial values; an option of T5X's contrib/gpu network.
      arithmetic: The choices where Mesh TensorFlow and T5X compute differently.
      adapter: What is trained in place of the model's own parameters, which are frozen.
      choice_loss: Losses over an example's answer choices, in addition to the correct one's.
    """

    num_encoder_layers: Annotated[
        int,
        Range(at_least=0, at_most=1000),
        T5x(default=6),
        Mtf("encoder/transformer.make_layer_stack.num_layers"),
    ]
    num_decoder_layers: Annotated[
        int,
        Range(at_least=1, at_most=1000),
        T5x(default=6),
        Mtf("decoder/transformer.make_layer_stack.num_layers"),
    ]
    d_model: Annotated[int, Range(at_least=1), T5x("emb_dim", default=512), Mtf(macro="d_model")]
    d_ff: Annotated[
        int,
        Range(at_least=1),
        T5x("mlp_dim", default=2048),
        Mtf("transformer_layers.DenseReluDense.hidden_size", macro="d_ff"),
    ]
    num_heads: Annotated[
        int,
        Range(at_least=1),
        T5x(default=8),
        Mtf("transformer_layers.SelfAttention.num_heads", macro="num_heads"),
    ]
    d_kv: Annotated[
        int,
        Range(at_least=1),
        T5x("head_dim", default=64),
        Mtf("transformer_layers.SelfAttention.key_value_size", macro="d_kv"),
    ]
    vocab_size: Annotated[int, Range(at_least=1), Mtf("vocab_divisor")]
    activations: Annotated[
        tuple[Activation, ...],
        T5x("mlp_activations", hint=Sequence[str], default=("relu",)),
        Mtf("transformer_layers.DenseReluDense.activation"),
    ]
    logits_from_embedding: Annotated[
        bool,
        T5x("logits_via_embedding", default=False),
        Mtf("shared_embedding_and_softmax_weights"),
    ]
    # The encoder halves them by direction and halves each part again; Mesh TensorFlow divides by
    # what is left.
    relative_attention_num_buckets: Annotated[
        int,
        Range(at_least=4),
        Only(t5x=32),
        Mtf("transformer_layers.SelfAttention.relative_attention_num_buckets"),
    ]
    # Not 1: values that dropout keeps are divided by 1 - rate.
    dropout_rate: Annotated[
        float,
        Range(at_least=0, below=1),
        T5x(default=0.1, macro="DROPOUT_RATE"),
        Mtf("transformer.sublayer_dropout.dropout_rate", macro="dropout_rate"),
    ]
    label_smoothing: Annotated[
        float,
        Range(at_least=0, below=1),
        T5x("models.EncoderDecoderModel.label_smoothing", default=0.0),
        Mtf(),
    ]
    z_loss: Annotated[
        float, Range(at_least=0), T5x("models.EncoderDecoderModel.z_loss", default=0.0), Mtf()
    ]
    loss_denominator: Annotated[
        float | LossDenominator | None,
        Range(above=0),
        T5x(
            "models.EncoderDecoderModel.loss_normalizing_factor",
            hint=float | str | None,
            default=None,
        ),
        Mtf(),
    ]
    model_type: Annotated[ModelType, Only(t5x="bitransformer"), Mtf("utils.run.model_type")] = (
        "bitransformer"
    )
    input_full_attention: Annotated[bool, Only(t5x=False)] = False
    loss_on_targets_only: Annotated[bool, Only(t5x=False)] = False
    shared_towers: Annotated[
        bool, Only(t5x=False), Mtf("transformer.make_bitransformer.encoder_name")
    ] = False
    recompute: Annotated[
        Recompute | None,
        T5x("remat_policy", hint=str, default="none"),
        Mtf("transformer.LayerStack.recompute_grads"),
    ] = None
    # scalable_t5 scans by default; results are equal, so here depth decides.
    scan_layers: Annotated[
        bool | None, T5x(default=True, read=lambda value: None if value else False), Only(mtf=None)
    ] = None
    # T5 1.0's released checkpoints have `layer_norm`; the computation is the same.
    norm_names: Annotated[
        Literal["rms_norm", "layer_norm"],
        Only(t5x="rms_norm"),
        Mtf("transformer.LayerStack.norm_epsilon"),
    ] = "rms_norm"
    # Mesh TensorFlow's and T5X's networks fix it at 128; only transformers' T5 can have another.
    relative_attention_max_distance: Annotated[
        int,
        Range(at_least=2),
        Only(t5x=128),
        Mtf("t0repro.jax_model.relative_attention_max_distance"),
    ] = 128
    position_bias_per_layer: Annotated[
        bool,
        Only(t5x=RULE),
        Mtf("transformer_layers.SelfAttention.relative_attention_type"),
    ] = False
    rms_norm_epsilon: Annotated[
        float,
        Range(at_least=0),
        Only(t5x=1e-6),
        Mtf("transformer.sublayer_rms_norm.epsilon", read=float),
    ] = 1e-6
    # The tied mT5 and umT5 of transformers do not scale them.
    scale_tied_logits: Annotated[
        bool, Only(t5x=True), Mtf("t0repro.jax_model.scale_tied_logits")
    ] = True
    scale_queries: Annotated[bool, T5x("scale_attn_logits"), Only(mtf=False)] = False
    arithmetic: Annotated[Arithmetic, Only(mtf=RULE, t5x=RULE)] = Arithmetic()
    adapter: Annotated[
        Adapter | None, T5x("train.adapter"), Mtf("t0repro.jax_training.adapter")
    ] = None
    choice_loss: Annotated[
        ChoiceLoss | None, T5x("train.choice_loss"), Mtf("t0repro.jax_training.choice_loss")
    ] = None

    def with_choice_loss(self, loss: ChoiceLoss | None, where: str | None = None) -> ModelConfig:
        """This model trained with a loss over answer choices.

        Args:
          loss: None changes nothing.
          where: The place that set the loss's divisor.

        Raises:
          UserError: If the divisor is not T-Few's, the number of targets without padding.
        """
        if loss is None:
            return self
        # None and 1 are what the dialects' own files bind.
        if self.loss_denominator not in (None, 1.0, "NUM_REAL_TARGET_TOKENS"):
            raise UserError(
                "With ChoiceLoss, the loss of the right choices is divided by the number of their"
                f" tokens, and not by {self.loss_denominator}.",
                where=where,
                fix="Remove the divisor.",
            )
        return dataclasses.replace(
            self, choice_loss=loss, loss_denominator="NUM_REAL_TARGET_TOKENS"
        )

    def with_adapter(self, adapter: Adapter | None, where: str | None = None) -> ModelConfig:
        """This model with an adapter in training.

        Args:
          adapter: None changes nothing.
          where: The place that named its targets.

        Raises:
          UserError: If the adapter does not suit the model (Adapter.adapted_kernels).
        """
        if adapter is None:
            return self
        even = is_even(adapter.adapted_kernels(self.shape, where), self.shape)
        # One body serves all layers only if all have the same parameters.
        scan_layers = self.scan_layers if even else False
        return dataclasses.replace(self, adapter=adapter, scan_layers=scan_layers)

    @property
    def draws_dropout(self) -> bool:
        """Whether training drops anything at random."""
        return bool(self.dropout_rate or (self.adapter and self.adapter.dropout))

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass rematerializes activations."""
        return self.recompute not in (None, "none")

    @property
    def decoder_only(self) -> bool:
        """Whether there is no encoder."""
        return self.model_type != "bitransformer"

    @property
    def shape(self) -> ModelShape:
        """The sizes that determine the parameters; a checkpoint's follow from its tensors."""
        # One activation means T5 1.0's `wi`; several have a kernel each.
        gated = len(self.activations) > 1
        return ModelShape(
            **shared_values(self, ModelShape),
            wi_kernels=tuple(f"wi_{n}" for n in range(len(self.activations))) if gated else ("wi",),
            tied=self.logits_from_embedding,
        )

    def mesh_variables(self) -> dict[str, str]:
        """T5X path -> Mesh TensorFlow variable, the name that its filters and exceptions use."""
        return self.shape.mesh_variables(self.norm_names)

    def check_position_buckets(self, where: str | None) -> None:
        """Checks that the position bias has buckets for several distances each.

        Half of the buckets hold one distance each, and the others the distances from there to
        relative_attention_max_distance.

        Args:
          where: The place that set one of the two, for the message.

        Raises:
          UserError: If there are no such distances.
        """
        buckets = self.relative_attention_num_buckets
        furthest = self.relative_attention_max_distance
        # Mesh TensorFlow would divide by zero, or make negative buckets.
        if furthest <= buckets // 2:
            raise UserError(
                f"relative_attention_max_distance = {furthest} must exceed half of the {buckets}"
                f" buckets of the position bias, {buckets // 2}.",
                where=where,
                fix=f"Bind a distance of at least {buckets // 2 + 1}, or fewer buckets.",
            )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is sharded across devices.

    Attributes:
      data: Shards of a batch; None for as many as the devices allow.
      model: Devices that share each layer: they shard its heads, its d_ff and the vocabulary.
      fully_sharded: Whether parameters and slots are sharded along the data axis too.
      topology: The TPU slice for which `data` was computed, such as v3-512. On other devices,
        `data` follows their number.
    """

    data: Annotated[int | None, Range(at_least=1)] = None
    model: Annotated[int, Range(at_least=1)] = 1
    fully_sharded: bool = False
    topology: str | None = None


@arguments(mtf="utils.get_variable_dtype")
@dataclasses.dataclass(frozen=True)
class DTypePolicy:
    """Dtypes of a run: in checkpoints (master), in memory (slice), in computation."""

    master: Annotated[DType, T5x("utils.SaveCheckpointConfig.dtype"), Mtf("master_dtype")]
    slice: Annotated[DType, Only(t5x="float32"), Mtf("slice_dtype")]
    activation: Annotated[
        DType, T5x("network.T5Config.dtype", hint=Any, default="float32"), Mtf("activation_dtype")
    ]
