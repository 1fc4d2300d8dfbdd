"""What a T5X run has besides its model and optimizer: data, checkpoints, evaluations, actions.

`RunConfig.plan` holds one; a Mesh TensorFlow run has none. Where T5X's arguments mean the same
under a clear name, they keep it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from t0repro.config.ranges import Range


@dataclasses.dataclass(frozen=True)
class SeqioDataConfig:
    """Which examples of a SeqIO task or mixture are read, and in which batches.

    Attributes:
      sequence_length: Tokens per feature; None stands for the longest example's.
      batch_size: Examples over all devices; rows, when they are packed.
      seed: Seed for the order of the examples; None takes another at each start.
      use_custom_packing_ops: Pack with SeqIO's compiled operation; refused, since it is not built.
      use_memory_cache: Whether an evaluation keeps its examples in memory.
      trim_output_features: Whether a feature that is too long is cut to its length.
      num_shards: As in `TrainDataConfig`; 1 unless the examples are trained on.
    """

    mixture_or_task_name: str
    sequence_length: Annotated[Mapping[str, int] | None, Range(at_least=1)]
    split: str
    batch_size: Annotated[int, Range(at_least=1)]
    shuffle: bool
    seed: Annotated[int | None, Range(at_least=0)]
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    use_memory_cache: bool = True
    trim_output_features: bool = True
    num_shards: Annotated[int, Range(at_least=1)] = 1


@dataclasses.dataclass(frozen=True)
class BestCheckpoints:
    """Keeps the checkpoints with the best value of a metric, and the latest.

    Attributes:
      metric: `<run>/<tag>` as TensorBoard shows it, for instance "train/accuracy".
      mode: Whether the largest or the smallest value is best.
      keep_without_metric: Whether checkpoints of steps without the metric are kept.
    """

    metric: str
    mode: Literal["max", "min"]
    keep_without_metric: bool


@dataclasses.dataclass(frozen=True)
class SaveConfig:
    """Which checkpoints a training writes and keeps.

    Attributes:
      period: Steps between checkpoints, counted from the step that the run starts at.
      steps: Further steps after which to save.
      keep: How many of the latest are kept (of the best, with `best`); None keeps all.
      dtype: Dtype of the parameters in a checkpoint; None keeps float32. Slots stay float32.
      data: Whether the position in the data is saved, so that a run can resume exactly there.
      keep_data: How many of the latest checkpoints keep that position. Kept for translation; it has
        no effect, as in T5X.
      keep_period: Checkpoints of steps that this divides are kept whatever else is.
    """

    period: Annotated[int | None, Range(at_least=1)]
    steps: Annotated[tuple[int, ...], Range(at_least=0)]
    keep: Annotated[int | None, Range(at_least=1)]
    dtype: Literal["float32", "bfloat16"] | None
    data: bool
    keep_data: Annotated[int | None, Range(at_least=1)]
    best: BestCheckpoints | None
    keep_period: Annotated[int | None, Range(at_least=1)] = None


@dataclasses.dataclass(frozen=True)
class RestoreConfig:
    """Where a run's parameters and slots come from when its model_dir has no checkpoint.

    Attributes:
      path: A checkpoint in any format, or with mode "latest" a folder of checkpoints; several only
        for an evaluation, one after the other.
      mode: "specific", "latest" or "all".
      dtype: Dtype that parameters are rounded to when they are read; None leaves them as they are.
      assignment_map: (pattern, replacement) pairs on whole names such as `target/decoder/...`; a
        replacement of None keeps what was initialised.
      strict: Whether every slot must be in the checkpoint.
      fallback_to_scratch: Whether parameters that the checkpoint lacks are initialised.
    """

    path: str | tuple[str, ...]
    mode: Literal["specific", "latest", "all"]
    dtype: Literal["float32", "bfloat16", "float16"] | None
    assignment_map: tuple[tuple[str, str | None], ...]
    strict: bool
    fallback_to_scratch: bool


@dataclasses.dataclass(frozen=True)
class LoggerConfig:
    """One of SeqIO's loggers of an evaluation.

    Attributes:
      write_n_results: For "json": how many predictions are written; None writes all.
    """

    name: Literal["py", "tensorboard", "json"]
    output_dir: str | None
    write_n_results: Annotated[int | None, Range(at_least=0)] = None


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
    """SeqIO's Evaluator: how many examples of each task it takes, and where results go."""

    loggers: tuple[LoggerConfig, ...]
    num_examples: Annotated[int | None, Range(at_least=1)]
    use_memory_cache: bool


@dataclasses.dataclass(frozen=True)
class EarlyStoppingConfig:
    """Stops when a task's metric has not improved for a while.

    Attributes:
      patience: Evaluations without an improvement after which it stops.
      atol, rtol: How much better a value has to be, absolutely and relative to the reference.
      reference: What a value is compared with: "best" is the best so far; "previous" is T5X's rule
        (t0repro.training.stopping).
    """

    task: str
    metric: str
    mode: Literal["min", "max"]
    patience: Annotated[int, Range(at_least=1)]
    atol: Annotated[float, Range(at_least=0)]
    rtol: Annotated[float, Range(at_least=0)]
    reference: Literal["best", "previous"] = "previous"


@dataclasses.dataclass(frozen=True)
class TerminateOnNanConfig:
    """Stops when a task's metric is not finite."""

    task: str
    metric: str


@dataclasses.dataclass(frozen=True)
class UserClass:
    """A class of the user's that takes part in a training.

    Attributes:
      module: The module that it is imported from.
      name: Its name there.
      arguments: Its own arguments, besides those of the class that it derives from; as JSON.
    """

    module: str
    name: str
    arguments: Mapping[str, Any]


ActionConfig = EarlyStoppingConfig | TerminateOnNanConfig | UserClass
# What a class of the user's may take the place of.
Replaced = Literal["model", "trainer", "partitioner", "weight_metrics_computer"]
ActionMode = Literal["TRAIN", "TRAIN_EVAL", "INFER_EVAL"]


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """A training as T5X runs it.

    Attributes:
      random_seed: Seed for initial parameters and dropout; None takes another at each start.
      relative_steps: Steps from wherever the run starts; wins over `RunConfig.train_steps`.
      train_eval_data: Data of evaluations with the training's metrics; None for none.
      infer_eval_data: Data of evaluations with the tasks' own metrics; None for none.
      eval_steps: Batches per task in an evaluation with the training's metrics.
      eval_period: Steps between evaluations, counted as for `SaveConfig.period`.
      stats_period: Steps between summaries; None stands for the shortest of the other periods.
      run_eval_before_training: Whether to evaluate before the first step too.
      save: None writes no checkpoint.
      restore: None starts from model_dir's checkpoint or from new parameters.
      actions: What is done with the metrics, by where they come from.
      gc_period: Steps between collections of Python's garbage; 0 leaves it to Python.
      user_classes: The user's classes by what they take the place of.
    """

    train_data: SeqioDataConfig
    train_eval_data: SeqioDataConfig | None
    infer_eval_data: SeqioDataConfig | None
    evaluator: EvaluatorConfig | None
    random_seed: Annotated[int | None, Range(at_least=0)]
    relative_steps: Annotated[int | None, Range(at_least=0)]
    eval_steps: Annotated[int, Range(at_least=1)]
    eval_period: Annotated[int, Range(at_least=0)]
    stats_period: Annotated[int | None, Range(at_least=1)]
    run_eval_before_training: bool
    save: SaveConfig | None
    restore: RestoreConfig | None
    actions: Mapping[ActionMode, tuple[ActionConfig, ...]]
    gc_period: Annotated[int, Range(at_least=0)]
    user_classes: Mapping[Replaced, UserClass] = dataclasses.field(default_factory=dict)
