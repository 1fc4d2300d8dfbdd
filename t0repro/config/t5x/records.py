"""The configurables of T5X's gin files as plain typed records, under T5X's names.

A T5X gin file binds the arguments of T5X's own classes and functions. Each record here stands in
for one of them: it has the arguments and defaults of its original (google-research/t5x at cc342d4)
and only stores the values that gin passes. Calling one, as gin does for `@utils.DatasetConfig()`,
therefore yields a description of what T5X would have built. `t0repro.config.t5x.modules` maps
modules to records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from t0repro.config.ranges import fits, hints_of, in_words
from t0repro.errors import UserError


class WrongArgument(UserError):
    """An argument of a record that does not have the declared type.

    Attributes:
      record: the record's class.
      argument: the argument's name.
      scopes: gin's scopes in which the record was called.
      hint: the declared type; `wanted` says it in words.
    """

    def __init__(self, record: type, argument: str, value: Any, hint: Any):
        import gin

        self.record, self.argument = record, argument
        # gin knows its scopes only during the call, and the error is placed after it.
        self.scopes = tuple(gin.current_scope())
        self.hint, self.wanted = hint, in_words(hint)
        super().__init__(f"{record.__name__}.{argument} is {value!r}; it must be {self.wanted}.")


class Record:
    """A dataclass that instantiates arguments that are record classes.

    Raises:
      WrongArgument: if an argument does not have its declared type.
    """

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            if field.init:
                # T5X instantiates a class such as `trainer_cls = @trainer.Trainer` later, but gin's
                # values for it are available only while gin has the configuration.
                value = _called(getattr(self, field.name))
                if not fits(value, hints[field.name]):
                    raise WrongArgument(type(self), field.name, value, hints[field.name])
                # Frozen: a plain assignment would raise.
                object.__setattr__(self, field.name, value)


def _called(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, Record):
        # gin supplies the arguments, as it would for T5X's own class.
        return value()
    if isinstance(value, Mapping):
        return {key: _called(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_called(item) for item in value)
    return value


# ---- t5x.utils -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig(Record):
    """The examples that a run reads, and their batches.

    Attributes:
      mixture_or_task_name: a registered SeqIO task or mixture, or a `TfExampleTask`.
      task_feature_lengths: tokens per feature; None stands for the longest example.
      batch_size: examples over all devices; rows, when they are packed.
      seed: None picks another order at each start.
      num_shards: shards of a training run's examples.
    """

    mixture_or_task_name: Any
    task_feature_lengths: Mapping[str, int] | None
    split: str
    batch_size: int
    shuffle: bool
    seed: int | None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    # T5X's old way to name the module that registers the tasks; its run files still bind it.
    module: str | None = None
    use_memory_cache: bool = True
    trim_output_features: bool = True
    # Not in T5X, which makes as many shards as hosts have different rows.
    num_shards: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveCheckpointConfig(Record):
    """Which checkpoints a training run keeps.

    Attributes:
      dtype: dtype of the parameters; slots stay float32. None keeps the parameters' own.
      period: steps between checkpoints; None saves only at `checkpoint_steps`.
      keep: how many of the latest to keep; None keeps all.
    """

    dtype: str | None = "float32"
    period: int | None = None
    checkpoint_steps: Sequence[int] | None = None
    keep: int | None = None
    # Not in T5X, where only SaveBestCheckpointer has it (force_keep_period).
    keep_period: int | None = None
    keep_dataset_checkpoints: int | None = None
    save_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Any] = ()
    checkpoint_manager_cls: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreCheckpointConfig(Record):
    """The source of parameters and slots.

    Attributes:
      path: a checkpoint, or (with mode "latest" or "all") a folder of checkpoints; an empty list
        restores nothing.
      mode: "specific", "latest" or "all".
      assignment_map: (pattern, replacement) pairs, matched against complete parameter names; a
        replacement of None leaves the parameter initialized.
      strict: whether every slot must be in the checkpoint.
      fallback_to_scratch: whether to initialize parameters missing from the checkpoint.
      adapter: a checkpoint of an adapter whose base the checkpoint is; T5X has none.
    """

    path: str | Sequence[str]
    mode: str = "latest"
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    strict: bool = True
    fallback_to_scratch: bool = False
    dtype: str | None = None
    adapter: str | None = None
    restore_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Any] = ()
    checkpoint_manager_cls: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Record):
    """Saving and restoring; None turns either off."""

    save: SaveCheckpointConfig | None = None
    restore: RestoreCheckpointConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Record):
    """`utils.create_learning_rate_scheduler`: the product of the factors named in `factors`."""

    factors: str = "constant * linear_warmup * rsqrt_decay"
    base_learning_rate: float = 0.5
    warmup_steps: int = 1000
    decay_factor: float = 0.5
    steps_per_decay: int = 20000
    steps_per_cycle: int = 100000
    step_offset: int = 0
    min_learning_rate: float = 1e-8


# ---- t5x.models ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding(Record):
    """The decoding options of an encoder-decoder: the arguments of `predict_batch_with_aux`.

    Attributes:
      num_decodes: beams, or samples; 1 decodes greedily.
    """

    decoder_params: Mapping[str, Any] | None = None
    return_all_decodes: bool = False
    num_decodes: int = 1
    prompt_with_targets: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch(Record):
    """`decoding.beam_search`; `alpha` is the exponent of the length penalty ((5 + length) / 6)."""

    # T5X's default, which nothing reads: its model passes a number of its own.
    num_decodes: int = 4
    alpha: float = 0.6
    max_decode_len: int | None = None
    max_decode_step: int = -1
    min_log_prob: float = -1e7  # no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperatureSample(Record):
    """`decoding.temperature_sample`; `topk` 1 is greedy, 0 samples from all tokens."""

    temperature: float = 1.0
    topk: int = 1
    topp: float = 0.0
    num_decodes: int = 1
    max_decode_steps: int | None = None
    max_decode_steps_hard_limit: int | None = None
    rescale_log_probs: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderModel(Record):
    """A T5 with its loss, vocabularies and optimizer.

    Attributes:
      decoding: the values that gin binds for `predict_batch_with_aux`.
    """

    module: Transformer
    input_vocabulary: Any
    output_vocabulary: Any
    optimizer_def: Any
    decode_fn: Any = None
    feature_converter_cls: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_normalizing_factor: float | str | None = None
    default_decoder_params: Mapping[str, Any] | None = None
    decoding: Decoding = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Both methods are called here, so that gin supplies its bindings for them.
        # T5X's files of 2021 bind the loss's arguments for `loss_fn` instead of the model.
        for name, value in self.loss_fn().items():
            object.__setattr__(self, name, value)
        # After loss_fn, so that the types of what gin binds for it are checked too.
        super().__post_init__()
        object.__setattr__(self, "decoding", self.predict_batch_with_aux())

    def loss_fn(
        self,
        label_smoothing: float | None = None,
        z_loss: float | None = None,
        loss_normalizing_factor: float | str | None = None,
    ) -> dict[str, Any]:
        """The arguments of the loss that gin binds for this method."""
        bound = {
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "loss_normalizing_factor": loss_normalizing_factor,
        }
        return {name: value for name, value in bound.items() if value is not None}

    def predict_batch_with_aux(
        self,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        prompt_with_targets: bool = False,
    ) -> Decoding:
        """The decoding options; gin binds arguments of this method as of a function."""
        return Decoding(
            decoder_params=decoder_params,
            return_all_decodes=return_all_decodes,
            num_decodes=num_decodes,
            prompt_with_targets=prompt_with_targets,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyOf(Record):
    """`models.get_input_vocabulary` and `get_output_vocabulary`: one of a model's vocabularies."""

    model: EncoderDecoderModel


class InputVocabulary(VocabularyOf):
    """The vocabulary of a model's inputs."""


class OutputVocabulary(VocabularyOf):
    """The vocabulary of a model's outputs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(Record):
    """The shape of `t5x.examples.t5.network.Transformer`; lengths and sizes in T5X's names."""

    vocab_size: int
    dtype: Any = "float32"
    emb_dim: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str] = ("relu",)
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannedT5Config(T5Config):
    """The shape of `t5x.examples.scalable_t5.network.Transformer`, whose layers are scanned."""

    scan_layers: bool = True
    # Ignored: it only orders the axes in T5X's own checkpoints.
    param_scan_axis: int = 1
    remat_policy: str = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuT5Config(T5Config):
    """The shape of `t5x.contrib.gpu.t5.network.Transformer`.

    Attributes:
      scale_attn_logits: divides queries by the square root of head_dim.
    """

    # For optimizers that do not scale updates by the parameters' size.
    scale_attn_logits: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer(Record):
    """A T5 network of the given shape."""

    config: T5Config


# ---- Optimizers ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardFactorRules(Record):
    """`adafactor.standard_logical_factor_rules`: which logical axes Adafactor's slots factor."""

    rules: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HParamMap(Record):
    """`adafactor.HParamMap`: a value per parameter, chosen by regular expressions on its path."""

    rules: Sequence[tuple[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Record):
    """T5X's Adafactor; `beta1` None means no momentum, for which Mesh TensorFlow uses 0.0."""

    # Ignored: the Trainer's schedule sets the rate of each step.
    learning_rate: float | None = None
    factored: bool = True
    multiply_by_parameter_scale: bool | HParamMap = True
    beta1: float | None = None
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float | None = 1.0
    weight_decay_rate: float | None = None
    min_dim_size_to_factor: int = 128
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    dtype_momentum: Any = "float32"
    factor_map: HParamMap | None = None
    # T5X reads these for scanned layers only; a plain matrix is factored by its size.
    logical_factor_rules: Any = None
    weight_decay_rate_lr_exponent: float | None = None
    global_norm_clip_threshold: float | None = None
    max_parameter_scale: float | None = None
    skip_nan_updates: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiOptimizer(Record):
    """`optimizers.MultiOptimizer`: (traversal of parameters, optimizer) pairs."""

    traversals_and_optimizers: Sequence[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptaxCall(Record):
    """A call of a function of optax: its name there, and its arguments without the defaults."""

    function: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptaxChain(Record):
    """`optimizers.chain`: transformations of optax, applied in order."""

    transformations: Sequence[OptaxCall]


# ---- t5x.checkpoints -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveBestCheckpointer(Record):
    """Keeps the checkpoints with the best value of a metric, and the latest.

    Attributes:
      metric_name_to_monitor: `<run>/<tag>` in the TensorBoard files, such as "train/accuracy".
      metric_mode: "max" or "min".
    """

    metric_name_to_monitor: str = "train/accuracy"
    metric_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    force_keep_period: int | None = None


# ---- t5x.partitioning ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisRules(Record):
    """`partitioning.standard_logical_axis_rules`: maps logical axes of arrays to mesh axes."""

    activation_partitioning_dims: int = 1
    parameter_partitioning_dims: int = 1
    additional_rules: Sequence[tuple[str, str | Sequence[str] | None]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PjitPartitioner(Record):
    """How arrays are sharded across devices."""

    num_partitions: int | None = None
    model_parallel_submesh: Sequence[int] | None = None
    # Ignored, like `backend` and `use_cpu_pjit`: parameters are on the devices that JAX finds.
    params_on_devices: bool = True
    backend: str | None = None
    ici_mesh_shape: Mapping[str, int] | None = None
    dcn_mesh_shape: Mapping[str, int] | None = None
    logical_axis_rules: AxisRules | Sequence[tuple[str, str | Sequence[str] | None]] | None = None
    use_cpu_pjit: bool = False


# ---- t5x.trainer ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMetrics(Record):
    """`trainer.WeightMetricsComputer`: norms of parameters, gradients and updates."""

    # Not in T5X, which measures at each step.
    every: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer(Record):
    """The train step: a schedule, microbatches, and the weight metrics."""

    learning_rate_fn: LearningRateSchedule | None = None
    num_microbatches: int | None = None
    weight_metrics_computer: WeightMetrics | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action(Record):
    """`trainer.BaseAction`, the base class of a user's action."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping(Record):
    """`trainer.EarlyStoppingAction`."""

    metric: tuple[str, str]
    mode: str
    patience: int = 3
    atol: float = 0.0
    rtol: float = 0.0
    # Not in T5X, whose rule is "previous"; "best" compares with the best value so far.
    reference: str = "previous"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TerminateOnNan(Record):
    """`trainer.TerminateOnNanAction`."""

    task: str
    metric: str = "loss"


# ---- seqio ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceVocabulary(Record):
    """A SentencePiece model's file; its extra ids are at the end of the vocabulary."""

    sentencepiece_model_file: str
    extra_ids: int | None = None
    use_fast_tokenizer: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteVocabulary(Record):
    """UTF-8 bytes as tokens, 3 to 258."""

    extra_ids: int = 0


PIECES_OR_BYTES = (SentencePieceVocabulary, ByteVocabulary)
"""The vocabularies that are read without SeqIO."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassThroughVocabulary(Record):
    """Tokens as they are in the data."""

    size: int
    eos_id: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature(Record):
    """The vocabulary of a task's feature."""

    vocabulary: Any
    add_eos: bool = True
    required: bool = True
    dtype: Any = "int32"
    rank: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PyLoggingLogger(Record):
    """Metrics as log lines."""

    output_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorBoardLogger(Record):
    """Metrics as TensorBoard events."""

    output_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JSONLogger(Record):
    """Metrics and predictions as JSON lines; `write_n_results` None writes every prediction."""

    output_dir: str | None = None
    write_n_results: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator(Record):
    """The loggers of an evaluation with SeqIO's metrics, and its number of examples."""

    logger_cls: Sequence[Record] = ()
    num_examples: int | None = None
    use_memory_cache: bool = True
