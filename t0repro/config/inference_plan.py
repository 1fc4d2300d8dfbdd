"""What a run of T5X's eval or infer has: a model, examples, checkpoints, and how it decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from t0repro.config.decoding import DecodingPlan
from t0repro.config.ranges import Range
from t0repro.config.run_config import DTypePolicy, Layout, ModelConfig
from t0repro.config.training_plan import (
    EvaluatorConfig,
    RestoreConfig,
    SeqioDataConfig,
    UserClass,
)

InferMode = Literal["predict", "score", "predict_with_aux"]


@dataclasses.dataclass(frozen=True)
class InferencePlan:
    """What eval and infer have in common.

    Attributes:
      model: The model's shape and arithmetic.
      dtypes: The types that it computes with.
      data: The examples; never packed.
      restore: Which checkpoints, of any format.
      decoding: How outputs are generated.
      input_vocabulary: The gin record of the model's vocabulary for inputs.
      output_vocabulary: The same for targets.
      output_dir: The folder of the results.
      layout: How the run is sharded across devices.
      user_model: A class of the user's that generates and scores in place of T5X's model.
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
        """The settings that decide the results of one checkpoint, as JSON's types and tuples."""
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
      evaluator: How many examples of each task are evaluated, and where results go.
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
      mode: What is computed.
      checkpoint_period: Batches in a chunk; an interrupted run can resume after each chunk.
      shard_id, num_shards: Which part of the examples this run takes, and out of how many.
      merge: Whether the chunks become one file at the end.
      files: Where the examples are read from instead of a registered task.
      all_inputs: Whether all features of an example are written, not only its texts.
      input_fields: The features to write instead, if they are named.
      output_ids: Whether an output's token ids are written too.
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
