"""Files of the safetensors format, read and written one tensor at a time.

A file is the length of a JSON header (8 bytes, little-endian), the header (name -> dtype, shape and
place; `__metadata__` -> strings), and the tensors' bytes in sequence, little-endian and
C-contiguous (github.com/huggingface/safetensors, README). The safetensors package can write a file
only if all its tensors are in memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from t0repro import storage
from t0repro.converters import tensors
from t0repro.converters.tensors import Output, TensorInfo, bytes_of
from t0repro.converters.witnesses import damage_error, lost_file_error
from t0repro.errors import UserError
from t0repro.storage.disk import name_in_errors

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # bytes, of the safetensors package
_VALUES_LIMIT = 500_000  # T5 11B with its slots has 3,000 tensors, of 6 values each


class SafetensorsFile:
    """A file open for reading.

    Args:
      path: The file.

    Raises:
      UserError: If it is missing, truncated or not a safetensors file.
    """

    def __init__(self, path: str):
        self._path = path
        self._header, self._start = _read_header(path)
        # Remove it, so that the rest of the header contains only tensors.
        metadata = self._header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise damage_error(path, "the __metadata__ in its header are not strings by name")
        self.metadata: dict[str, str] = metadata
        self.tensors = {name: _info(path, name, entry) for name, entry in self._header.items()}
        end = _end(path, {name: entry["data_offsets"] for name, entry in self._header.items()})
        if (actual := storage.file_size(path)) != self._start + end:
            raise damage_error(
                path, f"it has {actual:,} bytes, but its header calls for {self._start + end:,}"
            )

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor."""
        info = self.tensors[name]
        begin, _ = self._header[name]["data_offsets"]
        array = tensors.empty(info.shape, info.dtype)
        if not storage.read_into(self._path, self._start + begin, bytes_of(array)):
            raise damage_error(self._path, f"{name} goes beyond its end")
        array.flags.writeable = False
        return array


def _read_header(path: str) -> tuple[dict[str, Any], int]:
    try:
        size = storage.file_size(path)
    except OSError:
        raise lost_file_error(path) from None
    first = storage.read(path, 0, 8)
    # The check below refuses a file too short for the length.
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
    if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
        raise damage_error(path, "it does not begin as a safetensors file does")
    content = storage.read(path, 8, length)
    # Counting takes no time; parsing millions of values takes half a minute and a gigabyte.
    if content.count(b",") > _VALUES_LIMIT:
        raise damage_error(path, "its header lists more than any T5 has")
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        raise damage_error(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise damage_error(path, "its header is not a list of tensors")
    return header, 8 + length


def _end(path: str, places: Mapping[str, tuple[int, int]]) -> int:
    """Where the last tensor ends. As in the safetensors package, tensors leave no gaps."""
    end = 0
    for name, (begin, until) in sorted(places.items(), key=lambda item: tuple(item[1])):
        if begin != end:
            raise damage_error(
                path, f"{name} begins at {begin:,}, but the tensor before it ends at {end:,}"
            )
        end = until
    return end


def _info(path: str, name: str, entry: Mapping[str, Any]) -> TensorInfo:
    try:
        type_name, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise damage_error(path, f"its header does not describe {name}") from None
    sizes = (*shape, begin, end)
    # Python treats a bool as an int, and a negative place would count from the file's end.
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise damage_error(
            path, f"its header gives {name} the shape {list(shape)} at {begin} to {end}"
        )
    dtype = _DTYPES.get(type_name)
    if dtype is None:
        raise UserError(
            f"{name} is of the type {type_name}, in which no T5 is stored.",
            where=path,
            fix="Save the model in float32, bfloat16 or float16, without quantization.",
        )
    info = TensorInfo(shape, dtype)
    if end - begin != info.nbytes:
        raise damage_error(
            path, f"{name} takes {end - begin:,} bytes, but its shape calls for {info.nbytes:,}"
        )
    return info


def file_header(
    infos: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Everything in a file before its tensors, and each tensor's place in the file, by name."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places, offset = {}, 0
    for name, info in infos.items():
        places[name] = offset
        end = offset + info.nbytes
        entries[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align tensors to 8 bytes
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + place for name, place in places.items()}


class SafetensorsWriter:
    """Writes tensors of known shapes into files of known names, at known places.

    Args:
      directory: The files' folder, where an interrupted writer's are used, or an address.
      outputs: Everything that will be written, each with the name of its file.
      metadata: Strings for every file's header.
    """

    def __init__(
        self, directory: str, outputs: list[Output], metadata: Mapping[str, str] | None = None
    ):
        self._directory = directory
        self._places: dict[str, int] = {}
        self._files: dict[str, BinaryIO] = {}
        # transformers refuses weights whose header does not name the framework that wrote them.
        metadata = metadata or {"format": "pt"}
        for name in dict.fromkeys(output.file for output in outputs):
            self._prepare(name, [o for o in outputs if o.file == name], metadata)

    def _prepare(self, name: str, outputs: list[Output], metadata: Mapping[str, str]) -> None:
        header, places = file_header({o.name: o.info for o in outputs}, metadata)
        self._places |= places
        # Do not truncate: an interrupted writer's tensors may be kept.
        self._files[name] = storage.open_new(storage.join(self._directory, name), resume=True)
        self._files[name].write(header)

    def read_back(self, output: Output) -> np.ndarray | None:
        """Returns an earlier writer's bytes for a tensor, or None."""
        path, place = Path(self._directory, output.file), self._places[output.name]
        if path.stat().st_size < place + output.info.nbytes:
            return None
        array = tensors.empty(output.info.shape, output.info.dtype)
        return array if storage.read_into(str(path), place, bytes_of(array)) else None

    def keep(self, output: Output, array: np.ndarray) -> None:
        """Nothing to do: the place is filled already."""

    def add(self, output: Output, array: np.ndarray) -> None:
        """Writes a tensor in its place."""
        file, place = self._files[output.file], self._places[output.name]
        # Tensors come in the order of their places, so only kept ones are passed over.
        if file.tell() != place:
            file.seek(place)
        with name_in_errors(file.name):
            file.write(bytes_of(array))
            # Flushed: once the log names a tensor as written, a killed process must not lose it.
            file.flush()

    def close(self) -> None:
        """Completes the files."""
        for file in self._files.values():
            storage.finish(file)

    def abandon(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def index_text(outputs: list[Output]) -> str:
    """The text of model.safetensors.index.json."""
    total = sum(output.info.nbytes for output in outputs)
    weights = {output.name: output.file for output in outputs}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)


def shard_names(sizes: list[int], limit: int) -> list[str]:
    """Assigns tensors, by their sizes in bytes and in their order, to files."""
    # Infinite, so that the first tensor begins the first shard.
    shards, filled = [], math.inf
    number = 0
    for size in sizes:
        if filled + size > limit:
            number, filled = number + 1, 0
        filled += size
        shards.append(number)
    # One shard has a plain name and no index.
    if number <= 1:
        return ["model.safetensors"] * len(sizes)
    return [f"model-{shard:05d}-of-{number:05d}.safetensors" for shard in shards]
