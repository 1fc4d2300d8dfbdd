"""The tasks' vocabulary: T5's, or a local copy of it; not read when tasks are registered."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from t0repro import storage
from t0repro.errors import UserError, similar_names
from t0repro.progress import say
from t0repro.storage import access, is_address, scheme_of, write_atomically
from t0repro.tasks.user_files import check_home

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

VOCABULARY_VARIABLE = "T0REPRO_VOCAB"
SENTINELS_VARIABLE = "T0REPRO_EXTRA_IDS"
BYTES = "bytes"
"""In place of an address: ByT5's vocabulary, the bytes of UTF-8, which has no file."""
DEFAULT_ADDRESS = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
# T5's own vocabulary, as t5's tasks and T5X's gin files name it. The second file holds the 100
# sentinels that SeqIO adds to the first, and is then the same to the byte.
T5_ADDRESSES = ("gs://t5-data/vocabs/cc_all.32000/sentencepiece.model", DEFAULT_ADDRESS)
EXTRA_IDS = 100
_PUBLIC = "gs://t5-data/"
TIMEOUT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class VocabularyFile:
    """A SentencePiece model with T5's sentinels after its pieces, or ByT5's bytes, without SeqIO.

    Attributes:
      address: The model's path or address, which is fetched once; or `BYTES`.
      given_ids: Number of sentinels, of which those that the file lacks are added; `<extra_id_0>`
        comes last. None for as many as models of this vocabulary have (`sentinels_lacking`).
    """

    address: str
    given_ids: int | None = None

    @property
    def sp_model(self) -> bytes:
        """The serialized model with sentinels, equal to that of `seqio.SentencePieceVocabulary`.

        Raises:
          UserError: If there is no such file, it is not a SentencePiece model, or its ids are not
            what T5 takes them for (`check_ids`).
        """
        return self._open_file()[0]

    @property
    def extra_ids(self) -> int:
        """Number of sentinels that the file lacks, which is SeqIO's `extra_ids` for it.

        Raises:
          UserError: As for `sp_model`.
        """
        return self._open_file()[1]

    def _open_file(self) -> tuple[bytes, int]:
        if self.address == BYTES:
            return _BYTES_MODEL + b"%d" % (self.given_ids or 0), self.given_ids or 0
        return _open(local_copy(self.address), self.given_ids)

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
        """Number of pieces, sentinels included; T5's own is not read for it."""
        return _T5_PIECES if _is_t5s(self) else self.processor().get_piece_size()

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
    if model.startswith(_BYTES_MODEL):
        return cast("Any", ByteProcessor(int(model.removeprefix(_BYTES_MODEL))))
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


_BYTES_MODEL = b"the bytes of UTF-8 and sentinels: "  # their number follows
_FIRST_BYTE = 3


class ByteProcessor:
    """ByT5's vocabulary, with those methods of a SentencePieceProcessor that are used here.

    Ids 0, 1 and 2 are padding, end and unknown; 3 to 258 are the bytes. Source:
    seqio.ByteVocabulary.
    """

    def __init__(self, extra_ids: int):
        self._size = _FIRST_BYTE + 256 + extra_ids

    def encode(self, texts: str | list[str], num_threads: int = 1) -> Any:
        """The tokens of a text, or of each text in a list."""
        del num_threads
        if isinstance(texts, str):
            return [byte + _FIRST_BYTE for byte in texts.encode()]
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without tokens that are not bytes and bytes that are not text."""
        codes = [token - _FIRST_BYTE for token in tokens]
        return bytes(code for code in codes if 0 <= code < 256).decode(errors="ignore")

    def get_piece_size(self) -> int:
        """Number of tokens, sentinels included."""
        return self._size

    vocab_size = get_piece_size

    def eos_id(self) -> int:
        """The token that ends a target."""
        return 1

    def unk_id(self) -> int:
        """The token that no text has."""
        return 2


def default_vocabulary() -> VocabularyFile:
    """T5's vocabulary of 32,000 pieces and 100 sentinels, or the one that T0REPRO_VOCAB names.

    Raises:
      UserError: If T0REPRO_EXTRA_IDS is not a number.
    """
    address = storage.local_path(os.environ.get(VOCABULARY_VARIABLE) or DEFAULT_ADDRESS)
    # Only the address: nothing is read or fetched until a token is needed.
    return VocabularyFile(
        address, EXTRA_IDS if address == DEFAULT_ADDRESS else _read_given_sentinels()
    )


def named_vocabulary(address: str | os.PathLike[str] | None) -> VocabularyFile:
    """The vocabulary of this path or address; the default for None.

    Raises:
      UserError: If there is no such file, or T0REPRO_EXTRA_IDS is not a number.
    """
    if address is None:
        return default_vocabulary()
    path = storage.local_path(address)
    if path != BYTES and not is_address(path) and not Path(path).is_file():
        where = "--vocab, or vocabulary in Python"
        refuse_other_paths(path, where)
        raise UserError(
            f"There is no vocabulary {path}.",
            where=where,
            fix="Give the path of a SentencePiece model file, such as spiece.model.",
        )
    return VocabularyFile(path, _read_given_sentinels())


def _read_given_sentinels() -> int | None:
    given = os.environ.get(SENTINELS_VARIABLE)
    if given and not given.isdecimal():
        raise UserError(
            f"{given!r} is not a number of sentinels.",
            where=SENTINELS_VARIABLE,
            fix="Give the number that the model was trained with, such as 0 or 100.",
        )
    return int(given) if given else None


# ---- Opening a file: the sentinels that it lacks, and whether its ids are T5's -------------------

_MADLAD = (256_000, 2)
# Number of pieces and the end's id of a file without sentinels -> how many its models have, and
# whose they are. Sources: t5.data.DEFAULT_EXTRA_IDS; t5x/examples/scalable_t5/umt5/vocab.gin;
# MADLAD-400's embedding has rows for its pieces alone.
_FAMILIES = {(32_000, 1): (100, "T5"), (256_000, 1): (300, "umT5"), _MADLAD: (0, "MADLAD-400")}


def sentinels_lacking(pieces: Sequence[str], eos: int) -> tuple[int, str | None]:
    """How many sentinels a file of these pieces lacks, and whose number that is.

    Args:
      pieces: The pieces of the file.
      eos: The id of its end.

    Returns:
      0 and None if it holds sentinels, as mT5's does. T5's number and None for an unknown family.
    """
    # T5's own have SeqIO's mark of a word's beginning, others' often not.
    if not {"\u2581<extra_id_0>", "<extra_id_0>"}.isdisjoint(pieces):
        return 0, None
    return _FAMILIES.get((len(pieces), eos), (EXTRA_IDS, None))


@functools.cache
def _open(path: str, extra_ids: int | None) -> tuple[bytes, int]:
    """A file's serialized model with sentinels, and how many of them it lacks."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(Path(path).read_bytes())
        content = model.SerializeToString()
        eos = processor_of(content).eos_id()
    except (DecodeError, RuntimeError) as error:
        raise not_a_model(path, error) from error
    _check_ids(content, path)
    pieces = [piece.piece for piece in model.pieces]
    added = _count_added(pieces, eos, extra_ids, path)
    user_defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    # Follow SeqIO's rule, so that the bytes, and thus a cache's digest, equal SeqIO's. Count down:
    # <extra_id_0> gets the last id.
    for number in reversed(range(added)):
        model.pieces.add(piece=f"\u2581<extra_id_{number}>", score=0.0, type=user_defined)
    return model.SerializeToString(), added


def _count_added(pieces: Sequence[str], eos: int, extra_ids: int | None, path: str) -> int:
    """How many sentinels to add to a file; reports a number that is only assumed."""
    if extra_ids is None:
        added, family = sentinels_lacking(pieces, eos)
        if family != "T5" and (added or family):
            say(
                f"note: {path} holds no sentinels; taking {added}, as {family or 'T5'} has"
                f" ({SENTINELS_VARIABLE} gives another number)"
            )
        return added
    wanted = {f"\u2581<extra_id_{number}>" for number in range(extra_ids)}
    lacking = wanted.difference(pieces)
    if lacking and lacking != wanted:
        raise UserError(
            f"The vocabulary holds {len(wanted) - len(lacking)} sentinels, not {extra_ids}.",
            where=path,
            fix=f"Set extra_ids or {SENTINELS_VARIABLE} to {len(wanted) - len(lacking)}.",
        )
    return len(lacking)


def check_ids(vocabulary: Any) -> None:
    """Checks that no text has id 0, and another id ends targets.

    T5, T5X and SeqIO pad with 0, whatever the vocabulary says: a 0 in a target has no loss and no
    score.

    Args:
      vocabulary: A `VocabularyFile`, which is also checked whenever it is opened, or SeqIO's.

    Raises:
      UserError: If an id would be mistaken for another.
    """
    model = model_of(vocabulary)
    if model is not None and not model.startswith(_BYTES_MODEL):
        _check_ids(model, address_of(vocabulary) or "")


def _check_ids(model: bytes, path: str) -> None:
    processor = processor_of(model)
    eos, unknown = processor.eos_id(), processor.unk_id()
    what = None
    if eos < 1:
        what = "has no token that ends a text" if eos < 0 else "ends texts with padding's id, 0"
    elif unknown == 0:
        # Bytes leave no character unknown. MADLAD-400 was trained with unknown ones as padding.
        if not _parse(model)[1] and (processor.get_piece_size(), eos) != _MADLAD:
            what = "gives unknown characters padding's id, 0: they would have no loss and no score"
    elif not processor.is_control(0):
        what = f"has {processor.id_to_piece(0)!r} in padding's place, id 0"
    if what:
        raise UserError(
            f"The vocabulary {what}.",
            where=path,
            fix="Train it with T5's ids: spm_train --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1.",
        )


def not_a_model(path: str, error: Exception) -> UserError:
    """The error for a vocabulary file that cannot be parsed."""
    fix = _advice(path)
    if Path(path).is_relative_to(_cache_folder()):
        fix = "Remove it, and it is fetched again."
    elif path.endswith(".json"):
        fix = "Give the SentencePiece model that it was made from, such as spiece.model beside it."
    elif not is_address(path):
        fix = "Name a SentencePiece model, a file such as spiece.model."
    return UserError(f"The vocabulary is not a SentencePiece model: {error}", where=path, fix=fix)


# ---- Comparing vocabularies, also SeqIO's --------------------------------------------------------


def padded_rows(size: int) -> int:
    """Rows of the embedding of a vocabulary with so many pieces, as Mesh TensorFlow pads it."""
    return -(-size // 128) * 128  # vocab_divisor


def check_rows(vocabulary: Any, rows: int, where: str, fix: str) -> None:
    """Raises UserError if an embedding has fewer rows than a vocabulary has pieces.

    More are usual: T5 pads its embedding to a multiple of 128 rows. Sentinels whose number is
    assumed need none, since no prompt has one.

    Args:
      vocabulary: A `VocabularyFile`, or SeqIO's.
      rows: The embedding's number of rows.
      where: The model's or the checkpoint's place.
      fix: What to do.
    """
    size = vocabulary.vocab_size
    if isinstance(vocabulary, VocabularyFile) and vocabulary.given_ids is None:
        size -= vocabulary.extra_ids
    if size > rows:
        raise UserError(
            f"The vocabulary has {size:,} pieces, the model's embedding {rows:,} rows:"
            f" {shown(vocabulary)}.",
            where=where,
            fix=fix,
        )


def check_equal(vocabulary: Any, own: VocabularyFile, where: str) -> None:
    """Raises UserError unless a vocabulary is a checkpoint's own, piece by piece.

    Args:
      vocabulary: The tasks' or the caller's: a `VocabularyFile`, or SeqIO's.
      own: The checkpoint's. Sentinels at the end that only one of the two has do not count.
      where: The checkpoint's place.
    """
    if differing := difference(vocabulary, own):
        raise UserError(
            f"The vocabulary, {shown(vocabulary)}, is not the checkpoint's, {shown(own)}:"
            f" {differing}.",
            where=where,
            fix=f"Name the checkpoint's where the other was named: {VOCABULARY_VARIABLE}="
            f"{own.address}, or that path as --vocab or vocabulary=.",
        )


def difference(one: Any, other: Any) -> str | None:
    """How two vocabularies differ, apart from sentinels at their ends; None if they do not."""
    models = [model_of(each) or b"" for each in (one, other)]
    # All of ByT5's have the same bytes.
    if models[0] == models[1] or all(model.startswith(_BYTES_MODEL) for model in models):
        return None
    if any(not model or model.startswith(_BYTES_MODEL) for model in models):
        return "only one is a SentencePiece model"
    (pieces, *rules), (others, *other_rules) = map(_parse, models)
    for token, pair in enumerate(itertools.zip_longest(pieces, others, fillvalue=("nothing",))):
        names = [each[0] for each in pair]
        if names[0] != names[1]:
            return f"id {token} is {names[0]!r} there and {names[1]!r} here"
        if pair[0] != pair[1]:
            return f"id {token}, {names[0]!r}, has another score or type"
    return None if rules == other_rules else "they normalize texts differently"


@functools.lru_cache(maxsize=4)
def _parse(model: bytes) -> tuple[list[tuple[str, float, int]], bool, int, bytes]:
    """What decides a model's encoding: pieces, byte fallback, its type, rules for texts."""
    from sentencepiece import sentencepiece_model_pb2

    parsed = sentencepiece_model_pb2.ModelProto.FromString(model)
    pieces = [(piece.piece, piece.score, piece.type) for piece in parsed.pieces]
    while pieces and pieces[-1][0].lstrip("\u2581").startswith("<extra_id_"):
        pieces.pop()
    trainer = parsed.trainer_spec
    normalizer = parsed.normalizer_spec.SerializeToString()
    return pieces, trainer.byte_fallback, trainer.model_type, normalizer


def are_same(one: Any, other: Any) -> bool:
    """Whether two vocabularies give the same tokens and sentinels, wherever their files are."""
    # SeqIO compares addresses, and T5's vocabulary has several (docs/evidence/lab_log.md).
    if _is_t5s(one) and _is_t5s(other) or (address_of(one) and names_of(one) == names_of(other)):
        return True
    # Compare the models: copies of one file under different names encode alike.
    digests = _digest(one), _digest(other)
    return digests[0] == digests[1] if any(digests) else bool(one == other)


def _digest(vocabulary: Any) -> str | None:
    """SHA-256 of a vocabulary's model; T5's own is not read for it."""
    if names_of(vocabulary) in _T5:
        return _T5_DIGEST
    model = model_of(vocabulary)
    return None if model is None else hashlib.sha256(model).hexdigest()


def model_of(vocabulary: Any) -> bytes | None:
    """A vocabulary's serialized model, also SeqIO's; None for other kinds than pieces and bytes."""
    if hasattr(type(vocabulary), "sp_model"):
        return vocabulary.sp_model
    seqio = sys.modules.get("seqio")
    if seqio is not None and isinstance(vocabulary, seqio.ByteVocabulary):
        return VocabularyFile(BYTES, vocabulary.extra_ids).sp_model
    return None


def address_of(vocabulary: Any) -> str | None:
    """The path or address of a vocabulary's file, or `BYTES`; None for SeqIO's other kinds."""
    if isinstance(vocabulary, VocabularyFile):
        return vocabulary.address
    path = getattr(vocabulary, "_sentencepiece_model_file", None)
    return None if path is None else os.fspath(path)


def names_of(vocabulary: Any) -> tuple[str | None, int | None]:
    """The `address_of` a vocabulary, and the number of sentinels that it was given."""
    # Ours derive `extra_ids` from the file, which need not be read here.
    ours = hasattr(vocabulary, "given_ids")
    return address_of(vocabulary), vocabulary.given_ids if ours else vocabulary.extra_ids


# The address of T5's file that holds the sentinels may be given with 0 or 100.
_T5 = {*((address, EXTRA_IDS) for address in T5_ADDRESSES), (DEFAULT_ADDRESS, 0)}
_T5_PIECES = 32_100  # sentinels included
_T5_DIGEST = "839ffa4b9afae8d77834a88b87781849aa021975d6063dec6085633fcaf7171c"


def _is_t5s(vocabulary: Any) -> bool:
    return names_of(vocabulary) in _T5


# Pieces of the other vocabularies that T5's authors released, sentinels included.
_RELEASED = {
    "gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model": 250_100,
    "gs://t5-data/vocabs/umt5.256000/sentencepiece.model": 256_300,
}


def local_copy_of(vocabulary: VocabularyFile) -> VocabularyFile:
    """The vocabulary, or the copy of it that T0REPRO_VOCAB names if T5's authors released it."""
    default = default_vocabulary()
    if default.address == BYTES:
        return vocabulary
    size = _RELEASED.get(vocabulary.address)
    # A copy of another one than T5's is recognized by its size.
    is_copy = size is not None and default.address != DEFAULT_ADDRESS and default.vocab_size == size
    return default if is_copy or _is_t5s(vocabulary) else vocabulary


def shown(vocabulary: Any) -> str:
    """A vocabulary as messages name it."""
    address, extra_ids = names_of(vocabulary)
    name = address or type(vocabulary).__name__
    return name if extra_ids is None else f"{name} (extra_ids={extra_ids})"


# ---- Where the file is ---------------------------------------------------------------------------


def local_copy(address: str) -> str:
    """A local path for a vocabulary's address; a file in a bucket is fetched once.

    Raises:
      UserError: If there is no such file, or the bucket does not answer within seconds.
    """
    if not is_address(address):
        if not Path(address).is_file():
            given = os.environ.get(VOCABULARY_VARIABLE)
            where = f"{VOCABULARY_VARIABLE}={given}" if given == address else address
            refuse_other_paths(address, where)
            raise UserError("The vocabulary is missing.", where=where, fix=_advice(address))
        return address
    copy = _find_cached_path(address)
    if not copy.is_file():
        content = _fetch(address)
        if isinstance(content, UserError):
            raise content
        write_atomically(copy, content)
    return str(copy)


def refuse_other_paths(path: str, where: str) -> None:
    """Raises UserError if a path is a folder, `bytes` misspelt, or begins with the shell's `~`."""
    check_home(path, where)
    if similar_names(path.lower(), [BYTES]):
        raise UserError(
            f"There is no vocabulary {path}.",
            where=where,
            fix=f"ByT5's vocabulary, which has no file, is called {BYTES}.",
        )
    if not Path(path).is_dir():
        return
    models = sorted(Path(path).glob("*.model"))
    raise UserError(
        f"The vocabulary {path} is a folder.",
        where=where,
        fix=f"Name the SentencePiece model in it, {models[0]}."
        if models
        else "Name a SentencePiece model, a file such as spiece.model; the folder has none.",
    )


def is_here(vocabulary: Any) -> bool:
    """Whether a vocabulary can be opened without fetching its file."""
    address = address_of(vocabulary)
    if address is None or address == BYTES:
        return True
    return (_find_cached_path(address) if is_address(address) else Path(address)).is_file()


def _find_cached_path(address: str) -> Path:
    # Use the full address, so that vocabularies in two buckets do not collide.
    return _cache_folder() / address.removeprefix("gs://").replace("://", "/")


@functools.lru_cache(maxsize=4)
def _fetch(address: str) -> bytes | UserError:
    """A file in a bucket, or why it cannot be read; asked for once, since tasks share one."""
    private = scheme_of(address) != "gs" or access.has_google_credentials()
    try:
        # A public bucket answers over HTTPS without credentials.
        if address.startswith(_PUBLIC) or not private:
            url = f"{access.google_storage()}/{address.removeprefix('gs://')}"
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                return response.read()
        return storage.read(storage.check_address(address, "the vocabulary"))
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
        return f"Name a copy on this machine where the gin file, the task or --vocab has it{copied}"
    return (
        f"Set {VOCABULARY_VARIABLE} to a copy of T5's sentencepiece.model on this machine, or to"
        f" your model's own vocabulary. To get T5's: gsutil cp {DEFAULT_ADDRESS} ."
    )
