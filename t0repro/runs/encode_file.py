"""Encodes the lines of a file into a file of arrays: `t0repro encode`.

Rows are read twice: first to check them all and to count their tokens, which fixes the place of
every array, then to encode them. Arrays are appended to a hidden folder beside the output, with a
record of how far they go; the output appears when it is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from t0repro.config.run_config import DType
from t0repro.errors import UserError
from t0repro.evaluation.encoding import Pool, encode_ids
from t0repro.evaluation.opened import encoder_shape, open_encoder
from t0repro.files import folder_lock, sync, sync_directory, write_atomically, writing
from t0repro.progress import count_progress, say, working
from t0repro.runs.encode import Limits, Tokenizer, TooLong

SUFFIXES = (".safetensors", ".npz")
EMBEDDINGS, OFFSETS = "embeddings", "offsets"
_CHUNK = 1024  # rows between two records of the progress
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


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
      UserError: If `out` exists or has another ending, a line cannot be encoded, or the checkpoint
        cannot be read.
    """
    _check_output(out, dtype)
    shape = encoder_shape(checkpoint, step)
    tokenizer = Tokenizer(checkpoint, vocabulary, shape.vocab_size, Limits(length, too_long))
    with working(f"reading {source}"):
        counts, content = _count_tokens(source, tokenizer)
    tokenizer.report_cut()
    row_sizes = counts if pool is None else np.ones_like(counts)
    offsets = np.concatenate([[0], np.cumsum(row_sizes)]).astype(np.int64)
    partial = out.with_name(f".{out.name}.partial")
    with folder_lock(partial, "encoding", fix="Wait for it to end, or choose another --out."):
        with working(f"reading {checkpoint}"):
            model = open_encoder(checkpoint, dtype, step)
        request = {
            "model": model.digest,
            "computation": model.computation(),
            "rows": content,
            "vocabulary": tokenizer.identity(),
            "settings": [pool, dtype, length, too_long, out.suffix],
        }
        layout = _Layout(offsets, shape.d_model, _DTYPES[dtype], out.suffix)
        parts = _Partial(partial, request, layout)
        rows = islice(_rows(source, tokenizer), parts.done, None)
        with (
            writing(out),
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


def _check_output(out: Path, dtype: DType) -> None:
    if out.suffix not in SUFFIXES:
        raise UserError(
            f"The output's name ends in {out.suffix!r}.",
            where=f"--out {out}",
            fix=f"Choose {' or '.join(SUFFIXES)}.",
        )
    if out.suffix == ".npz" and dtype != "float32":
        raise UserError(
            f"NumPy's files have no {dtype}.",
            where=f"--out {out}",
            fix="Write .safetensors, or encode in float32.",
        )
    if out.exists():
        raise UserError(
            "The file exists.", where=f"--out {out}", fix="Choose another name, or remove it."
        )


# ---- Rows ----------------------------------------------------------------------------------------


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
    except FileNotFoundError as error:
        raise UserError("There is no such file.", where=str(source)) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"The file is not UTF-8: {error.reason}.", where=str(source), fix="Save it as UTF-8."
        ) from error


def _json_row(line: str, where: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The line is not JSON: {error}.", where=where) from error
    if not isinstance(row, str | list):
        raise UserError(
            "The line is neither a JSON string nor a list of token ids.",
            where=where,
            fix='Write "a text" or [37, 1712, 1] on each line.',
        )
    return row


# ---- The output ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where everything lies in the output.

    Attributes:
      offsets: First row of each text in `embeddings`, and their number at the end.
      width: d_model.
      dtype: Of `embeddings`.
      suffix: The output's format.
    """

    offsets: np.ndarray
    width: int
    dtype: np.dtype
    suffix: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of `embeddings`."""
        return self.width * self.dtype.itemsize

    def head(self) -> bytes:
        """What precedes `embeddings`: all of safetensors' header, or that of a .npy file."""
        shape = (int(self.offsets[-1]), self.width)
        if self.suffix == ".npz":
            header = io.BytesIO()
            about = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(header, about)
            return header.getvalue()
        end = shape[0] * self.row_bytes
        entries = {
            EMBEDDINGS: {
                "dtype": {2: "BF16", 4: "F32"}[self.dtype.itemsize],
                "shape": shape,
                "data_offsets": [0, end],
            },
            OFFSETS: {
                "dtype": "I64",
                "shape": self.offsets.shape,
                "data_offsets": [end, end + self.offsets.nbytes],
            },
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # align the arrays
        return struct.pack("<Q", len(text)) + text

    def finish(self, file: BinaryIO, out: Path) -> None:
        """Completes the output and gives it its name."""
        complete = Path(file.name)
        if self.suffix == ".npz":
            file.flush()
            complete = complete.with_name("complete.npz")
            with open(complete, "wb") as target, zipfile.ZipFile(target, "w") as archive:
                with archive.open(f"{EMBEDDINGS}.npy", "w", force_zip64=True) as entry:
                    file.seek(0)
                    shutil.copyfileobj(file, entry, 1 << 20)
                with archive.open(f"{OFFSETS}.npy", "w") as entry:
                    np.lib.format.write_array(entry, self.offsets)
        else:
            file.write(self.offsets.tobytes())
            file.flush()
        sync(complete)
        os.replace(complete, out)
        sync_directory(out.parent)


class _Partial:
    """What has been encoded so far, in a hidden folder beside the output.

    Args:
      folder: The folder.
      request: Everything that decides the output's content. What another request left is removed.
      layout: The output's layout.
    """

    def __init__(self, folder: Path, request: dict[str, Any], layout: _Layout):
        self._data, self._record = folder / "data", folder / "progress.json"
        self._request, self._layout = json.loads(json.dumps(request)), layout
        self.done = 0
        if self._record.is_file() and self._data.is_file():
            record = json.loads(self._record.read_text())
            former = record["request"]
            changed = [key for key, value in self._request.items() if former.get(key) != value]
            if changed:
                say(f"starting over: other {', '.join(changed)} than the interrupted command's")
            else:
                self.done = record["done"]

    def open(self) -> BinaryIO:
        """The data, open behind its last recorded row."""
        head, end = self._layout.head(), int(self._layout.offsets[self.done])
        file = open(self._data, "r+b" if self.done else "w+b")
        file.write(head)
        file.truncate(len(head) + end * self._layout.row_bytes)
        file.seek(0, os.SEEK_END)
        return file

    def record(self, file: BinaryIO, rows: int) -> None:
        """Records that so many more rows are in the data."""
        file.flush()
        os.fsync(file.fileno())
        self.done += rows
        write_atomically(self._record, json.dumps({"request": self._request, "done": self.done}))
