"""The vocabularies of a T5X model's gin file as SeqIO's, and whether a task's are the same."""

from __future__ import annotations

from typing import Any

from t0repro.config.t5x import records
from t0repro.errors import UserError


def seqio_vocabulary(record: Any) -> Any:
    """The SeqIO vocabulary that a record describes; its file is read when it is first used."""
    from t0repro.mesh import compat

    compat.install()
    import seqio

    from t0repro.tasks.seqio_tasks import LazyVocabulary

    if isinstance(record, records.SentencePieceVocabulary):
        return LazyVocabulary(record.sentencepiece_model_file, record.extra_ids)
    if isinstance(record, records.ByteVocabulary):
        return seqio.ByteVocabulary(extra_ids=record.extra_ids)
    if isinstance(record, records.PassThroughVocabulary):
        return seqio.PassThroughVocabulary(record.size, eos_id=record.eos_id)
    if isinstance(record, seqio.Vocabulary):
        return record  # bound in a gin file to an object of the user's own
    raise UserError(
        f"{record!r} is no vocabulary.",
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
      UserError: If one differs.
    """
    import seqio

    features = seqio.get_mixture_or_task(name).output_features
    for feature, record in (("inputs", inputs), ("targets", outputs)):
        if feature not in features:
            continue
        theirs, ours = features[feature].vocabulary, seqio_vocabulary(record)
        if theirs != ours:
            raise UserError(
                f"The {feature} of {name!r} are encoded with another vocabulary than the model's:"
                f" {_shown(theirs)} instead of {_shown(ours)}.",
                where="models.EncoderDecoderModel",
                fix="Set VOCABULARY to the task's, or choose a task with the model's.",
            )


def _shown(vocabulary: Any) -> str:
    path = getattr(vocabulary, "_sentencepiece_model_file", "")
    extra = getattr(vocabulary, "extra_ids", 0)
    return f"{type(vocabulary).__name__}({path}{', ' if path else ''}extra_ids={extra})"
