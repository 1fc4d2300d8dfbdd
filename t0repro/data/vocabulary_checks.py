"""Checks of a T5X model's vocabularies, and whether a task's are the same."""

from __future__ import annotations

import os
from typing import Any

from t0repro import compat
from t0repro.config.data import ByteVocabulary, PassThroughVocabulary, SentencePieceVocabulary
from t0repro.config.run import TrainRun
from t0repro.converters import own_tokenizer
from t0repro.converters.tensors import CheckpointRef
from t0repro.data.checks import check_mixture
from t0repro.errors import UserError
from t0repro.tasks import vocabulary as tasks_vocabulary
from t0repro.tasks.availability import find_registered
from t0repro.tasks.registry import find_tasks
from t0repro.tasks.vocabulary import (
    BYTES,
    VOCABULARY_VARIABLE,
    VocabularyFile,
    address_of,
    are_same,
    check_ids,
    default_vocabulary,
    local_copy_of,
    names_of,
    shown,
)


def _describe_vocabulary(record: Any) -> VocabularyFile | None:
    """The vocabulary that a record of pieces or bytes describes; None for another kind.

    One that T5's authors released is read from T0REPRO_VOCAB, if that names a copy of it.
    """
    if isinstance(record, ByteVocabulary):
        return VocabularyFile(BYTES, record.extra_ids)
    if not isinstance(record, SentencePieceVocabulary):
        return None
    return local_copy_of(VocabularyFile(record.sentencepiece_model_file, record.extra_ids or 0))


def seqio_vocabulary(record: Any) -> Any:
    """The SeqIO vocabulary that a record describes; its file is read at first use.

    If T0REPRO_VOCAB is set, T5's own vocabulary comes from there.
    """
    compat.install()
    import seqio

    from t0repro.tasks import seqio_tasks

    if (described := _describe_vocabulary(record)) is not None:
        return seqio_tasks.seqio_vocabulary(described)
    if isinstance(record, PassThroughVocabulary):
        return seqio.PassThroughVocabulary(record.size, eos_id=record.eos_id)
    if isinstance(record, seqio.Vocabulary):
        return record  # a user's own object, bound in a gin file
    raise UserError(
        f"{record!r} is not a vocabulary.",
        fix="Bind @seqio.SentencePieceVocabulary(), @seqio.ByteVocabulary() or"
        " @seqio.PassThroughVocabulary().",
    )


def check_vocabularies(name: str, inputs: Any, outputs: Any, *, decoder_only: bool = False) -> None:
    """Checks that a task or mixture uses its model's vocabularies.

    Args:
      name: The task or mixture.
      inputs: The record of the model's vocabulary for inputs.
      outputs: The record of its vocabulary for targets.
      decoder_only: Whether the model is T5X's DecoderOnlyModel.

    Raises:
      UserError: If one differs, or there is no such task.
    """
    check_mixture(name)
    features = find_tasks(name)[0].output_features
    for feature, record in (("inputs", inputs), ("targets", outputs)):
        if feature not in features:
            continue
        task_vocabulary = features[feature].vocabulary
        model_vocabulary = _describe_vocabulary(record) or seqio_vocabulary(record)
        check_ids(task_vocabulary)
        if not are_same(task_vocabulary, model_vocabulary):
            raise UserError(
                f"The {feature} of {name!r} are encoded with another vocabulary than the model's:"
                f" {shown(task_vocabulary)} instead of {shown(model_vocabulary)}.",
                where=f"models.{'DecoderOnlyModel' if decoder_only else 'EncoderDecoderModel'}",
                fix=f"Give the model the task's{_bindings(task_vocabulary)}, or choose a task with"
                f" the model's{_variable(task_vocabulary, model_vocabulary)}.",
            )


def check_own_tokenizer(ref: CheckpointRef, *records: Any) -> None:
    """Checks that a model's vocabularies are that of the tokenizer beside its checkpoint.

    Args:
      ref: The checkpoint; for an adapter's, only its own files count.
      *records: Records of the model's vocabularies.

    Raises:
      UserError: See `t0repro.converters.own_tokenizer`.
    """
    vocabularies = [_describe_vocabulary(each) or seqio_vocabulary(each) for each in records]
    own_tokenizer.check_own_tokenizer([ref.folder], *vocabularies)


def check_rows(vocab_size: int, *vocabularies: Any, decoder_only: bool = False) -> None:
    """Checks that a model's embedding has a row for each token of its vocabularies.

    A smaller vocabulary is usual: T5 pads its embedding to a multiple of 128 rows.

    Args:
      vocab_size: The embedding's number of rows.
      *vocabularies: Records of the model's vocabularies.
      decoder_only: Whether the model is T5X's DecoderOnlyModel.

    Raises:
      UserError: If a vocabulary is larger.
    """
    for record in vocabularies:
        tasks_vocabulary.check_rows(
            _describe_vocabulary(record) or seqio_vocabulary(record),
            vocab_size,
            where=f"network.{'TransformerConfig' if decoder_only else 'T5Config'}.vocab_size",
            fix="Make it a multiple of 128 that is not smaller.",
        )


def _variable(task_vocabulary: Any, model_vocabulary: Any) -> str:
    """How tasks with the default vocabulary get the model's; "" for others."""
    default, address = default_vocabulary(), address_of(model_vocabulary)
    if address in (None, default.address) or not are_same(task_vocabulary, default):
        return ""
    return f": {VOCABULARY_VARIABLE}={address}"


def _bindings(vocabulary: Any) -> str:
    """Bindings that give T5X's own model files a vocabulary; "" for one of another kind."""
    path = address_of(vocabulary)
    if not path or path == BYTES:
        return ""
    prefix = "seqio.SentencePieceVocabulary"
    return (
        f": {prefix}.sentencepiece_model_file = '{path}'"
        f" and {prefix}.extra_ids = {vocabulary.extra_ids}"
    )


def vocabulary_of(config: TrainRun) -> tuple[str | None, int | None] | None:
    """The file, and the number of sentinels, of the vocabulary that a run's tasks have."""
    data = config.plan.train_data
    for task in find_registered(data and data.mixture_or_task_name):
        # A decoder-only model's tasks may have no inputs.
        feature = task.output_features.get("inputs") or task.output_features.get("targets")
        if feature is not None:
            path, extra_ids = names_of(feature.vocabulary)
            return os.path.abspath(path) if path and os.path.isfile(path) else path, extra_ids
    return None
