"""A run's plan, apart from its model and optimizer: data, checkpoints, evaluations, actions.

Every RunConfig has a plan. T5X's dialect fills it from the gin files. Mesh TensorFlow's fills in
the intervals of mesh_transformer_main (`mesh_transformer_plan`). T5X's names are kept where they
are clear and their meaning is the same.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from t0repro.config.decoding import DecodingPlan
from t0repro.config.ranges import MOST_32, Range, check_field
from t0repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class TrainDataConfig:
    """The arguments of t5.models.mesh_transformer.mesh_train_dataset_fn, and those for resuming.

    Attributes:
      seed: Seed for the data; None picks one at each start.
      skip_seen_data: Where a resumed run's data continues. None, if nothing is bound: exactly after
        the last batch. True: after (global step - `seen_data_init_step`) batches, as in Mesh
        TensorFlow. False: from the beginning, as in Mesh TensorFlow.
      checkpoint_input_pipeline: Whether checkpoints contain the state of the input pipeline itself.
      num_shards: Shards of the examples; each contributes an equal part of every batch.
    """

    mixture_or_task_name: str
    split: str
    use_cached: bool
    pack: bool
    shuffle: bool
    seed: Annotated[int | None, Range(at_least=0)]
    # Unbound is None, not Mesh TensorFlow's False, with which a resumed run reads its data again.
    skip_seen_data: bool | None
    seen_data_init_step: Annotated[int, Range(at_least=0)]
    # Only on request: TensorFlow saves the state of a Python generator without an error, but
    # restores it to another position.
    checkpoint_input_pipeline: bool
    # T5X makes one per host; with a bound number, batches are the same on any number of hosts.
    num_shards: Annotated[int, Range(at_least=1)] = 1


@dataclasses.dataclass(frozen=True)
class SeqioDataConfig:
    """The examples that a run reads from a SeqIO task or mixture, and their batches.

    Attributes:
      sequence_length: Tokens per feature; None stands for the longest example's.
      batch_size: Examples over all devices; rows, when they are packed.
      seed: Seed for the order of the examples; None picks another at each start.
      use_custom_packing_ops: Pack with SeqIO's compiled operation; refused, since it is not built.
      use_memory_cache: Whether an evaluation keeps its examples in memory.
      trim_output_features: Whether to truncate features that are too long.
      num_shards: As in `TrainDataConfig`; 1 unless the run trains on the examples.
    """

    mixture_or_task_name: str
    sequence_length: Annotated[Mapping[str, int] | None, Range(at_least=1, at_most=MOST_32)]
    split: str
    batch_size: Annotated[int, Range(at_least=1, at_most=MOST_32)]
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
      keep_without_metric: Whether to keep checkpoints of steps without the metric.
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
      keep: How many of the latest to keep (of the best, with `best`); None keeps all.
      dtype: Dtype of the parameters in a checkpoint; None keeps float32. Slots stay float32.
      data: Whether to save the position in the data, so that a run can resume exactly there.
      keep_data: How many of the latest checkpoints keep that position; it has no effect.
      keep_period: Checkpoints of steps divisible by this are always kept.
      from_first_step: True, as in T5X: periods count from the step at which the run first began,
        and that state is saved too. False, as in Mesh TensorFlow: periods count from the step at
        which training starts or resumes.
    """

    period: Annotated[int | None, Range(at_least=1)]
    steps: Annotated[tuple[int, ...], Range(at_least=0)] = ()
    keep: Annotated[int | None, Range(at_least=1)] = None
    dtype: Literal["float32", "bfloat16"] | None = None
    data: bool = False
    # T5X's default checkpoint manager ignores it too; `explain --as t5x` writes it out again.
    keep_data: Annotated[int | None, Range(at_least=1)] = None
    best: BestCheckpoints | None = None
    keep_period: Annotated[int | None, Range(at_least=1)] = None
    # With T5X's rule a resumed run saves at the same steps as an uninterrupted one.
    from_first_step: bool = True


@dataclasses.dataclass(frozen=True)
class RestoreConfig:
    """The source of a run's parameters and slots when its model_dir has no checkpoint.

    Attributes:
      path: A checkpoint in any format, or with mode "latest" a folder of checkpoints; only an
        evaluation takes several, one after the other.
      mode: "specific", "latest" or "all".
      dtype: Dtype to which parameters are rounded when read; None keeps their values.
      assignment_map: (pattern, replacement) pairs on complete names such as `target/decoder/...`; a
        replacement of None keeps the initialized value.
      strict: Whether every slot must be in the checkpoint.
      fallback_to_scratch: Whether to initialize parameters that the checkpoint lacks.
      variable_filter: Mesh TensorFlow's rule, in place of T5X's four above: a regular expression on
        Mesh TensorFlow's names that selects variables; "" takes all. None in a T5X run.
      adapter: A checkpoint of an adapter, or a folder of PEFT's, whose base is the checkpoint. An
        evaluation reads the two merged; the training of an adapter starts from its parameters.
    """

    path: str | tuple[str, ...]
    mode: Literal["specific", "latest", "all"]
    dtype: Literal["float32", "bfloat16", "float16"] | None
    assignment_map: tuple[tuple[str, str | None], ...]
    strict: bool
    fallback_to_scratch: bool
    variable_filter: str | None = None
    adapter: str | None = None


@dataclasses.dataclass(frozen=True)
class LoggerConfig:
    """One of an evaluation's SeqIO loggers.

    Attributes:
      write_n_results: For "json": how many predictions to write; None writes all.
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
      patience: Number of evaluations without an improvement after which training stops.
      atol, rtol: The least improvement, absolute and relative to the reference.
      reference: The value to compare with: "best" is the best so far; "previous" is T5X's rule
        (t0repro.training.stopping).
    """

    task: str
    metric: str
    mode: Literal["min", "max"]
    patience: Annotated[int, Range(at_least=0)]
    atol: Annotated[float, Range(at_least=0)]
    rtol: Annotated[float, Range(at_least=0)]
    # T5X's rule is the default because a gin file must mean what it means there, although it may
    # never stop on a plateau with one lucky dip.
    reference: Literal["best", "previous"] = "previous"


@dataclasses.dataclass(frozen=True)
class TerminateOnNanConfig:
    """Stops when a task's metric is NaN or Inf."""

    task: str
    metric: str


@dataclasses.dataclass(frozen=True)
class UserClass:
    """A user's class that takes part in a training run.

    Attributes:
      module: The module that it is imported from.
      name: Its name there.
      arguments: The class's own arguments, as JSON, without those of its base class.
    """

    module: str
    name: str
    arguments: Mapping[str, Any]

    def made(self, supplied: Mapping[str, Any], where: str | None = None) -> Any:
        """Imports and instantiates the class.

        Args:
          supplied: Arguments from the run; the class gets those that it takes.
          where: Where the class was bound, for messages.

        Raises:
          UserError: If the class cannot be imported or called.
        """
        try:
            # Only when the run begins: a dry run must not build networks, and while gin is parsed
            # the arguments are records.
            cls = operator.attrgetter(self.name)(importlib.import_module(self.module))
            parameters = inspect.signature(cls).parameters
            takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            taken = {k: v for k, v in supplied.items() if takes_all or k in parameters}
            return cls(**taken, **self.arguments)
        except (ImportError, AttributeError, TypeError) as error:
            raise UserError(
                f"{self.module}.{self.name} cannot be made: {error}",
                where=where,
                fix="Give it the arguments of the class that it derives from, and pass them on.",
            ) from error


ActionConfig = EarlyStoppingConfig | TerminateOnNanConfig | UserClass
# The parts of a run that a user's class can replace.
Replaced = Literal["model", "trainer", "partitioner", "weight_metrics_computer"]
ActionMode = Literal["TRAIN", "TRAIN_EVAL", "INFER_EVAL"]


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How a training run reads, saves, evaluates and ends; the defaults are T5X's.

    Attributes:
      train_data: The data to train on; None if a caller passes batches, or nothing is trained.
      train_eval_data: Data of evaluations with the training run's metrics; None for none.
      infer_eval_data: Data of evaluations with the tasks' own metrics; None for none.
      evaluator: How many examples those take, and where results go.
      random_seed: Seed for initialization and dropout; None picks one at each start.
      relative_steps: Steps from wherever the run starts; overrides `RunConfig.train_steps`.
      eval_steps: Batches per task in an evaluation with the training run's metrics.
      eval_period: Steps between evaluations, counted from the step at which the run first began.
      stats_period: Steps between summaries; None stands for the shortest of the other periods.
      run_eval_before_training: Whether to evaluate before the first step too.
      save: None writes no checkpoint.
      restore: Where the run starts if model_dir has no checkpoint; None: initialized parameters.
      actions: Actions on metrics, by the metrics' origin.
      gc_period: Steps between Python's garbage collections; 0 leaves them to Python.
      user_classes: The user's classes, by the part they replace.
      decoding: How evaluations with the tasks' own metrics generate; None without them.
      log: The training lines of metrics.jsonl: a summary every `stats_period` steps, or a line for
        every step.
      keys: How the seed gives the PRNG keys of parameters and dropout: T5X splits one key;
        otherwise dropout's key is the parameters' with 1 folded in.
      may_start_past_end: Whether a run whose checkpoint is past `train_steps` simply has nothing to
        do; otherwise that is an error.
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

    @property
    def stops_on_nan(self) -> bool:
        """Whether an action watches for values that are NaN or Inf."""
        actions = [action for items in self.actions.values() for action in items]
        return any(isinstance(action, TerminateOnNanConfig) for action in actions)

    def shortest_period(self, steps: int) -> int:
        """The shortest period in force over so many steps; by default, summaries follow it."""
        # An evaluation period is in force only if something is evaluated.
        evaluated = self.train_eval_data or self.infer_eval_data
        periods = (
            self.eval_period if evaluated else 0,
            self.save.period if self.save else 0,
            self.gc_period,
        )
        # Without any period there is one summary, at the end.
        return min((period for period in periods if period), default=max(1, steps))


def mesh_transformer_plan(
    train_data: TrainDataConfig | None = None,
    *,
    save_checkpoints_steps: Annotated[int, Range(at_least=1)] = 5000,
    # With -1, TensorFlow's Saver deletes each checkpoint right after saving it.
    keep_checkpoint_max: Annotated[int | None, Range(at_least=0)] = None,
    init_checkpoint: str | None = None,
    init_variable_filter: str = "",
    init_adapter: str | None = None,
    places: Mapping[str, str | None] | None = None,
) -> TrainingPlan:
    """The intervals of mesh_transformer_main: a line per step, checkpoints, no evaluations.

    Args:
      train_data: The data to train on.
      save_checkpoints_steps: Steps between checkpoints.
      keep_checkpoint_max: How many of the latest to keep; None or 0 keeps all.
      init_checkpoint: A checkpoint in any format to start from, slots and step included.
      init_variable_filter: See `RestoreConfig.variable_filter`.
      init_adapter: See `RestoreConfig.adapter`.
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
    # Checked under the names that users write; a plan's own names are T5X's.
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
            adapter=init_adapter,
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
            # 0 keeps all, as in TensorFlow's Saver, which Mesh TensorFlow writes with.
            keep=keep_checkpoint_max or None,
            data=True,
            # TensorFlow's own timer of checkpoints remembers nothing of earlier processes.
            from_first_step=False,
        ),
        restore=start,
        actions={},
        gc_period=0,
        log="steps",
        keys="folded",
        # An Estimator whose checkpoint is past max_steps trains nothing and raises nothing.
        may_start_past_end=True,
    )
