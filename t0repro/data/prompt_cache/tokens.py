"""Text to tokens, as `seqio.SentencePieceVocabulary.encode_tf`, packed for an Example.

A unigram model takes the segmentation of a text with the highest sum of its pieces' scores. No
piece of T5's vocabulary reaches over a space, so that the best segmentation of a text is that of
its words, one after the other, and words repeat: most texts are put together from remembered words.
One thing can tell the two apart: rounding. SentencePiece adds the scores up in float32 from the
text's start, so that two segmentations of a word that are as good as each other ("...", "." and
".", "...") are told apart by what stands before. A word is remembered only if its best segmentation
leads by more than such rounding can change; a text with any other word is segmented whole.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import sentencepiece

from t0repro.data.prompt_cache.records import varint

_REMEMBERED_TEXTS = 1 << 14
_REMEMBERED_WORDS = 1 << 17
_SHORT = 200  # characters; targets and choices repeat, inputs do not

# A text of 8,192 characters has a score of at least about -20,000 where its words are known ones;
# float32 has steps of 0.002 there, half of which each of the few sums inside a word may be off.
_LONGEST_TEXT, _LONGEST_WORD, _LEAD = 8192, 32, 0.02

_SPACE = "\u2581"  # SentencePiece's mark of a space


class Tokenizer:
    """A SentencePiece model that gives tokens as joined varints (see `count`).

    Args:
      model: the serialized model, with the vocabulary's extra ids in it.
    """

    def __init__(self, model: bytes):
        self._model = sentencepiece.SentencePieceProcessor()
        self._model.LoadFromSerializedProto(model)
        self._varints = [varint(token) for token in range(self._model.get_piece_size())]
        self._texts: dict[str, bytes] = {}
        self._words = _Words(self) if _is_made_of_words(model, self._model) else None

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Each text's tokens, without EOS."""
        if self._words is None:
            return self.encode_whole(texts)
        found = [self._from_words(text) for text in texts]
        others = [text for text, tokens in zip(texts, found, strict=True) if tokens is None]
        whole = iter(self.encode_whole(others) if others else ())
        return [next(whole) if tokens is None else tokens for tokens in found]

    def encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        """Each text's tokens, by SentencePiece on the text as it is."""
        table = self._varints
        return [
            b"".join([table[token] for token in tokens]) for tokens in self._model.encode(texts)
        ]

    def encode_short(self, text: str) -> bytes:
        """A text's tokens; those of short texts are remembered."""
        tokens = self._texts.get(text)
        if tokens is None:
            (tokens,) = self.encode([text])
            if len(text) <= _SHORT and len(self._texts) < _REMEMBERED_TEXTS:
                self._texts[text] = tokens
        return tokens

    def _from_words(self, text: str) -> bytes | None:
        words = self._words
        if words is None or len(text) > _LONGEST_TEXT:
            return None
        found = [words[word] for word in text.replace("\n", " ").split(" ")]
        if len(words) > _REMEMBERED_WORDS:
            words.clear()
        try:
            return b"".join(found)  # type: ignore[arg-type]  # that is what is tried
        except TypeError:  # a word is None: its tokens depend on the text
            return None

    def word(self, word: str) -> bytes | None:
        """A word's tokens wherever it stands, or None where that is not certain."""
        if not word:
            return b""
        if len(word) > _LONGEST_WORD or _SPACE in word or "<extra_id_" in word:
            return None
        # A mark that is put on the character before it, the space here, makes another character.
        if not word.isascii() and unicodedata.category(word[0]).startswith("M"):
            return None
        best = self._model.NBestEncodeAsImmutableProto(word, 2).nbests
        tokens = self._model.encode(word)
        if self._model.unk_id() in tokens:
            return None
        if len(best) > 1 and best[0].score - best[1].score <= _LEAD:
            return None
        return b"".join([self._varints[token] for token in tokens])


class _Words(dict[str, bytes | None]):
    """Words seen so far -> their tokens, or None."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> bytes | None:
        tokens = self[word] = self._tokenizer.word(word)
        return tokens


def _is_made_of_words(model: bytes, processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether the best segmentation of a text is that of its words: see this module's beginning."""
    from sentencepiece import sentencepiece_model_pb2

    settings = sentencepiece_model_pb2.ModelProto.FromString(model)
    normalizer, trainer = settings.normalizer_spec, settings.trainer_spec
    pieces = [piece.piece for piece in settings.pieces]
    return (
        trainer.model_type == sentencepiece_model_pb2.TrainerSpec.UNIGRAM
        and normalizer.add_dummy_prefix
        and normalizer.remove_extra_whitespaces
        and normalizer.escape_whitespaces
        and not trainer.treat_whitespace_as_suffix
        and not any(_SPACE in piece[1:] for piece in pieces)
        # By itself it keeps unknown characters of two words apart.
        and processor.piece_to_id(_SPACE) != processor.unk_id()
        and processor.encode("a\nb") == processor.encode("a b")
    )


_CONTINUED = bytes(range(0x80, 0x100))


def count(tokens: bytes) -> int:
    """The number of tokens: each varint ends in one byte below 0x80."""
    return len(tokens.translate(None, _CONTINUED))
