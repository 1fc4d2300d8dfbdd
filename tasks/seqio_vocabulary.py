"""The vocabulary as SeqIO takes it."""

from __future__ import annotations

import seqio

from t0repro.tasks.vocabulary import VocabularyFile, local_copy, not_a_model


class LazyVocabulary(seqio.SentencePieceVocabulary):
    """A SentencePiece vocabulary that says how to get its file when it cannot be read.

    Equal to, and pickled like, `seqio.SentencePieceVocabulary` of the same address. An address in a
    bucket is fetched once over HTTPS and kept in the user's cache folder: TensorFlow's own reader
    retries for minutes on a machine without network or credentials.
    """

    def _model_context(self):
        if self._model is None:
            path = local_copy(self._sentencepiece_model_file)
            try:
                loaded = seqio.SentencePieceVocabulary(path, self._extra_ids)._model_context()
            except Exception as error:
                raise not_a_model(path, error) from error
            self._model = loaded
        return self._model


def seqio_vocabulary(vocabulary: VocabularyFile | seqio.Vocabulary) -> seqio.Vocabulary:
    """SeqIO's form of a task's vocabulary."""
    if isinstance(vocabulary, VocabularyFile):
        return LazyVocabulary(vocabulary.address, vocabulary.extra_ids)
    return vocabulary
