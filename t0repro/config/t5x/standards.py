"""T5X's functions and classes that are the default of an argument: here there is nothing else.

A gin file that names one changes nothing. Any other function or class in its place is refused.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from t0repro.config.t5x.record import Record


class Standard(Record):
    """A function or a class of T5X's that is the default of an argument.

    Attributes:
      default_of: the arguments whose default it is.
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
