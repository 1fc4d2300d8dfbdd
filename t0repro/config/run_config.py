"""RunConfig: one typed, frozen, JSON-serialisable description of a run.

It is the waist of the project. The dialects in this folder turn gin files and overrides into a
RunConfig; everything behind it (model, optimizer, train step, scorer, checkpoints) takes a
RunConfig and never hears of gin. Defaults live in the dialects, where they have a source: no field
but `provenance` has one here.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

Mode = Literal["train", "eval", "score_eval", "perplexity_eval", "infer"]
DType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of an encoder-decoder T5 (1.0 or 1.1).

    Attributes:
      vocab_size: rows of the embedding, padded to a multiple of Mesh TensorFlow's vocab_divisor.
      activations: of the feed-forward layer; one name for T5 1.0 (`relu`), two for the gated form
        of T5 1.1 (`gelu`, `linear`), one kernel `wi_<n>` each.
      logits_from_embedding: T5 1.0's tied softmax, scaled by d_model**-0.5; T5 1.1 has a kernel of
        its own.
      dropout_rate: of every dropout in the model; zero outside training.
      label_smoothing: mass spread evenly over the whole padded vocabulary, the target included.
      z_loss: coefficient of log(Z)**2, in training only.
      loss_denominator: divides the summed loss; None stands for targets.size * num_microbatches.
    """

    num_encoder_layers: int
    num_decoder_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    d_kv: int
    vocab_size: int
    activations: tuple[str, ...]
    logits_from_embedding: bool
    relative_attention_num_buckets: int
    dropout_rate: float
    label_smoothing: float
    z_loss: float
    loss_denominator: float | None


@dataclasses.dataclass(frozen=True)
class DTypePolicy:
    """Types of a run: what checkpoints hold, what memory holds, what is computed in."""

    master: DType
    slice: DType
    activation: DType


@dataclasses.dataclass(frozen=True)
class AdafactorConfig:
    """Mesh TensorFlow's AdafactorOptimizer, option by option.

    Attributes:
      decay_exponent: the second-moment decay is 1 - (step - decay_offset + 1)**-decay_exponent,
        of the *global* step.
      beta1: 0 means no momentum slot.
      clipping_threshold: of the update's RMS; None means no clipping.
    """

    multiply_by_parameter_scale: bool
    decay_exponent: float
    decay_offset: float
    beta1: float
    clipping_threshold: float | None
    factored: bool
    epsilon1: float
    epsilon2: float
    min_dim_size_to_factor: int


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """A function of mesh_tensorflow.transformer.learning_rate_schedules with its arguments.

    Attributes:
      name: the function's name there, for instance `constant_learning_rate`.
      arguments: its keyword arguments with all defaults filled in.
      total_train_steps: what `run` passes for it: total_run_steps, or else train_steps.
    """

    name: str
    arguments: Mapping[str, float]
    total_train_steps: int


@dataclasses.dataclass(frozen=True)
class TrainDataConfig:
    """The arguments of t5.models.mesh_transformer.mesh_train_dataset_fn."""

    mixture_or_task_name: str
    split: str
    use_cached: bool
    pack: bool
    shuffle: bool
    seed: int | None


@dataclasses.dataclass(frozen=True)
class EvalDataConfig:
    """The arguments of t5.models.mesh_transformer.mesh_eval_dataset_fn."""

    mixture_or_task_name: str
    split: str
    use_cached: bool
    pack: bool
    num_eval_examples: int
    shuffle_eval_examples: bool
    seed: int | None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that a run is, each value with where it came from.

    Attributes:
      batch_size: sequences in a global batch.
      num_microbatches: equal parts of a batch whose gradients are added before one update.
      sequence_length: tokens per feature, or None to take the longest example's (evaluation only).
      train_steps: the global step at which training ends, not a number of steps to do.
      save_checkpoints_steps: steps between checkpoints.
      keep_checkpoint_max: the most recent checkpoints to keep; None or 0 keeps all.
      init_checkpoint: a checkpoint to start from when model_dir has none; its slots and step come
        too.
      eval_checkpoint_step: a step, a list of steps, "all", -1 for the latest, or None to wait for
        each new one.
      scores_filename: prefix of the files that save_scores writes, or None.
      vocabulary: path or address of the SentencePiece model, None where no data is bound.
      provenance: dotted field -> where its value was set ("t5.1.1.base.gin:9", "--gin_param ...",
        "default").
    """

    mode: Mode
    model_dir: str
    model: ModelConfig
    dtypes: DTypePolicy
    optimizer: AdafactorConfig | None
    schedule: ScheduleConfig | None
    train_data: TrainDataConfig | None
    eval_data: EvalDataConfig | None
    sequence_length: Mapping[str, int] | None
    batch_size: int
    num_microbatches: int
    train_steps: int
    save_checkpoints_steps: int
    keep_checkpoint_max: int | None
    init_checkpoint: str | None
    eval_checkpoint_step: int | tuple[int, ...] | str | None
    eval_summary_dir: str | None
    eval_dir_suffix: str | None
    output_eval_examples: bool
    scores_filename: str | None
    vocabulary: str | None
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    def to_json(self) -> str:
        """The configuration as indented JSON; `from_json` reads it back equal."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Reads what `to_json` wrote.

        Raises:
          KeyError: if a field is missing.
          TypeError: if a field is unknown.
        """
        return _build(cls, json.loads(text))


def _build(kind: Any, value: Any) -> Any:
    """Rebuilds a value of the annotated type from what JSON made of it."""
    if value is None:
        return None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        choices = typing.get_args(kind)
        for choice in choices:
            if dataclasses.is_dataclass(choice) and isinstance(value, dict):
                return _build(choice, value)
        return tuple(value) if isinstance(value, list) else value
    if origin is tuple:
        return tuple(value)
    return value
