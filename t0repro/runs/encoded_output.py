"""The file of encoder outputs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from t0repro.config.model import DType
from t0repro.converters.safetensors_files import file_header
from t0repro.converters.tensors import TensorInfo
from t0repro.errors import UserError
from t0repro.progress import say
from t0repro.storage import write_atomically
from t0repro.storage.disk import sync

SUFFIXES = (".safetensors", ".npz")


DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def check_files(source: Path, out: Path, dtype: DType) -> None:
    """Refuses texts that are no file, and a file name or a type that the output cannot have."""
    if not source.is_file():
        what = "is a folder" if source.is_dir() else "does not exist"
        raise UserError(
            f"The file of texts {what}.", where=f"--texts {source}", fix="Name a file of texts."
        )
    if source.suffix in (".csv", ".tsv", ".json"):
        raise UserError(
            f"A {source.suffix} file holds rows: each of its lines would be taken for a text.",
            where=f"--texts {source}",
            fix="Write one text a line, or a .jsonl file with a JSON string a line.",
        )
    if out.suffix not in SUFFIXES:
        raise UserError(
            f"The output's name does not end in {' or '.join(SUFFIXES)}.",
            where=f"--out {out}",
            fix=f"Name it {out.with_suffix(SUFFIXES[0])}, for example.",
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


@dataclasses.dataclass(frozen=True)
class OutputLayout:
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

    def head(self) -> bytes:
        """What precedes `embeddings`: all of safetensors' header, or that of a .npy file."""
        shape = (int(self.offsets[-1]), self.width)
        if self.suffix == ".npz":
            header = io.BytesIO()
            about = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(header, about)
            return header.getvalue()
        infos = {
            EMBEDDINGS: TensorInfo(shape, self.dtype),
            OFFSETS: TensorInfo(self.offsets.shape, self.offsets.dtype),
        }
        return file_header(infos)[0]

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
        sync(out.parent)


class PartialOutput:
    """What has been encoded so far, in a hidden folder beside the output.

    Args:
      folder: The folder.
      request: Everything that decides the output's content. What another request left is removed.
      layout: The output's layout.
    """

    def __init__(self, folder: Path, request: dict[str, Any], layout: OutputLayout):
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
        layout, head = self._layout, self._layout.head()
        rows = int(layout.offsets[self.done])
        file = open(self._data, "r+b" if self.done else "w+b")
        file.write(head)
        file.truncate(len(head) + rows * layout.width * layout.dtype.itemsize)
        file.seek(0, os.SEEK_END)
        return file

    def record(self, file: BinaryIO, rows: int) -> None:
        """Records that so many more rows are in the data."""
        file.flush()
        os.fsync(file.fileno())
        self.done += rows
        write_atomically(self._record, json.dumps({"request": self._request, "done": self.done}))


EMBEDDINGS, OFFSETS = "embeddings", "offsets"
