"""Encodes the lines of a file into a file of arrays: `t0repro encode`.

Rows are read twice: first to check them all and to count their tokens, which fixes the place of
every array, then to encode them. Arrays are appended to a hidden folder beside the output, with a
record of how far they go; the output appears when it is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.model import DType
from t0repro.errors import UserError
from t0repro.evaluation.encoding import Pool, encode_ids
from t0repro.evaluation.opened import encoder_shape, open_encoder
from t0repro.progress import count_progress, working
from t0repro.runs.encode import Limits, Tokenizer, TooLong
from t0repro.runs.encoded_output import DTYPES, OutputLayout, PartialOutput, check_files
from t0repro.storage import explain_errors, lock_folder
from t0repro.words import json_fault

_LINES = 'Write "a text" or [37, 1712, 1] on each line.'
_CHUNK = 1024  # rows between two records of the progress


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What `encode_file` wrote.

    Attributes:
      path: The file. `embeddings` has all rows one after another, [tokens, d_model], or
        [rows, d_model] if they are pooled; `offsets`, int64 [rows + 1], says where each begins.
      rows: Number of rows.
      tokens: Number of their tokens.
      resumed: Rows that an interrupted command had encoded.
    """

    path: Path
    rows: int
    tokens: int
    resumed: int


def encode_file(
    checkpoint: str,
    source: Path,
    out: Path,
    *,
    step: int | None = None,
    vocabulary: str | None = None,
    pool: Pool | None = None,
    batch_size: int | None = None,
    dtype: DType = "float32",
    length: int | None = None,
    too_long: TooLong = "cut",
) -> Encoded:
    """Encodes each line of a file; see `t0repro.runs.encode.encode` for the options.

    Args:
      checkpoint: The checkpoint's path.
      source: A text file with one text a line; if its name ends in .jsonl, each line is a JSON
        string or a list of token ids.
      out: The file to write, .safetensors or .npz.
      step: Step of the checkpoint; the latest by default.
      vocabulary: The texts' SentencePiece model.
      pool: See `encode`.
      batch_size: See `encode`.
      dtype: See `encode`.
      length: See `encode`.
      too_long: See `encode`.

    Raises:
      UserError: If there are no texts, `out` exists or has another ending, a line cannot be
        encoded, or the checkpoint cannot be read.
    """
    check_files(source, out, dtype)
    shape = encoder_shape(checkpoint, step)
    tokenizer = Tokenizer(checkpoint, vocabulary, shape.vocab_size, Limits(length, too_long))
    with working(f"reading {source}"):
        counts, content = _count_tokens(source, tokenizer)
    tokenizer.report_cut()
    row_sizes = counts if pool is None else np.ones_like(counts)
    offsets = np.concatenate([[0], np.cumsum(row_sizes)]).astype(np.int64)
    partial = out.with_name(f".{out.name}.partial")
    with lock_folder(partial, "encoding", fix="Wait for it to end, or choose another --out."):
        with working(f"reading {checkpoint}"):
            model = open_encoder(checkpoint, dtype, step)
        request = {
            "model": model.digest,
            "computation": model.computation(),
            "rows": content,
            "vocabulary": tokenizer.identity(),
            "settings": [pool, dtype, length, too_long, out.suffix],
        }
        layout = OutputLayout(offsets, shape.d_model, DTYPES[dtype], out.suffix)
        parts = PartialOutput(partial, request, layout)
        rows = islice(_rows(source, tokenizer), parts.done, None)
        with (
            explain_errors(out),
            count_progress(len(counts), "encoding", "row", "encoded") as progress,
            parts.open() as file,
        ):
            progress(parts.done)
            resumed = parts.done
            while chunk := list(islice(rows, _CHUNK)):
                outputs = dict(encode_ids(model, chunk, pool, batch_size))
                for at in range(len(chunk)):
                    file.write(np.ascontiguousarray(outputs[at]).tobytes())
                parts.record(file, len(chunk))
                progress(len(chunk))
            layout.finish(file, out)
    shutil.rmtree(partial, ignore_errors=True)
    return Encoded(out, len(counts), int(counts.sum()), resumed)


def _count_tokens(source: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, str]:
    """Number of tokens of each row, int64 [rows], and a hash of the file's bytes."""
    counts = np.fromiter((len(ids) for ids in _rows(source, tokenizer)), np.int64)
    if not counts.size:
        raise UserError(
            "The file has no lines.", where=str(source), fix="Give a line for each row."
        )
    with open(source, "rb") as file:
        return counts, hashlib.file_digest(file, "sha256").hexdigest()


def _rows(source: Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The token ids of each line."""
    try:
        # Only \n ends a line: str.splitlines would also break at what texts may contain.
        with open(source, encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                where = f"{source}, line {number}"
                text = line.removesuffix("\n").removesuffix("\r")
                row = _json_row(text, where) if source.suffix == ".jsonl" else text
                yield tokenizer.ids(row, where)
    except UnicodeDecodeError as error:
        raise UserError(
            f"The file is not UTF-8: {error.reason}.", where=str(source), fix="Save it as UTF-8."
        ) from error


def _json_row(line: str, where: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"The line is not JSON: {json_fault(error)}."
        raise UserError(what, where=where, fix=_LINES) from error
    if not isinstance(row, str | list):
        what = "The line is neither a JSON string nor a list of token ids."
        raise UserError(what, where=where, fix=_LINES)
    return row
