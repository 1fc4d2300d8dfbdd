"""Tokenizes text as `seqio.SentencePieceVocabulary.encode_tf` does, packed for an Example."""

from __future__ import annotations

from collections.abc import Sequence

import sentencepiece

from t0repro.tasks.prompt_cache.records import varint


class Tokenizer:
    """A SentencePiece model that returns tokens as joined varints (see `count`).

    Args:
      model: The serialized model, including the vocabulary's extra ids.
      threads: Number of threads that SentencePiece uses for a batch of texts.
    """

    def __init__(self, model: bytes, threads: int = 1):
        self._model = sentencepiece.SentencePieceProcessor()
        self._model.LoadFromSerializedProto(model)
        # Encoded once per token: most of the work of writing an example is joining these.
        self._varints = [varint(token) for token in range(self._model.get_piece_size())]
        self._threads = threads

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Each text's tokens, without EOS."""
        table = self._varints
        encoded = self._model.encode(list(texts), num_threads=self._threads)
        return [b"".join([table[token] for token in tokens]) for tokens in encoded]


_CONTINUED = bytes(range(0x80, 0x100))


def count(tokens: bytes) -> int:
    """The number of tokens; the last byte of each varint is its only one below 0x80."""
    return len(tokens.translate(None, _CONTINUED))
