"""The vocabulary of the tasks: T5's, or a local copy; never read on registration."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

import seqio

from t0repro.errors import UserError
from t0repro.files import write_atomically

VOCABULARY_VARIABLE = "T0REPRO_VOCAB"
DEFAULT_ADDRESS = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
EXTRA_IDS = 100
TIMEOUT_SECONDS = 10.0


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
                raise UserError(
                    f"The vocabulary is not a SentencePiece model: {error}",
                    where=path,
                    fix=_advice(),
                ) from error
            self._model = loaded
        return self._model


def default_vocabulary() -> LazyVocabulary:
    """T5's vocabulary of 32,000 pieces and 100 sentinels, or the copy that T0REPRO_VOCAB names."""
    return LazyVocabulary(os.environ.get(VOCABULARY_VARIABLE) or DEFAULT_ADDRESS, EXTRA_IDS)


def local_copy(address: str) -> str:
    """A path on this machine for a vocabulary's address, fetched if it is in a bucket.

    Raises:
      UserError: if there is no such file, or the bucket cannot be reached within seconds.
    """
    if not address.startswith("gs://"):
        if not Path(address).is_file():
            raise UserError("The vocabulary is missing.", where=address, fix=_advice())
        return address
    copy = _cache_folder() / address.removeprefix("gs://")
    if not copy.is_file():
        write_atomically(copy, _fetch(address))
    return str(copy)


def _fetch(address: str) -> bytes:
    url = "https://storage.googleapis.com/" + address.removeprefix("gs://")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            return response.read()
    except (urllib.error.URLError, OSError) as error:
        raise UserError(
            f"The vocabulary cannot be reached: {error}", where=address, fix=_advice()
        ) from error


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "t0repro"


def _advice() -> str:
    return (
        f"Set {VOCABULARY_VARIABLE} to a copy of T5's sentencepiece.model on this machine."
        f" To get one: gsutil cp {DEFAULT_ADDRESS} ."
    )
