"""The plan of T5X's eval and infer modes: model, examples, checkpoints and decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from t0repro.config.decoding import DecodingPlan
from t0repro.config.ranges import Range
from t0repro.config.run_config import DTypePolicy, Layout, ModelConfig
from t0repro.config.training_plan import EvaluatorConfig, RestoreConfig, SeqioDataConfig, UserClass

InferMode = Literal["predict", "score", "predict_with_aux"]


@dataclasses.dataclass(frozen=True)
class InferencePlan:
    """The part of the plan that eval and infer share.

    Attributes:
      model: The model's shape and arithmetic.
      dtypes: The dtypes of the computation.
      data: The examples; never packed.
      restore: Which checkpoints, of any format.
      decoding: The decoding options.
      input_vocabulary: The gin record of the model's vocabulary for inputs.
      output_vocabulary: The same for targets.
      output_dir: The folder of the results.
      layout: How the run is sharded across devices.
      user_model: A user's class that generates and scores in place of T5X's model.
    """

    model: ModelConfig
    dtypes: DTypePolicy
    data: SeqioDataConfig
    restore: RestoreConfig
    decoding: DecodingPlan
    input_vocabulary: Any
    output_vocabulary: Any
    output_dir: str
    layout: Layout
    user_model: UserClass | None = dataclasses.field(default=None, kw_only=True)

    def decisive(self) -> dict[str, Any]:
        """The settings that determine a checkpoint's results, in JSON's types and tuples."""
        named = ("model", "dtypes", "data", "decoding")
        return {
            **{name: dataclasses.asdict(getattr(self, name)) for name in named},
            **({"user_model": dataclasses.asdict(self.user_model)} if self.user_model else {}),
            "restore": [self.restore.assignment_map, self.restore.dtype],
        }


@dataclasses.dataclass(frozen=True)
class EvalPlan(InferencePlan):
    """An evaluation with the metrics of SeqIO's tasks.

    Attributes:
      evaluator: How many examples of each task to evaluate, and where results go.
    """

    evaluator: EvaluatorConfig


@dataclasses.dataclass(frozen=True)
class ExampleFiles:
    """Examples in files, and the task that reads them.

    Attributes:
      name: The task's name.
      kind: "tfrecord" for TFRecord files of tf.train.Example, "jsonl" for rows.
      paths: The files, or patterns of files.
      inputs_key, targets_key: The features that hold the texts; None for no targets.
      features: Feature -> the gin record of its vocabulary, and whether EOS ends it.
    """

    name: str
    kind: Literal["tfrecord", "jsonl"]
    paths: tuple[str, ...]
    inputs_key: str
    targets_key: str | None
    features: Mapping[str, tuple[Any, bool]]


@dataclasses.dataclass(frozen=True)
class InferPlan(InferencePlan):
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
    shard_id: Annotated[int, Range(at_least=0)]
    num_shards: Annotated[int, Range(at_least=1)]
    merge: bool
    files: ExampleFiles | None = None
    all_inputs: bool = False
    input_fields: tuple[str, ...] | None = None
    output_ids: bool = False
