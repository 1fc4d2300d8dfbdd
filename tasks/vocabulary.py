"""The tasks' vocabulary: T5's, or a local copy of it; not read when tasks are registered."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from t0repro import buckets
from t0repro.buckets import is_address, scheme_of
from t0repro.errors import UserError
from t0repro.files import write_atomically

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

VOCABULARY_VARIABLE = "T0REPRO_VOCAB"
DEFAULT_ADDRESS = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
# T5's own vocabulary, as t5's tasks and T5X's gin files name it; they add 100 sentinels to the
# first.
T5_ADDRESSES = ("gs://t5-data/vocabs/cc_all.32000/sentencepiece.model", DEFAULT_ADDRESS)
EXTRA_IDS = 100
_PUBLIC = "gs://t5-data/"
TIMEOUT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class VocabularyFile:
    """A SentencePiece model with T5's sentinels after its pieces, without SeqIO.

    Attributes:
      address: The model's path or address, which is fetched once.
      extra_ids: Number of sentinels; `<extra_id_0>` comes last.
    """

    address: str
    extra_ids: int = EXTRA_IDS

    @property
    def sp_model(self) -> bytes:
        """The serialized model with sentinels, equal to that of `seqio.SentencePieceVocabulary`.

        Raises:
          UserError: If there is no such file, or it is not a SentencePiece model.
        """
        return _with_extra_ids(local_copy(self.address), self.extra_ids)

    def processor(self) -> SentencePieceProcessor:
        """The loaded model.

        Raises:
          UserError: As for `sp_model`.
        """
        return processor_of(self.sp_model)

    @property
    def eos_id(self) -> int:
        """The token that ends a target."""
        return self.processor().eos_id()

    @property
    def vocab_size(self) -> int:
        """Number of pieces, sentinels included."""
        return self.processor().get_piece_size()

    def encode(self, text: str) -> list[int]:
        """A text's tokens, without EOS."""
        return self.processor().encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens up to the first EOS, as SeqIO's vocabulary has it."""
        processor = self.processor()
        size, unknown, eos = processor.get_piece_size(), processor.unk_id(), processor.eos_id()
        # A padded embedding has more rows than there are pieces, so a model may generate these ids.
        known = [token if token < size else unknown for token in map(int, tokens)]
        return processor.decode(list(itertools.takewhile(lambda token: token != eos, known)))


@functools.lru_cache(maxsize=4)
def processor_of(model: bytes) -> SentencePieceProcessor:
    """Loads a serialized model; cached, since many tasks share one."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def default_vocabulary() -> VocabularyFile:
    """T5's vocabulary of 32,000 pieces and 100 sentinels, or the copy that T0REPRO_VOCAB names."""
    # Only the address: nothing is read or fetched until a token is needed.
    return VocabularyFile(os.environ.get(VOCABULARY_VARIABLE) or DEFAULT_ADDRESS)


@functools.cache
def _with_extra_ids(path: str, extra_ids: int) -> bytes:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(Path(path).read_bytes())
    except DecodeError as error:
        raise not_a_model(path, error) from error
    user_defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    # Follow SeqIO's rule, so that the bytes, and thus a cache's digest, equal SeqIO's. Count down:
    # <extra_id_0> gets the last id.
    for number in reversed(range(extra_ids)):
        model.pieces.add(piece=f"\u2581<extra_id_{number}>", score=0.0, type=user_defined)
    return model.SerializeToString()


def not_a_model(path: str, error: Exception) -> UserError:
    """The error for a vocabulary file that cannot be parsed."""
    fetched = Path(path).is_relative_to(_cache_folder())
    return UserError(
        f"The vocabulary is not a SentencePiece model: {error}",
        where=path,
        fix="Remove it, and it is fetched again." if fetched else _advice(path),
    )


def local_copy(address: str) -> str:
    """A local path for a vocabulary's address; a file in a bucket is fetched once.

    Raises:
      UserError: If there is no such file, or the bucket does not answer within seconds.
    """
    if not is_address(address):
        if not Path(address).is_file():
            raise UserError("The vocabulary is missing.", where=address, fix=_advice(address))
        return address
    # Use the full address, so that vocabularies in two buckets do not collide.
    copy = _cache_folder() / address.removeprefix("gs://").replace("://", "/")
    if not copy.is_file():
        content = _fetch(address)
        if isinstance(content, UserError):
            raise content
        write_atomically(copy, content)
    return str(copy)


@functools.lru_cache(maxsize=4)
def _fetch(address: str) -> bytes | UserError:
    """A file in a bucket, or why it cannot be read; asked for once, since tasks share one."""
    private = scheme_of(address) != "gs" or buckets.has_google_credentials()
    try:
        # A public bucket answers over HTTPS without credentials.
        if address.startswith(_PUBLIC) or not private:
            url = "https://storage.googleapis.com/" + address.removeprefix("gs://")
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                return response.read()
        return buckets.read(buckets.checked(address, "the vocabulary"))
    except UserError as error:
        # Returned, not raised: lru_cache keeps results but no exceptions.
        return error
    except OSError as error:  # urllib's errors too
        return UserError(
            f"The vocabulary cannot be reached: {error}", where=address, fix=_advice(address)
        )


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "t0repro"


def _advice(address: str) -> str:
    if address not in (*T5_ADDRESSES, os.environ.get(VOCABULARY_VARIABLE)):
        # T5's vocabulary cannot replace it, since its tokens differ.
        copied = f": gsutil cp {address} ." if address.startswith("gs://") else "."
        return f"Name a copy on this machine where the gin file or the task names this one{copied}"
    return (
        f"Set {VOCABULARY_VARIABLE} to a copy of T5's sentencepiece.model on this machine."
        f" To get one: gsutil cp {DEFAULT_ADDRESS} ."
    )
