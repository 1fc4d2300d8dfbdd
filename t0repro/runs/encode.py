"""The encoder's outputs for texts or token ids: `t0repro.encode`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from t0repro.config.model import DType
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.own_tokenizer import own_vocabulary
from t0repro.errors import UserError, check_choice
from t0repro.evaluation.encoding import Pool, encode_ids
from t0repro.evaluation.opened import Checkpoint, encoder_shape, open_cached, open_encoder
from t0repro.evaluation.selection import check_fits
from t0repro.progress import say
from t0repro.runs.given_texts import check_model, check_text, list_texts
from t0repro.tasks.vocabulary import VocabularyFile, check_rows, named_vocabulary
from t0repro.words import counted

TooLong = Literal["cut", "error"]
Row = str | Sequence[int] | np.ndarray


def encode(
    model: str | os.PathLike[str] | Checkpoint,
    texts_or_ids: Sequence[Row],
    *,
    step: int | None = None,
    vocabulary: str | os.PathLike[str] | None = None,
    pool: Pool | None = None,
    batch_size: int | None = None,
    dtype: DType | None = None,
    length: int | None = None,
    too_long: TooLong = "cut",
) -> list[np.ndarray] | np.ndarray:
    """The encoder's outputs for each text: a list of [length, d_model], or [texts, d_model] pooled.

    A text's outputs have the same bits whatever the other texts, their order and `batch_size`.

    Args:
      model: A checkpoint's path in any format, a whole model or an encoder alone; or a checkpoint
        from `t0repro.evaluation.opened`. A path's latest checkpoint stays in memory for the next
        call.
      texts_or_ids: Texts, which are encoded with EOS as transformers' tokenizer does; or token ids
        of each row, which are used as they are.
      step: Step of the checkpoint; the latest by default.
      vocabulary: The texts' SentencePiece model; by default the checkpoint's own, or T5's if it has
        none.
      pool: "mean" averages the outputs of a row's tokens; "first" takes the first token's.
      batch_size: Rows on the devices at once, rounded up to whole blocks of about 1,024 tokens on a
        CPU and 16,384 on an accelerator.
      dtype: Type of the activations and the result; float32 by default. A checkpoint that is open
        keeps its own.
      length: Most tokens of a row, EOS included; by default there is no limit.
      too_long: What to do with longer rows: "cut" them and say how many there were, or raise an
        "error".

    Raises:
      UserError: If the checkpoint cannot be read or has no encoder, the vocabulary does not fit it,
        or a row is empty, too long, or has an id that the embedding lacks.
    """
    check_model(model, "encode")
    limits = Limits(length, too_long)
    check_choice(pool or "mean", Pool, "pool")
    check_choice(dtype or "float32", DType, "dtype")
    given = list_texts(texts_or_ids, "texts", "encode")
    if batch_size is not None and batch_size < 1:
        raise UserError(
            f"batch_size is {batch_size}; it must be at least 1.",
            where="batch_size",
            fix="Give 1 or more.",
        )
    if isinstance(model, Checkpoint):
        rows, path = model.model.config.vocab_size, model.path
    else:
        path = os.fspath(model)
        rows = encoder_shape(path, step).vocab_size
    tokenizer = Tokenizer(path, vocabulary, rows, limits)
    ids = [tokenizer.ids(row, f"row {at}") for at, row in enumerate(given)]
    tokenizer.report_cut()
    model = open_cached(open_encoder, model, dtype or "float32", step)
    outputs: list[Any] = [None] * len(ids)
    for at, output in encode_ids(model, ids, pool, batch_size):
        outputs[at] = output
    if pool is None:
        return outputs
    width = model.model.config.d_model
    return np.stack(outputs) if outputs else np.zeros((0, width), np.float32)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many tokens a row may have.

    Attributes:
      length: Most tokens, EOS included; None for any number.
      too_long: Whether longer rows are cut or refused.
    """

    length: int | None = None
    too_long: TooLong = "cut"

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise UserError(f"length is {self.length}.", where="length", fix="Give at least 1.")
        check_choice(self.too_long, TooLong, "too_long")


class Tokenizer:
    """Turns rows into token ids, and counts those that it cuts.

    Args:
      path: The checkpoint, whose own vocabulary serves texts unless one is named.
      vocabulary: The SentencePiece model's path.
      rows: Rows of the checkpoint's embedding.
      limits: How long a row may be.
    """

    def __init__(
        self,
        path: str,
        vocabulary: str | os.PathLike[str] | None,
        rows: int,
        limits: Limits,
    ):
        self._path, self._named, self._rows, self._limits = path, vocabulary, rows, limits
        self._file: VocabularyFile | None = None
        self._cut = 0

    def ids(self, row: Row, where: str) -> np.ndarray:
        """A row's token ids: int32 [length].

        Raises:
          UserError: If there is nothing to encode, or an id that the embedding lacks.
        """
        length = self._limits.length
        if isinstance(row, str):
            check_text(row, where)
            tokens = [*self._vocabulary().encode(row), self._vocabulary().eos_id]
            if length is not None and len(tokens) > length:
                self._check_may_cut(len(tokens), where)
                # EOS stays, as where transformers' tokenizer truncates.
                tokens[length - 1 :] = tokens[-1:]
            return np.asarray(tokens, np.int32)
        try:
            array = np.asarray(row)
        except ValueError:
            array = np.zeros(())
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise UserError(
                f"{str(row)[:50]!r} is neither a text nor a list of token ids.",
                where=where,
                fix="Give texts, or lists of whole numbers.",
            )
        if not array.size:
            raise UserError("The row has no tokens.", where=where, fix="Leave it out.")
        outside = array[(array < 0) | (array >= self._rows)]
        if outside.size:
            raise UserError(
                f"The embedding has {self._rows:,} rows, and the id {outside[0]} is not one.",
                where=where,
                fix="Encode the text with the checkpoint's own vocabulary.",
            )
        if length is not None and array.size > length:
            self._check_may_cut(array.size, where)
            array = array[:length]
        return array.astype(np.int32)

    def report_cut(self) -> None:
        """Says how many rows were cut, if any."""
        if self._cut:
            rows = counted(self._cut, "row was", "rows were")
            say(f"{rows} cut to {self._limits.length} tokens")

    def identity(self) -> str | None:
        """A hash of the vocabulary, if a text has needed it."""
        # Not its address: a file may be replaced between an interrupted command and the next.
        return self._file and hashlib.sha256(self._file.sp_model).hexdigest()

    def _check_may_cut(self, tokens: int, where: str) -> None:
        if self._limits.too_long == "error":
            raise UserError(
                f"The row has {tokens:,} tokens, more than {self._limits.length:,}.",
                where=where,
                fix="Shorten it, allow more tokens (--length), or cut such rows: --too_long cut, in"
                ' Python too_long="cut".',
            )
        self._cut += 1

    def _vocabulary(self) -> VocabularyFile:
        if self._file is None:
            source = find_checkpoint(self._path)
            own = own_vocabulary(source.folder) if self._named is None else None
            self._file = own or named_vocabulary(self._named)
            if own is None:
                check_fits(self._file, self._rows, source.path, [source.folder])
            else:
                check_rows(
                    own, self._rows, source.path, "Name another with --vocab or vocabulary=."
                )
        return self._file
