"""The examples of a run, and the evaluator of tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from t0repro.config.settings import MOST_32, RULE, Mtf, Only, Range, T5x, arguments


@arguments(mtf="mesh_train_dataset_fn")
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

    mixture_or_task_name: Annotated[str, Mtf(macro="MIXTURE_NAME")]
    split: Annotated[str, Mtf("utils.run.dataset_split")]
    use_cached: bool
    pack: bool
    shuffle: bool
    seed: Annotated[int | None, Range(at_least=0)]
    # Unbound is None, not Mesh TensorFlow's False, with which a resumed run reads its data again.
    skip_seen_data: Annotated[bool | None, Mtf("utils.run.skip_seen_data")] = None
    seen_data_init_step: Annotated[int, Range(at_least=0), Mtf("utils.run.seen_data_init_step")] = 0
    # Only on request: TensorFlow saves the state of a Python generator without an error, but
    # restores it to another position.
    checkpoint_input_pipeline: Annotated[bool, Mtf("utils.run.checkpoint_input_pipeline")] = False
    # T5X makes one per host; with a bound number, batches are the same on any number of hosts.
    num_shards: Annotated[int, Range(at_least=1), Mtf("t0repro.jax_training.data_shards")] = 1


Converter = Literal["encoder_decoder", "decoder", "pass_through"]


@arguments(t5x="utils.DatasetConfig")
@dataclasses.dataclass(frozen=True)
class SeqioDataConfig:
    """The examples that a run reads from a SeqIO task or mixture, and their batches.

    Attributes:
      sequence_length: Tokens per feature; None stands for the longest example's.
      batch_size: Examples over all devices; rows, when they are packed.
      seed: Seed for the order of the examples; None picks another at each start.
      use_memory_cache: Whether an evaluation keeps its examples in memory.
      trim_output_features: Whether to truncate features that are too long.
      num_shards: As in `TrainDataConfig`; 1 unless the run trains on the examples.
      converter: Which of SeqIO's converters makes a model's features of examples:
        EncDecFeatureConverter, DecoderFeatureConverter, which joins inputs and targets to one
        sequence, or PassThroughFeatureConverter, with which tasks give the model's features.
    """

    mixture_or_task_name: Annotated[str, T5x(hint=Any, macro="MIXTURE_OR_TASK_NAME")]
    sequence_length: Annotated[
        Mapping[str, int] | None,
        Range(at_least=1, at_most=MOST_32),
        T5x("task_feature_lengths", macro="TASK_FEATURE_LENGTHS"),
    ]
    split: str
    batch_size: Annotated[int, Range(at_least=1, at_most=MOST_32), T5x(macro="BATCH_SIZE")]
    shuffle: Annotated[bool, T5x(macro="SHUFFLE_TRAIN_EXAMPLES")]
    seed: Annotated[int | None, Range(at_least=0)]
    use_cached: Annotated[bool, T5x(macro="USE_CACHED_TASKS")] = False
    pack: bool = False
    use_memory_cache: bool = True
    trim_output_features: bool = True
    num_shards: Annotated[int, Range(at_least=1)] = 1
    # The model chooses it; no argument of the dataset does.
    converter: Annotated[Converter, Only(t5x="encoder_decoder")] = "encoder_decoder"


@arguments(mtf="mesh_eval_dataset_fn")
@dataclasses.dataclass(frozen=True)
class EvalDataConfig:
    """The arguments of t5.models.mesh_transformer.mesh_eval_dataset_fn."""

    mixture_or_task_name: str
    split: Annotated[str, Mtf("utils.run.dataset_split")]
    use_cached: bool
    pack: bool
    num_eval_examples: Annotated[int, Range(at_least=1, also=(-1,))]
    shuffle_eval_examples: bool
    seed: Annotated[int | None, Range(at_least=0)]

    @property
    def limit(self) -> int | None:
        """How many examples of a task to take; None for all."""
        number = self.num_eval_examples
        # In t5, -1 takes all; so does None, which no gin file may bind.
        return None if number is None or number < 0 else number


@arguments(t5x="create_task_from_tfexample_file")
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

    name: Annotated[str, Only(t5x=RULE)]
    kind: Annotated[Literal["tfrecord", "jsonl"], T5x("file_type")]
    paths: Annotated[tuple[str, ...], T5x(hint=str | Sequence[str])]
    inputs_key: str
    targets_key: str | None
    features: Annotated[Mapping[str, tuple[Any, bool]], T5x(hint=Mapping[str, Any])]


@dataclasses.dataclass(frozen=True)
class LoggerConfig:
    """One of an evaluation's SeqIO loggers.

    Attributes:
      write_n_results: For "json": how many predictions to write; None writes all.
    """

    name: Literal["py", "tensorboard", "json"]
    output_dir: str | None
    write_n_results: Annotated[int | None, Range(at_least=0)] = None


@arguments(t5x="seqio.Evaluator")
@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
    """SeqIO's Evaluator: how many examples of each task it takes, and where results go."""

    loggers: Annotated[tuple[LoggerConfig, ...], T5x("logger_cls", hint=Sequence[Any])] = ()
    num_examples: Annotated[int | None, Range(at_least=1)] = None
    use_memory_cache: bool = True


@arguments(t5x="seqio.SentencePieceVocabulary")
@dataclasses.dataclass(frozen=True)
class SentencePieceVocabulary:
    """A SentencePiece model's file; its extra ids are at the end of the vocabulary."""

    sentencepiece_model_file: str
    extra_ids: Annotated[int | None, Range(at_least=0)] = None


@arguments(t5x="seqio.ByteVocabulary")
@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """UTF-8 bytes as tokens, 3 to 258."""

    extra_ids: Annotated[int, Range(at_least=0)] = 0


@arguments(t5x="seqio.PassThroughVocabulary")
@dataclasses.dataclass(frozen=True)
class PassThroughVocabulary:
    """Tokens as they are in the data."""

    size: Annotated[int, Range(at_least=0)]
    eos_id: Annotated[int | None, Range(at_least=0)] = None


VOCABULARIES = (SentencePieceVocabulary, ByteVocabulary, PassThroughVocabulary)
PIECES_OR_BYTES = (SentencePieceVocabulary, ByteVocabulary)
"""The vocabularies that are read without SeqIO."""
