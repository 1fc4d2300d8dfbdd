"""What a run has besides its model and optimizer: data, checkpoints, evaluations, actions.

Every RunConfig has a plan. T5X's dialect fills in what the gin files say. Mesh TensorFlow's fills
in the intervals of mesh_transformer_main (`mesh_transformer_plan`). Where T5X's arguments mean the
same under a clear name, they keep it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from t0repro.config.decoding import DecodingPlan
from t0repro.config.ranges import Range, check_field


@dataclasses.dataclass(frozen=True)
class TrainDataConfig:
    """The arguments of t5.models.mesh_transformer.mesh_train_dataset_fn, and of resuming.

    Attributes:
      seed: Seed for the data; None draws one.
      skip_seen_data: Where the data of a resumed run continue. None, when nothing is bound: exactly
        after the last batch. True: after (global step - `seen_data_init_step`) batches, as in Mesh
        TensorFlow. False: the data start over, as in Mesh TensorFlow.
      checkpoint_input_pipeline: Whether checkpoints hold the state of the input pipeline itself.
      num_shards: Parts that the examples are divided into; each makes an equal part of every batch.
    """

    mixture_or_task_name: str
    split: str
    use_cached: bool
    pack: bool
    shuffle: bool
    seed: Annotated[int | None, Range(at_least=0)]
    skip_seen_data: bool | None
    seen_data_init_step: Annotated[int, Range(at_least=0)]
    checkpoint_input_pipeline: bool
    num_shards: Annotated[int, Range(at_least=1)] = 1


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
    """Which checkpoints a training run writes and keeps.

    Attributes:
      period: Steps between checkpoints.
      steps: Further steps after which to save.
      keep: How many of the latest are kept (of the best, with `best`); None keeps all.
      dtype: Dtype of the parameters in a checkpoint; None keeps float32. Slots stay float32.
      data: Whether the position in the data is saved, so that a run can resume exactly there.
      keep_data: How many of the latest checkpoints keep that position. Kept for translation; it has
        no effect, as in T5X.
      keep_period: Checkpoints of steps that this divides are kept whatever else is.
      from_first_step: True, as in T5X: periods count from the step at which the run first began,
        whose state is saved too, so that a resumed run saves at the steps at which an undisturbed
        one saves. False, as in Mesh TensorFlow: periods count from the step at which training
        starts or resumes.
    """

    period: Annotated[int | None, Range(at_least=1)]
    steps: Annotated[tuple[int, ...], Range(at_least=0)] = ()
    keep: Annotated[int | None, Range(at_least=1)] = None
    dtype: Literal["float32", "bfloat16"] | None = None
    data: bool = False
    keep_data: Annotated[int | None, Range(at_least=1)] = None
    best: BestCheckpoints | None = None
    keep_period: Annotated[int | None, Range(at_least=1)] = None
    from_first_step: bool = True


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
      variable_filter: Mesh TensorFlow's rule, in place of T5X's four above: a regular expression,
        on its names, of the variables that are taken; "" takes all. None in a T5X run.
    """

    path: str | tuple[str, ...]
    mode: Literal["specific", "latest", "all"]
    dtype: Literal["float32", "bfloat16", "float16"] | None
    assignment_map: tuple[tuple[str, str | None], ...]
    strict: bool
    fallback_to_scratch: bool
    variable_filter: str | None = None


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
    """Stops when a task's metric is NaN or Inf."""

    task: str
    metric: str


@dataclasses.dataclass(frozen=True)
class UserClass:
    """A class of the user's that takes part in a training run.

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
    """How a training run reads, saves, evaluates and ends; the defaults are T5X's.

    Attributes:
      train_data: What is trained on; None if a caller passes the batches, or nothing is trained.
      train_eval_data: Data of evaluations with the training run's metrics; None for none.
      infer_eval_data: Data of evaluations with the tasks' own metrics; None for none.
      evaluator: How many examples those take, and where results go.
      random_seed: Seed for initial parameters and dropout; None takes another at each start.
      relative_steps: Steps from wherever the run starts; wins over `RunConfig.train_steps`.
      eval_steps: Batches per task in an evaluation with the training run's metrics.
      eval_period: Steps between evaluations, counted from the step at which the run first began.
      stats_period: Steps between summaries; None stands for the shortest of the other periods.
      run_eval_before_training: Whether to evaluate before the first step too.
      save: None writes no checkpoint.
      restore: Where the run starts if model_dir has no checkpoint; None: initialized parameters.
      actions: What is done with the metrics, by where they come from.
      gc_period: Steps between collections of Python's garbage; 0 leaves it to Python.
      user_classes: The user's classes by what they take the place of.
      decoding: How evaluations with the tasks' own metrics generate; None without them.
      log: What metrics.jsonl has of training: a summary every `stats_period` steps, or a line for
        every step.
      keys: How the PRNG keys of parameters and dropout are made of the seed: T5X splits one key;
        the other way, dropout's is the parameters' with 1 folded in.
      may_start_past_end: Whether a run whose checkpoint is past `train_steps` has nothing to do;
        otherwise that is an error.
    """

    train_data: SeqioDataConfig | TrainDataConfig | None
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
    decoding: DecodingPlan | None = None
    log: Literal["summaries", "steps"] = "summaries"
    keys: Literal["split", "folded"] = "split"
    may_start_past_end: bool = False


def mesh_transformer_plan(
    train_data: TrainDataConfig | None = None,
    *,
    save_checkpoints_steps: Annotated[int, Range(at_least=1)] = 5000,
    keep_checkpoint_max: Annotated[int | None, Range(at_least=0)] = None,
    init_checkpoint: str | None = None,
    init_variable_filter: str = "",
    places: Mapping[str, str | None] | None = None,
) -> TrainingPlan:
    """The rhythm of mesh_transformer_main: a line for each step, checkpoints, no evaluations.

    Args:
      train_data: What is trained on.
      save_checkpoints_steps: Steps between checkpoints.
      keep_checkpoint_max: How many of the latest are kept; None or 0 keeps all.
      init_checkpoint: A checkpoint in any format to start from; its slots and step are taken too.
      init_variable_filter: See `RestoreConfig.variable_filter`.
      places: Argument -> where it was set, for messages.

    Raises:
      UserError: For a value of another type or outside its range.
    """
    arguments = {
        "save_checkpoints_steps": save_checkpoints_steps,
        "keep_checkpoint_max": keep_checkpoint_max,
        "init_checkpoint": init_checkpoint,
        "init_variable_filter": init_variable_filter,
    }
    # Checked here, under the names that users know; a plan's own names are T5X's.
    for name, value in arguments.items():
        check_field(mesh_transformer_plan, name, value, (places or {}).get(name))
    start = None
    if init_checkpoint is not None:
        start = RestoreConfig(
            path=init_checkpoint,
            mode="specific",
            dtype=None,
            assignment_map=(),
            strict=False,
            fallback_to_scratch=False,
            variable_filter=init_variable_filter,
        )
    return TrainingPlan(
        train_data=train_data,
        train_eval_data=None,
        infer_eval_data=None,
        evaluator=None,
        random_seed=0,
        relative_steps=None,
        eval_steps=1,
        eval_period=0,
        stats_period=None,
        run_eval_before_training=False,
        save=SaveConfig(
            save_checkpoints_steps,
            keep=keep_checkpoint_max or None,
            data=True,
            from_first_step=False,
        ),
        restore=start,
        actions={},
        gc_period=0,
        log="steps",
        keys="folded",
        may_start_past_end=True,
    )
