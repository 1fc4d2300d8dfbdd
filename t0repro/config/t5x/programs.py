"""The calls of T5X's scripts as records: a program for each run mode, and its arguments.

The names are those under which gin files import the scripts (`import __main__ as train_script`);
`t0repro.config.t5x.modules` serves them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from t0repro.adapters import Adapter
from t0repro.config.choices import ChoiceLoss
from t0repro.config.t5x.records import (
    CheckpointConfig,
    DatasetConfig,
    EncoderDecoderModel,
    Evaluator,
    Feature,
    PjitPartitioner,
    Record,
    RestoreCheckpointConfig,
    Trainer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainProgram(Record):
    """The arguments of `train_script.train`.

    Attributes:
      total_steps: the step at which training ends, restored steps included.
      relative_steps: steps from wherever this run starts; overrides `total_steps`.
      stats_period: steps between summaries; None stands for the shortest of the other periods.
      random_seed: seed for initialization and dropout; None picks one at each start.
    """

    model: EncoderDecoderModel
    # Required arguments first, as in T5X's signature; the others have its defaults.
    train_dataset_cfg: DatasetConfig
    train_eval_dataset_cfg: DatasetConfig | None
    infer_eval_dataset_cfg: DatasetConfig | None
    checkpoint_cfg: CheckpointConfig
    partitioner: PjitPartitioner
    trainer_cls: Trainer
    model_dir: str
    total_steps: int
    eval_steps: int
    eval_period: int
    random_seed: int | None
    # config.gin is written in any case, so nothing but T5X's own function is accepted.
    summarize_config_fn: Any = None
    relative_steps: int | None = None
    stats_period: int | None = None
    use_hardware_rng: bool = False
    # T5X's default, which no gin file configures: an evaluator without loggers.
    inference_evaluator_cls: Evaluator | None = Evaluator()
    get_dataset_fn: Any = None
    # Ignored: all actions run, whatever else runs at the same time.
    concurrent_metrics: bool = True
    actions: Mapping[str, Sequence[Any]] | None = None
    train_eval_get_dataset_fn: Any = None
    run_eval_before_training: bool = False
    train_state_initializer_cls: Any = None
    # Ignored: there is one way to write checkpoints.
    use_orbax: bool = True
    verify_matching_vocabs_fn: Any = None
    gc_period: int = 0
    # Not in T5X: what is trained in place of the model's own parameters, and a loss over choices.
    adapter: Adapter | None = None
    choice_loss: ChoiceLoss | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalProgram(Record):
    """The arguments of `eval_script.evaluate`."""

    model: EncoderDecoderModel
    dataset_cfg: DatasetConfig
    restore_checkpoint_cfg: RestoreCheckpointConfig
    partitioner: PjitPartitioner
    output_dir: str
    # T5X's default, which no gin file configures: an evaluator without loggers.
    inference_evaluator_cls: Evaluator | None = Evaluator()
    training_evaluator_cls: Any = None
    summarize_config_fn: Any = None
    train_state_initializer_cls: Any = None
    train_eval_get_dataset_fn: Any = None
    fallback_init_rng: int | None = None
    use_orbax: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferProgram(Record):
    """The arguments of `infer_script.infer`.

    Attributes:
      checkpoint_period: batches between the points where an interrupted job can resume.
      shard_id: which of `num_shards` shards of the examples this job takes.
    """

    mode: str
    model: EncoderDecoderModel
    dataset_cfg: DatasetConfig
    restore_checkpoint_cfg: RestoreCheckpointConfig
    partitioner: PjitPartitioner
    output_dir: str
    checkpoint_period: int
    shard_id: int = 0
    num_shards: int = 1
    merge_chunked_results: bool = True
    write_fn: Any = None
    # Ignored: a run resumes by counting chunks, not from an iterator's state.
    checkpoint_ds_iter: bool = True
    train_state_initializer_cls: Any = None
    fallback_init_rng: int | None = None
    merge_fn: Any = None
    summarize_config_fn: Any = None
    use_orbax: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecompileProgram(Record):
    """The arguments of `train_script.precompile`."""

    model: EncoderDecoderModel
    train_dataset_cfg: DatasetConfig
    partitioner: PjitPartitioner
    model_dir: str
    random_seed: int | None = None
    adapter: Adapter | None = None
    choice_loss: ChoiceLoss | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfExampleTask(Record):
    """`infer_script.create_task_from_tfexample_file`: a task read from TFRecord files."""

    paths: str | Sequence[str]
    file_type: str
    inputs_key: str
    targets_key: str | None
    features: Mapping[str, Feature]
    task_id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteInferences(Record):
    """`infer_script.write_inferences_to_file`: the contents of each line of the results.

    Attributes:
      include_all_inputs: whether to write all features of an example, not only its texts.
      input_fields_to_include: the features to write instead.
      output_ids: whether to write an output's token ids too.
    """

    include_all_inputs: bool = False
    input_fields_to_include: Sequence[str] | None = None
    output_ids: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteConfig(Record):
    """`gin_utils.summarize_gin_config`: writes the configuration beside the results."""

    model_dir: str | None = None
    summary_writer: Any = None
    step: int = 0


def task_modules(program: Record) -> list[str]:
    """The modules that a program's datasets name (`DatasetConfig.module`), each once."""
    fields = dataclasses.fields(program)  # pyright: ignore[reportArgumentType]
    values = (getattr(program, field.name) for field in fields)
    modules = [value.module for value in values if isinstance(value, DatasetConfig)]
    return list(dict.fromkeys(module for module in modules if module))


# ---- T5X's functions and classes that are the default of an argument -----------------------------

# Naming one in a gin file changes nothing. Any other function or class in its place is refused.


class Standard(Record):
    """A function or class of T5X's that is the default of an argument.

    Attributes:
      default_of: the arguments that have it as default.
    """

    default_of: ClassVar[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetDataset(Standard):
    """`utils.get_dataset`."""

    default_of = ("get_dataset_fn",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingEvalDatasets(Standard):
    """`utils.get_training_eval_datasets`."""

    default_of = ("train_eval_get_dataset_fn",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateInitializer(Standard):
    """`utils.TrainStateInitializer`."""

    default_of = ("train_state_initializer_cls",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyMatchingVocabs(Standard):
    """`utils.verify_matching_vocabs`."""

    default_of = ("verify_matching_vocabs_fn",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeChunks(Standard):
    """`infer.merge_chunks_to_file`."""

    default_of = ("merge_fn",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointer(Standard):
    """`checkpoints.Checkpointer`."""

    default_of = ("checkpointer_cls",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointManager(Standard):
    """`checkpoints.OrbaxCheckpointManagerInterface`."""

    default_of = ("checkpoint_manager_cls",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncDecFeatureConverter(Standard):
    """`seqio.EncDecFeatureConverter`."""

    default_of = ("feature_converter_cls",)
