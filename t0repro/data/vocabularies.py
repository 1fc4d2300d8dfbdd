"""The vocabularies of a T5X model's gin file as SeqIO's, and whether a task's are the same."""

from __future__ import annotations

from typing import Any

from t0repro.config.t5x import records
from t0repro.errors import UserError
from t0repro.tasks.vocabulary import EXTRA_IDS, default_vocabulary

# T5's own vocabulary with its 100 sentinels, as t5's tasks and as T5X's gin files name it.
_T5 = {
    ("gs://t5-data/vocabs/cc_all.32000/sentencepiece.model", EXTRA_IDS),
    ("gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model", EXTRA_IDS),
    # The address already counts the sentinels, so extra_ids is 0.
    ("gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model", 0),
}


def seqio_vocabulary(record: Any) -> Any:
    """The SeqIO vocabulary that a record describes; its file is read when it is first used.

    T5's own is read from T0REPRO_VOCAB, if that is set.
    """
    from t0repro import compat

    compat.install()
    import seqio

    from t0repro.tasks import seqio_tasks

    if isinstance(record, records.SentencePieceVocabulary):
        address, extra_ids = record.sentencepiece_model_file, record.extra_ids or 0
        # T5's own file is in a bucket; T0REPRO_VOCAB names a local copy of it.
        if (address, extra_ids) in _T5:
            return seqio_tasks.seqio_vocabulary(default_vocabulary())
        return seqio_tasks.LazyVocabulary(address, extra_ids)
    if isinstance(record, records.ByteVocabulary):
        return seqio.ByteVocabulary(extra_ids=record.extra_ids)
    if isinstance(record, records.PassThroughVocabulary):
        return seqio.PassThroughVocabulary(record.size, eos_id=record.eos_id)
    if isinstance(record, seqio.Vocabulary):
        return record  # bound in a gin file to an object of the user's own
    raise UserError(
        f"{record!r}is not a vocabulary.",
        fix="Bind @seqio.SentencePieceVocabulary(), @seqio.ByteVocabulary() or"
        " @seqio.PassThroughVocabulary().",
    )


def check_vocabularies(name: str, inputs: Any, outputs: Any) -> None:
    """Checks that a task or mixture is encoded with its model's vocabularies.

    Args:
      name: The task or mixture.
      inputs: The record of the model's vocabulary of inputs.
      outputs: That of targets.

    Raises:
      UserError: If one differs, or there is no such task.
    """
    from t0repro.data.checks import check_mixture

    check_mixture(name)
    import seqio

    features = seqio.get_mixture_or_task(name).output_features
    for feature, record in (("inputs", inputs), ("targets", outputs)):
        if feature not in features:
            continue
        theirs, ours = features[feature].vocabulary, seqio_vocabulary(record)
        if not _are_same(theirs, ours):
            raise UserError(
                f"The {feature} of {name!r} are encoded with another vocabulary than the model's:"
                f" {_shown(theirs)} instead of {_shown(ours)}.",
                where="models.EncoderDecoderModel",
                fix=f"Give the model the task's{_bindings(theirs)}, or choose a task with the"
                " model's.",
            )


def check_rows(vocab_size: int, *vocabularies: Any) -> None:
    """Checks that a model's embedding has a row for each token of its vocabularies.

    A smaller vocabulary is usual: T5 pads its embedding to a multiple of 128 rows.

    Args:
      vocab_size: The embedding's number of rows.
      *vocabularies: Records of the model's vocabularies.

    Raises:
      UserError: If a vocabulary is larger.
    """
    for record in vocabularies:
        size = seqio_vocabulary(record).vocab_size
        if size > vocab_size:
            raise UserError(
                f"The vocabulary has {size:,} tokens, the model's embedding {vocab_size:,}.",
                where="network.T5Config.vocab_size",
                fix="Make it a multiple of 128 that is not smaller.",
            )


def _are_same(one: Any, other: Any) -> bool:
    """Whether two vocabularies encode alike, wherever their files lie."""
    import seqio

    # SeqIO compares addresses, and T5's vocabulary has several (docs/lab_log.md).
    if one == other or _is_t5s(one) and _is_t5s(other):
        return True
    if not all(isinstance(each, seqio.SentencePieceVocabulary) for each in (one, other)):
        return False
    # The bytes of the models: copies of one file under different names encode alike.
    return one.sp_model == other.sp_model


def _is_t5s(vocabulary: Any) -> bool:
    address = getattr(vocabulary, "_sentencepiece_model_file", None)
    default = default_vocabulary()
    return (address, vocabulary.extra_ids) in {*_T5, (default.address, default.extra_ids)}


def _bindings(vocabulary: Any) -> str:
    """The bindings that give T5X's own model files a vocabulary; "" for one of another kind."""
    path = getattr(vocabulary, "_sentencepiece_model_file", None)
    if not path:
        return ""
    prefix = "seqio.SentencePieceVocabulary"
    return (
        f": {prefix}.sentencepiece_model_file = '{path}'"
        f" and {prefix}.extra_ids = {vocabulary.extra_ids}"
    )


def _shown(vocabulary: Any) -> str:
    path = getattr(vocabulary, "_sentencepiece_model_file", "")
    file = f"{path}, " if path else ""
    return f"{type(vocabulary).__name__}({file}extra_ids={vocabulary.extra_ids})"
