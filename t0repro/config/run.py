"""The runs: a typed, frozen description for each mode, made of the parts in the modules beside it.

They are the waist of the project. The dialects in this folder turn gin files and overrides into
them; everything after that (model, optimizer, train step, scorer, checkpoints) takes one and does
not depend on gin. Each field carries its gin names and its range (`settings`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from t0repro.config.checkpoints import CheckpointChoice, RestoreConfig, SaveConfig
from t0repro.config.data import (
    Converter,
    EvalDataConfig,
    EvaluatorConfig,
    ExampleFiles,
    SeqioDataConfig,
    TrainDataConfig,
)
from t0repro.config.decoding import DecodingConfig, DecodingPlan, InferConfig, ScoreStringsConfig
from t0repro.config.model import DTypePolicy, Layout, ModelConfig
from t0repro.config.optimizer import OptimizerConfig, ScheduleConfig
from t0repro.config.settings import (
    MOST_32,
    RULE,
    Mtf,
    Only,
    Range,
    T5x,
    arguments,
    fixed_values,
    shared_values,
)
from t0repro.errors import UserError

Mode = Literal[
    "train",
    "eval",
    "score_eval",
    "perplexity_eval",
    "infer",
    "score_from_dataset",
    "score_from_strings",
]


@arguments(t5x="trainer.EarlyStoppingAction")
@dataclasses.dataclass(frozen=True)
class EarlyStoppingConfig:
    """Stops when a task's metric has not improved for a while.

    Attributes:
      patience: Number of evaluations without an improvement after which training stops.
      atol, rtol: The least improvement, absolute and relative to the reference.
      reference: The value to compare with: "best" is the best so far; "previous" is T5X's rule
        (t0repro.training.stopping).
    """

    task: Annotated[str, T5x("metric", hint=tuple[str, str], read=operator.itemgetter(0))]
    metric: Annotated[str, T5x("metric", hint=tuple[str, str], read=operator.itemgetter(1))]
    mode: Literal["min", "max"]
    patience: Annotated[int, Range(at_least=0)] = 3
    # gin reads 0 as an int.
    atol: Annotated[float, Range(at_least=0), T5x(read=float)] = 0.0
    rtol: Annotated[float, Range(at_least=0), T5x(read=float)] = 0.0
    # T5X's rule is the default because a gin file must mean what it means there, although it may
    # never stop on a plateau with one lucky dip.
    reference: Literal["best", "previous"] = "previous"


@arguments(t5x="trainer.TerminateOnNanAction")
@dataclasses.dataclass(frozen=True)
class TerminateOnNanConfig:
    """Stops when a task's metric is NaN or Inf."""

    task: str
    metric: str = "loss"


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


@arguments(t5x="train")
@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How a training run reads, saves, evaluates and ends; the defaults are T5X's.

    Attributes:
      train_data: The data to train on; None if a caller passes batches, or nothing is trained.
      train_eval_data: Data of evaluations with the training run's metrics; None for none.
      infer_eval_data: Data of evaluations with the tasks' own metrics; None for none.
      evaluator: How many examples those take, and where results go.
      random_seed: Seed for initialization and dropout; None picks one at each start.
      relative_steps: Steps from wherever the run starts; overrides `TrainRun.train_steps`.
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

    train_data: Annotated[
        SeqioDataConfig | TrainDataConfig | None,
        T5x("train_dataset_cfg"),
        Mtf("utils.run.train_dataset_fn"),
    ]
    train_eval_data: Annotated[
        SeqioDataConfig | None, T5x("train_eval_dataset_cfg"), Only(mtf=None)
    ]
    infer_eval_data: Annotated[
        SeqioDataConfig | None, T5x("infer_eval_dataset_cfg"), Only(mtf=None)
    ]
    # T5X's default, which no gin file configures: an evaluator without loggers.
    evaluator: Annotated[
        EvaluatorConfig | None,
        T5x("inference_evaluator_cls", default=EvaluatorConfig()),
        Only(mtf=None),
    ]
    random_seed: Annotated[int | None, Range(at_least=0), T5x(macro="RANDOM_SEED"), Only(mtf=0)]
    relative_steps: Annotated[
        int | None,
        Range(at_least=0),
        T5x(default=None, macro="TRAIN_STEPS_RELATIVE"),
        Only(mtf=None),
    ]
    eval_steps: Annotated[int, Range(at_least=1), Only(mtf=1)]
    eval_period: Annotated[int, Range(at_least=0), Only(mtf=0)]
    stats_period: Annotated[int | None, Range(at_least=1), T5x(default=None), Only(mtf=None)]
    run_eval_before_training: Annotated[bool, T5x(default=False), Only(mtf=False)]
    save: Annotated[SaveConfig | None, T5x("utils.CheckpointConfig.save", default=None)]
    restore: Annotated[RestoreConfig | None, T5x("utils.CheckpointConfig.restore", default=None)]
    actions: Annotated[
        Mapping[ActionMode, tuple[ActionConfig, ...]],
        T5x(hint=Mapping[str, Sequence[Any]] | None, default=None),
        Only(mtf={}),
    ]
    gc_period: Annotated[int, Range(at_least=0), T5x(default=0), Only(mtf=0)]
    user_classes: Annotated[Mapping[Replaced, UserClass], Only(mtf={}, t5x=RULE)] = (
        dataclasses.field(default_factory=dict)
    )
    decoding: Annotated[DecodingPlan | None, Only(mtf=None, t5x=RULE)] = None
    log: Annotated[Literal["summaries", "steps"], Only(mtf="steps", t5x="summaries")] = "summaries"
    keys: Annotated[Literal["split", "folded"], Only(mtf="folded", t5x="split")] = "split"
    # An Estimator whose checkpoint is past max_steps trains nothing and raises nothing.
    may_start_past_end: Annotated[bool, Only(mtf=True, t5x=False)] = False

    @property
    def stops_on_nan(self) -> bool:
        """Whether an action watches for values that are NaN or Inf."""
        actions = [action for items in self.actions.values() for action in items]
        return any(isinstance(action, TerminateOnNanConfig) for action in actions)

    @property
    def evaluation_period(self) -> int:
        """Steps between evaluations; 0 if there are none."""
        return self.eval_period if self.train_eval_data or self.infer_eval_data else 0

    @property
    def converter(self) -> Converter:
        """How examples become batches; Mesh TensorFlow's data have an input and targets."""
        data = self.train_data
        return data.converter if isinstance(data, SeqioDataConfig) else "encoder_decoder"

    def shortest_period(self, steps: int) -> int:
        """The shortest period in force over so many steps; by default, summaries follow it."""
        periods = (self.evaluation_period, self.save.period if self.save else 0, self.gc_period)
        # Without any period there is one summary, at the end.
        return min((period for period in periods if period), default=max(1, steps))


def mesh_transformer_plan(
    train_data: TrainDataConfig | None = None,
    *,
    save_checkpoints_steps: int = 5000,
    keep_checkpoint_max: int | None = None,
) -> TrainingPlan:
    """The intervals of mesh_transformer_main: a line per step, checkpoints, no evaluations.

    Args:
      train_data: The data to train on.
      save_checkpoints_steps: Steps between checkpoints.
      keep_checkpoint_max: How many of the latest to keep; None or 0 keeps all.
    """
    save = SaveConfig(
        save_checkpoints_steps, keep=keep_checkpoint_max or None, **fixed_values(SaveConfig, "mtf")
    )
    fixed = fixed_values(TrainingPlan, "mtf")
    return TrainingPlan(train_data=train_data, save=save, restore=None, **fixed)


InferMode = Literal["predict", "score", "predict_with_aux"]


@dataclasses.dataclass(frozen=True)
class InferenceRun:
    """What T5X's eval and infer share.

    Attributes:
      model: The model's shape and arithmetic.
      dtypes: The dtypes of the computation.
      data: The examples; never packed.
      restore: Which checkpoints, of any format.
      decoding: The decoding options.
      input_vocabulary: The model's vocabulary for inputs, as gin describes it.
      output_vocabulary: The same for targets.
      output_dir: The folder of the results.
      layout: How the run is sharded across devices.
      user_model: A user's class that generates and scores in place of T5X's model.
      provenance: Dotted field -> where its value was set.
    """

    model: Annotated[ModelConfig, Only(t5x=RULE)]
    dtypes: Annotated[DTypePolicy, Only(t5x=RULE)]
    data: Annotated[SeqioDataConfig, T5x("dataset_cfg")]
    restore: Annotated[RestoreConfig, T5x("restore_checkpoint_cfg")]
    decoding: Annotated[DecodingPlan, Only(t5x=RULE)]
    input_vocabulary: Annotated[Any, T5x("models.EncoderDecoderModel.input_vocabulary")]
    output_vocabulary: Annotated[Any, T5x("models.EncoderDecoderModel.output_vocabulary")]
    output_dir: str
    layout: Annotated[Layout, T5x("partitioning.PjitPartitioner.num_partitions")]
    user_model: Annotated[UserClass | None, Only(t5x=RULE)] = dataclasses.field(
        default=None, kw_only=True
    )
    provenance: Annotated[Mapping[str, str], Only(t5x=RULE)] = dataclasses.field(
        default_factory=dict, compare=False, kw_only=True
    )

    def decisive(self) -> dict[str, Any]:
        """The settings that determine a checkpoint's results, in JSON's types and tuples."""
        named = ("model", "dtypes", "data", "decoding")
        return {
            **{name: dataclasses.asdict(getattr(self, name)) for name in named},
            **({"user_model": dataclasses.asdict(self.user_model)} if self.user_model else {}),
            "restore": [self.restore.assignment_map, self.restore.dtype],
        }


@arguments(t5x="evaluate")
@dataclasses.dataclass(frozen=True)
class EvalRun(InferenceRun):
    """An evaluation with the metrics of SeqIO's tasks.

    Attributes:
      evaluator: How many examples of each task to evaluate, and where results go.
    """

    evaluator: Annotated[EvaluatorConfig, T5x("inference_evaluator_cls", default=EvaluatorConfig())]


@arguments(t5x="infer")
@dataclasses.dataclass(frozen=True)
class InferRun(InferenceRun):
    """Predictions or scores of examples, as JSON lines.

    Attributes:
      mode: What to compute.
      checkpoint_period: Batches in a chunk; an interrupted run can resume after each chunk.
      shard_id, num_shards: The shard of the examples that this run takes, and the number of shards.
      merge: Whether to merge the chunks into one file at the end.
      files: Files to read the examples from, instead of a registered task.
      all_inputs: Whether to write all features of an example, not only its texts.
      input_fields: The features to write instead, if named.
      output_ids: Whether to write an output's token ids too.
    """

    mode: InferMode
    checkpoint_period: Annotated[int, Range(at_least=1)]
    shard_id: Annotated[int, Range(at_least=0), T5x(default=0)]
    num_shards: Annotated[int, Range(at_least=1), T5x(default=1)]
    merge: Annotated[bool, T5x("merge_chunked_results", default=True)]
    files: Annotated[ExampleFiles | None, Only(t5x=RULE)] = None
    all_inputs: Annotated[bool, T5x("write_inferences_to_file.include_all_inputs")] = False
    input_fields: Annotated[
        tuple[str, ...] | None,
        T5x("write_inferences_to_file.input_fields_to_include", hint=Sequence[str] | None),
    ] = None
    output_ids: Annotated[bool, T5x("write_inferences_to_file.output_ids")] = False


@arguments(mtf="utils.run")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What every run has, with the place that set each value.

    Attributes:
      sequence_length: Tokens per feature, or None for the longest example's (evaluation only).
      batch_size: Sequences in a global batch.
      vocabulary: Path or address of the SentencePiece model; None if no data is bound.
      vocabulary_extra_ids: Sentinels that are added to the SentencePiece model's tokens.
      layout: How the run is sharded across devices.
      provenance: Dotted field -> where its value was set ("t5.1.1.base.gin:9", "--gin_param ...",
        "default").
    """

    mode: Mode
    model_dir: Annotated[str, T5x("train.model_dir", macro="MODEL_DIR"), Only(mtf=RULE)]
    model: Annotated[ModelConfig, Only(mtf=RULE)]
    dtypes: Annotated[DTypePolicy, Only(mtf=RULE)]
    # Those of the training data, the first of the run's.
    sequence_length: Annotated[
        Mapping[str, int] | None,
        Range(at_least=1, at_most=MOST_32),
        T5x("utils.DatasetConfig.task_feature_lengths"),
    ]
    batch_size: Annotated[
        int, Range(at_least=1, at_most=MOST_32), T5x("utils.DatasetConfig.batch_size")
    ]
    vocabulary: Annotated[
        str | None, T5x("seqio.SentencePieceVocabulary.sentencepiece_model_file")
    ] = None
    vocabulary_extra_ids: Annotated[
        int,
        Range(at_least=0),
        T5x("seqio.SentencePieceVocabulary.extra_ids", hint=int | None, default=None),
        Only(mtf=RULE),
    ] = 0
    layout: Annotated[
        Layout, T5x("partitioning.PjitPartitioner.num_partitions"), Mtf("mesh_shape")
    ] = Layout()
    # Not compared: where a value was set does not change the run.
    provenance: Annotated[Mapping[str, str], Only(mtf=RULE)] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def to_json(self) -> str:
        """The run as indented JSON; `from_json` reads it back equal."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str, where: str | None = None) -> Self:
        """Reads what `to_json` wrote.

        Args:
          text: The JSON.
          where: Where the text comes from, for messages.

        Raises:
          UserError: naming the field that is missing (unless it has a default), unknown or of
            another type.
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
                fix=f"Give what {cls.__name__}.to_json wrote, with this version of t0repro.",
            ) from error


def to_seqio_config(data: TrainDataConfig, config: Run) -> SeqioDataConfig:
    """Mesh TensorFlow's training data as T5X's configuration describes it."""
    of_run = shared_values(config, SeqioDataConfig)
    return SeqioDataConfig(**of_run, **shared_values(data, SeqioDataConfig))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRun(Run):
    """A training run, of either dialect.

    Attributes:
      num_microbatches: Equal parts of a batch whose gradients are added before one update.
      train_steps: The global step at which training ends, not the number of steps to take.
      plan: Which data to train on, and what to save and evaluate, and when.
      weight_metrics_every: Training steps between measurements of every parameter, gradient and
        update; 0 measures none.
    """

    optimizer: Annotated[
        OptimizerConfig | None, T5x("models.EncoderDecoderModel.optimizer_def", hint=Any)
    ]
    schedule: Annotated[
        ScheduleConfig | None,
        T5x("trainer.Trainer.learning_rate_fn", default=None),
        Mtf("learning_rate_schedule"),
    ]
    # T5X takes None and 0 to mean no microbatches.
    num_microbatches: Annotated[
        int,
        Range(at_least=1, at_most=MOST_32),
        T5x(
            "trainer.Trainer.num_microbatches",
            hint=int | None,
            default=None,
            read=lambda value: value or 1,
        ),
        Mtf("utils.serialize_num_microbatches.tokens_per_microbatch_per_replica"),
    ]
    train_steps: Annotated[
        int,
        Range(at_least=0, at_most=MOST_32),
        T5x("train.total_steps", macro="TRAIN_STEPS"),
    ]
    plan: Annotated[TrainingPlan, Only(mtf=RULE)]
    weight_metrics_every: Annotated[
        int,
        Range(at_least=0),
        T5x("trainer.WeightMetricsComputer.every", default=1),
        Mtf("t0repro.jax_training.weight_metrics_every"),
    ] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRun(Run):
    """What the modes of Mesh TensorFlow share that read checkpoints of a model_dir.

    Attributes:
      eval_checkpoint_step: A step, a list of steps, "all", -1 for the latest, or None to wait for
        each new one.
      checkpoint_choice: The other settings that decide which checkpoints are read.
      decoding: How outputs are generated.
      scores_filename: Prefix of the files that save_scores writes, or None.
      save_example_text: Whether save_scores writes targets and their lengths as well as scores.
    """

    eval_checkpoint_step: Annotated[
        int | tuple[int, ...] | Literal["all"] | None, Range(at_least=0, also=(-1,))
    ]
    checkpoint_choice: Annotated[CheckpointChoice, Only(mtf=RULE)]
    decoding: Annotated[DecodingConfig, Only(mtf=RULE)]
    scores_filename: Annotated[str | None, Mtf("utils.save_scores.scores_filename")]
    save_example_text: Annotated[bool, Mtf("utils.save_scores.save_example_text")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshEvalRun(CheckpointRun):
    """Mesh TensorFlow's modes that read a dataset: eval, score_eval, perplexity_eval and
    score_from_dataset.

    Attributes:
      eval_data: The examples; of a perplexity_eval without data of its own, the training data.
      perplexity_eval_steps: Number of batches in a perplexity evaluation.
    """

    eval_data: Annotated[EvalDataConfig | TrainDataConfig | None, Mtf("eval_dataset_fn")]
    eval_summary_dir: str | None
    eval_dir_suffix: str | None
    output_eval_examples: bool
    perplexity_eval_steps: Annotated[int, Range(at_least=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRun(CheckpointRun):
    """Mesh TensorFlow's modes that read lines of text: infer and score_from_strings."""

    text: Annotated[InferConfig | ScoreStringsConfig, Only(mtf=RULE)]


RUN_OF_MODE: Mapping[str, type[Run]] = {
    "train": TrainRun,
    **dict.fromkeys(("infer", "score_from_strings"), TextRun),
    **dict.fromkeys(("eval", "score_eval", "perplexity_eval", "score_from_dataset"), MeshEvalRun),
}
