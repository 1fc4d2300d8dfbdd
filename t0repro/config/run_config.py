"""RunConfig: one typed, frozen, JSON-serializable description of a run.

It is the waist of the project. The dialects in this folder turn gin files and overrides into a
RunConfig; everything after it (model, optimizer, train step, scorer, checkpoints) takes a RunConfig
and does not depend on gin. Defaults live in the dialects, where they have a source. The few fields
with a default here distinguish variants from a plain encoder-decoder trained with Adafactor. Each
number's range is in its annotation; `ranges.check` checks a RunConfig against it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from t0repro.adapters import Adapter, is_even
from t0repro.config.choices import ChoiceLoss
from t0repro.config.decoding import DecodingConfig, InferConfig, ScoreStringsConfig
from t0repro.config.ranges import MOST_32, Range
from t0repro.config.training_plan import TrainingPlan
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape

Mode = Literal[
    "train",
    "eval",
    "score_eval",
    "perplexity_eval",
    "infer",
    "score_from_dataset",
    "score_from_strings",
]
DType = Literal["float32", "bfloat16"]
Steps = int | tuple[int, ...] | str | None
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
    """

    # Mesh TensorFlow's default; T5X's network does it only if gin binds the argument of this name.
    float32_attention_logits: bool = True
    # In bfloat16, this and the next can flip close calls of rank classification between the stacks.
    float32_vocabulary_logits: bool = False
    cast_before_norm_scale: bool = False
    # It changes no bucket up to a distance of 2,048 (tests/model/test_arithmetic.py).
    epsilon_in_position_bucket: bool = False
    # All other dropout in the model has one mask for all positions.
    encoder_output_dropout_per_position: bool = False
    # T5X subtracts the entropy so that the least loss is 0.
    smoothing_spares_target: bool = False
    z_loss_in_evaluation: bool = False
    # Truncating a normal at two standard deviations leaves 0.88 of its standard deviation.
    rescaled_truncated_normal: bool = False


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

    num_encoder_layers: Annotated[int, Range(at_least=0, at_most=1000)]
    num_decoder_layers: Annotated[int, Range(at_least=1, at_most=1000)]
    d_model: Annotated[int, Range(at_least=1)]
    d_ff: Annotated[int, Range(at_least=1)]
    num_heads: Annotated[int, Range(at_least=1)]
    d_kv: Annotated[int, Range(at_least=1)]
    vocab_size: Annotated[int, Range(at_least=1)]
    activations: tuple[Activation, ...]
    logits_from_embedding: bool
    # The encoder halves them by direction and halves each part again; Mesh TensorFlow divides by
    # what is left.
    relative_attention_num_buckets: Annotated[int, Range(at_least=4)]
    # Not 1: values that dropout keeps are divided by 1 - rate.
    dropout_rate: Annotated[float, Range(at_least=0, below=1)]
    label_smoothing: Annotated[float, Range(at_least=0, below=1)]
    z_loss: Annotated[float, Range(at_least=0)]
    loss_denominator: Annotated[float | LossDenominator | None, Range(above=0)]
    model_type: ModelType = "bitransformer"
    input_full_attention: bool = False
    loss_on_targets_only: bool = False
    shared_towers: bool = False
    recompute: Recompute | None = None
    scan_layers: bool | None = None
    # T5 1.0's released checkpoints have `layer_norm`; the computation is the same.
    norm_names: Literal["rms_norm", "layer_norm"] = "rms_norm"
    # Mesh TensorFlow's and T5X's networks fix it at 128; only transformers' T5 can have another.
    relative_attention_max_distance: Annotated[int, Range(at_least=2)] = 128
    position_bias_per_layer: bool = False
    rms_norm_epsilon: Annotated[float, Range(at_least=0)] = 1e-6
    # The tied mT5 and umT5 of transformers do not scale them.
    scale_tied_logits: bool = True
    scale_queries: bool = False
    arithmetic: Arithmetic = Arithmetic()
    adapter: Adapter | None = None
    choice_loss: ChoiceLoss | None = None

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
            num_encoder_layers=self.num_encoder_layers,
            num_decoder_layers=self.num_decoder_layers,
            d_model=self.d_model,
            d_ff=self.d_ff,
            num_heads=self.num_heads,
            d_kv=self.d_kv,
            vocab_size=self.vocab_size,
            relative_attention_num_buckets=self.relative_attention_num_buckets,
            wi_kernels=tuple(f"wi_{n}" for n in range(len(self.activations))) if gated else ("wi",),
            tied=self.logits_from_embedding,
            shared_towers=self.shared_towers,
            position_bias_per_layer=self.position_bias_per_layer,
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
        buckets, furthest = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        # Mesh TensorFlow would divide by zero, or make negative buckets.
        if furthest <= buckets // 2:
            raise UserError(
                f"Half of the {buckets} buckets of the position bias hold one distance each. The"
                f" others share the distances from {buckets // 2} up to"
                f" relative_attention_max_distance = {furthest}, and there are none.",
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


@dataclasses.dataclass(frozen=True)
class DTypePolicy:
    """Dtypes of a run: in checkpoints (master), in memory (slice), in computation."""

    master: DType
    slice: DType
    activation: DType


@dataclasses.dataclass(frozen=True)
class AdafactorConfig:
    """Mesh TensorFlow's AdafactorOptimizer, option by option.

    Attributes:
      decay_exponent: The second-moment decay is 1 - (step - decay_offset + 1)**-decay_exponent,
        where step is the *global* step.
      beta1: Decay of the momentum; 0 means no momentum slot.
      clipping_threshold: Limit for the update's RMS; None means no clipping.
      decay_rate: A constant second-moment decay, used instead of the power of the step.
      exclude_from_parameter_scale: Paths of parameters whose update is not scaled by their size.
      momentum_slot: Whether the momentum's slot exists even if beta1 is 0.
      weight_decay_rate: Fraction of a parameter that each update removes; None for no decay.
      weight_decay_rate_lr_exponent: That fraction is multiplied by the learning rate to this power.
      global_norm_clip: Limit for the norm of all gradients together, applied before anything else.
      max_parameter_scale: Upper limit for a parameter's size, by which its update is scaled.
      skip_nan_updates: Whether entries that would become NaN keep their values.
      factor_map: T5X's rules for factoring (t0repro.parameters.shape). Empty for Mesh TensorFlow's
        rule, which factors the two longest axes of any parameter.
      frozen: Paths of parameters that are not trained and have no slots; also in every optimizer
        below.
    """

    multiply_by_parameter_scale: bool
    decay_exponent: Annotated[float, Range(at_least=0)]
    decay_offset: Annotated[float, Range()]
    beta1: Annotated[float, Range(at_least=0, below=1)]
    clipping_threshold: Annotated[float | None, Range(above=0)]
    factored: bool
    epsilon1: Annotated[float, Range(at_least=0)]
    epsilon2: Annotated[float, Range(at_least=0)]
    min_dim_size_to_factor: Annotated[int, Range(at_least=0)]
    decay_rate: Annotated[float | None, Range(at_least=0, below=1)] = None
    # Paths, not Mesh TensorFlow's patterns, so that the JAX core needs none of its names.
    exclude_from_parameter_scale: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    # From here on, options that only T5X's Adafactor has. It allocates a slot for beta1 = 0.0 too,
    # since None is how T5X says that there is no momentum.
    momentum_slot: bool = False
    weight_decay_rate: Annotated[float | None, Range(at_least=0)] = None
    weight_decay_rate_lr_exponent: Annotated[float | None, Range()] = None
    global_norm_clip: Annotated[float | None, Range(above=0)] = None
    max_parameter_scale: Annotated[float | None, Range(above=0)] = None
    skip_nan_updates: bool = False
    factor_map: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class AdamWeightDecayConfig:
    """Mesh TensorFlow's AdamWeightDecayOptimizer: Adam without bias correction, decoupled decay.

    Attributes:
      exclude_from_weight_decay: Paths of parameters that do not decay.
    """

    weight_decay_rate: Annotated[float, Range(at_least=0)]
    beta_1: Annotated[float, Range(at_least=0, below=1)]
    beta_2: Annotated[float, Range(at_least=0, below=1)]
    epsilon: Annotated[float, Range(at_least=0)]
    exclude_from_weight_decay: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class MomentumConfig:
    """Mesh TensorFlow's MomentumOptimizer, which subtracts the velocity *before* its update."""

    momentum: Annotated[float, Range(at_least=0, below=1)]
    frozen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SgdConfig:
    """Mesh TensorFlow's SgdOptimizer: subtracts the gradient times the learning rate."""

    frozen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OptaxConfig:
    """Transformations of optax, applied in order, with their own learning rates.

    Attributes:
      transformations: Calls of optax: {"function": name, "arguments": {...}}, in which an argument
        may be such a call itself.
    """

    # Plain data instead of optax's objects, because a RunConfig is written as JSON and read back.
    transformations: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """Parameters, by path, and the optimizer that trains them."""

    # T5X chooses them by a user's functions, which are available only while gin files are read.
    paths: tuple[str, ...]
    # T5X's MultiOptimizer cannot hold the state of a chain of optax either.
    optimizer: AdafactorConfig


@dataclasses.dataclass(frozen=True)
class MultiOptimizerConfig:
    """T5X's MultiOptimizer: assigns an optimizer to each of several sets of parameters.

    Parameters that no part names are not trained.
    """

    parts: tuple[OptimizerPart, ...]


OptimizerConfig = (
    AdafactorConfig
    | AdamWeightDecayConfig
    | MomentumConfig
    | SgdConfig
    | OptaxConfig
    | MultiOptimizerConfig
)


# Those that must be above 0 are divisors in the schedules' formulas.
_SCHEDULE_RANGES = {
    "value": Range(at_least=0),
    "learning_rate": Range(at_least=0),
    "initial_lr": Range(at_least=0),
    "max_learning_rate": Range(at_least=0),
    "multiplier": Range(at_least=0),
    "warmup_steps": Range(above=0),
    "base_learning_rate": Range(at_least=0),
    "min_learning_rate": Range(at_least=0),
    "decay_factor": Range(at_least=0),
    "steps_per_decay": Range(above=0),
    "steps_per_cycle": Range(above=0),
    "steps_or_fraction": Range(above=0),
    "linear_decay_fraction": Range(at_least=0, at_most=1),
    "cut_fraction": Range(above=0, below=1),
    "ratio": Range(above=0),
    "start_step": Range(at_least=0),
    "offset": Range(),
}


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """A function of mesh_tensorflow.transformer.learning_rate_schedules with its arguments.

    Attributes:
      name: The function's name there, for instance `constant_learning_rate`.
      arguments: Its keyword arguments with all defaults filled in. The `factors` of a product are
        numbers or {"name": ..., "arguments": ...}.
      total_train_steps: The value that `run` passes: total_run_steps, or else train_steps.
    """

    name: str
    arguments: Annotated[Mapping[str, Any], _SCHEDULE_RANGES]
    # A schedule may cover several runs, so this need not be where this one ends.
    total_train_steps: Annotated[int, Range(at_least=0, at_most=MOST_32)]


@dataclasses.dataclass(frozen=True)
class EvalDataConfig:
    """The arguments of t5.models.mesh_transformer.mesh_eval_dataset_fn."""

    mixture_or_task_name: str
    split: str
    use_cached: bool
    pack: bool
    num_eval_examples: Annotated[int, Range(at_least=1, also=(-1,))]
    shuffle_eval_examples: bool
    seed: Annotated[int | None, Range(at_least=0)]


@dataclasses.dataclass(frozen=True)
class CheckpointChoice:
    """The arguments of get_checkpoint_iterator other than the step itself.

    Attributes:
      skip_until: When the step is "all" or None, steps up to this one are skipped.
      stop_after: When the step is None, waiting ends with the first checkpoint at or after this
        step.
      find_closest: Whether a missing step is replaced by the nearest one; otherwise it is skipped.
    """

    skip_until: Annotated[int, Range(at_least=0)]
    stop_after: Annotated[int | None, Range(at_least=0)]
    find_closest: bool


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run, with the place that set each value.

    Attributes:
      batch_size: Sequences in a global batch.
      num_microbatches: Equal parts of a batch whose gradients are added before one update.
      sequence_length: Tokens per feature, or None for the longest example's (evaluation only).
      train_steps: The global step at which training ends, not the number of steps to take.
      plan: Which data to train on, and what to save and evaluate, and when.
      eval_checkpoint_step: A step, a list of steps, "all", -1 for the latest, or None to wait for
        each new one.
      checkpoint_choice: The other settings that decide which checkpoints are evaluated.
      perplexity_eval_steps: Number of batches in a perplexity evaluation.
      decoding: The decoding options of eval and infer.
      infer: What infer reads and writes, if it is bound.
      score_strings: What score_from_strings scores, if it is bound.
      scores_filename: Prefix of the files that save_scores writes, or None.
      save_example_text: Whether save_scores writes targets and their lengths as well as scores.
      vocabulary: Path or address of the SentencePiece model; None if no data is bound.
      vocabulary_extra_ids: Sentinels that are added to the SentencePiece model's tokens.
      layout: How the run is sharded across devices.
      weight_metrics_every: Training steps between measurements of every parameter, gradient and
        update; 0 measures none.
      provenance: Dotted field -> where its value was set ("t5.1.1.base.gin:9", "--gin_param ...",
        "default").
    """

    mode: Mode
    model_dir: str
    model: ModelConfig
    dtypes: DTypePolicy
    optimizer: OptimizerConfig | None
    schedule: ScheduleConfig | None
    eval_data: EvalDataConfig | None
    sequence_length: Annotated[Mapping[str, int] | None, Range(at_least=1, at_most=MOST_32)]
    batch_size: Annotated[int, Range(at_least=1, at_most=MOST_32)]
    num_microbatches: Annotated[int, Range(at_least=1, at_most=MOST_32)]
    train_steps: Annotated[int, Range(at_least=0, at_most=MOST_32)]
    plan: TrainingPlan
    eval_checkpoint_step: Annotated[
        int | tuple[int, ...] | Literal["all"] | None, Range(at_least=0, also=(-1,))
    ]
    eval_summary_dir: str | None
    eval_dir_suffix: str | None
    output_eval_examples: bool
    checkpoint_choice: CheckpointChoice
    perplexity_eval_steps: Annotated[int, Range(at_least=1)]
    decoding: DecodingConfig
    infer: InferConfig | None
    score_strings: ScoreStringsConfig | None
    scores_filename: str | None
    save_example_text: bool
    vocabulary: str | None
    # Not compared: where a value was set does not change the run.
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    vocabulary_extra_ids: Annotated[int, Range(at_least=0)] = 0
    layout: Layout = Layout()
    weight_metrics_every: Annotated[int, Range(at_least=0)] = 0

    def to_json(self) -> str:
        """The configuration as indented JSON; `from_json` reads it back equal."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str, where: str | None = None) -> RunConfig:
        """Reads what `to_json` wrote.

        Args:
          text: The JSON.
          where: Where the text comes from, for messages.

        Raises:
          UserError: naming the field that is missing, unknown or of another type.
        """
        # Imported here because accelerator machines, which need no JSON, do not have dacite.
        import dacite

        # strict: the optimizers are a union, and without it dacite could match another optimizer's
        # dataclass by ignoring the fields that it lacks.
        # JSON has no tuples: lists are cast where a field is a tuple.
        options = dacite.Config(cast=[tuple], strict=True)
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ValueError("it is not a JSON object")
            return dacite.from_dict(cls, values, options)
        except (ValueError, dacite.DaciteError) as error:
            raise UserError(
                f"This is not a run configuration: {error}.",
                where=where,
                fix="Give what RunConfig.to_json wrote, with this version of t0repro.",
            ) from error
