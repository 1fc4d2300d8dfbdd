"""Orbax directories, one tensor at a time.

`ocp.PyTreeCheckpointHandler` saves and restores whole trees; here a tensor is read or written by
itself, so that a checkpoint need not fit into memory. Written is the layout that Orbax calls "not
OCDBT": a directory per array, named by its path with dots, a Zarr 2 array of one chunk without
compression, and two JSON files. Orbax restores it like its own. Read are both that layout, with any
chunks and compression (through TensorStore), and OCDBT's single key-value store.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.converters import recycling, storage
from t0repro.converters.integrity import (
    INTEGRITY,
    Written,
    check_contents,
    damaged,
    read_integrity,
    write_integrity,
)
from t0repro.converters.tensors import Output, TensorInfo, bytes_of, sync_all
from t0repro.errors import UserError

_METADATA = "_METADATA"
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_ARRAY = ".zarray"


def is_orbax(path: str) -> bool:
    """Whether a directory is a whole Orbax checkpoint, or one of this project's."""
    names = (INTEGRITY, _METADATA, "_CHECKPOINT_METADATA")
    return any(storage.is_file(storage.join(path, name)) for name in names)


class OrbaxArrays:
    """The arrays of an Orbax directory by their paths in the tree ("target/a/kernel").

    Args:
      path: the directory that holds the arrays. Of a remote one, arrays that lie there plainly, as
        this project writes them, are read where they are; others are copied here, each when it is
        read, but all at once if they are in OCDBT's store.

    Raises:
      UserError: if there are none, or a file is missing or of another length than was written.
    """

    def __init__(self, path: str):
        self._path = path if storage.is_remote(path) else os.path.abspath(path)
        self._ocdbt = storage.is_file(self._inside("manifest.ocdbt"))
        self._copy = storage.LocalCopy(self._path) if self._ocdbt else None
        self._integrity = read_integrity(self._path)
        if self._copy is not None:
            # In OCDBT's store an array has no file of its own to be checked when it is read.
            check_contents(self._copy.path, self._integrity)
        self._metadata = dict(self._list())
        self.tensors = {name: _info(value) for name, value in self._metadata.items()}

    def read(self, name: str) -> np.ndarray:
        """One array as it is stored.

        Raises:
          UserError: if it cannot be read or is not what was written.
        """
        info, metadata = self.tensors[name], self._metadata[name]
        chunk_name = f"{name.replace('/', '.')}/{_chunk_name(metadata)}"
        chunk = self._inside(chunk_name)
        if self._ocdbt or not _is_plain(metadata) or not storage.is_file(chunk):
            return self._read_by_tensorstore(name)
        array = recycling.empty(info.shape, info.dtype)
        if (size := storage.size(chunk)) != info.nbytes or not storage.read_into(chunk, 0, array):
            raise damaged(chunk, f"it has {size:,} bytes, not {info.nbytes:,}")
        expected = self._integrity.get(chunk_name)
        if expected and _crc32(array) != expected["crc32"]:
            raise damaged(chunk, "its CRC-32 differs from what was written")
        return array

    def _inside(self, name: str) -> str:
        return storage.join(self._path, name)

    def _read_by_tensorstore(self, name: str) -> np.ndarray:
        import tensorstore as ts

        directory = self._inside(name.replace("/", "."))
        if self._copy is not None:
            store = self._ocdbt_store(self._copy.path, name.replace("/", "."))
        else:
            copy = storage.LocalCopy(directory)
            store = {"driver": "file", "path": f"{copy.path}/"}
        spec = {"driver": self._driver(name), "kvstore": store}
        try:
            return np.asarray(ts.open(spec, read=True).result().read().result())
        except Exception as error:  # TensorStore raises many kinds for a damaged file.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise damaged(directory, reason) from error

    def _driver(self, name: str) -> str:
        return "zarr3" if self._metadata[name].get("zarr_format") == 3 else "zarr"

    @staticmethod
    def _ocdbt_store(path: str, array: str = "") -> dict[str, Any]:
        return {"driver": "ocdbt", "base": f"file://{path}/", "path": array and f"{array}/"}

    def _list(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Tree path and Zarr metadata of each array."""
        if self._copy is None:
            for name in storage.names(self._path):
                file = self._inside(f"{name}/{_ARRAY}")
                if storage.is_file(file):
                    yield name.replace(".", "/"), _parse(file, storage.read(file))
            return
        import tensorstore as ts

        try:
            store = ts.KvStore.open(self._ocdbt_store(self._copy.path)).result()
            for key in store.list().result():
                array, _, name = key.decode().rpartition("/")
                if name in (_ARRAY, "zarr.json"):
                    yield (
                        array.replace(".", "/"),
                        _parse(self._path, store.read(key).result().value),
                    )
        except UserError:
            raise
        except Exception as error:  # TensorStore raises many kinds for a damaged store.
            raise damaged(self._path, str(error).splitlines()[0]) from error


def _parse(path: str, content: bytes) -> dict[str, Any]:
    try:
        return json.loads(content)
    except ValueError:
        raise damaged(path, "it is no JSON") from None


def _info(metadata: Mapping[str, Any]) -> TensorInfo:
    name = metadata.get("dtype") or metadata["data_type"]
    return TensorInfo(tuple(metadata["shape"]), np.dtype(name))


def _is_plain(metadata: Mapping[str, Any]) -> bool:
    """Whether an array is one chunk of its bytes and nothing else."""
    return (
        metadata.get("zarr_format") == 2
        and metadata["compressor"] is None
        and not metadata.get("filters")
        and metadata["order"] == "C"
        and list(metadata["chunks"]) == list(metadata["shape"])
        and math.prod(metadata["shape"]) > 0
    )


def _chunk_name(metadata: Mapping[str, Any]) -> str:
    return metadata.get("dimension_separator", ".").join("0" for _ in metadata["shape"]) or "0"


def _fill(array: np.ndarray, file: Path) -> bool:
    return storage.read_into(str(file), 0, array)


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(bytes_of(array))


class OrbaxWriter:
    """Writes an Orbax directory, array by array.

    Args:
      path: the directory, made if it is not there; what an interrupted writer left there is used.
      extra_files: name -> content of further files, written at the end.
    """

    def __init__(self, path: Path, extra_files: Mapping[str, bytes] | None = None):
        self._path = path
        self._extra_files = dict(extra_files or {})
        self._names: list[str] = []
        self._files: dict[str, Written] = {}
        path.mkdir(parents=True, exist_ok=True)

    def add(self, output: Output, array: np.ndarray) -> None:
        """Writes an array under its tree path."""
        directory = self._path / output.name.replace("/", ".")
        directory.mkdir(exist_ok=True)
        chunk = directory / _chunk_name({"shape": array.shape})
        self._write(chunk, bytes_of(array))
        self._write(directory / _ARRAY, memoryview(_zarray(array).encode()))
        self._names.append(output.name)

    def stored(self, output: Output) -> np.ndarray | None:
        """What is there of an array; its metadata is written after its values."""
        directory = self._path / output.name.replace("/", ".")
        chunk = directory / _chunk_name({"shape": output.info.shape})
        if not (directory / _ARRAY).is_file() or chunk.stat().st_size != output.info.nbytes:
            return None
        array = recycling.empty(output.info.shape, output.info.dtype)
        return array if _fill(array, chunk) else None

    def keep(self, output: Output, array: np.ndarray) -> None:
        """Enters an array that is there into the lists of names and files."""
        directory = self._path / output.name.replace("/", ".")
        self._enter(directory / _chunk_name({"shape": array.shape}), bytes_of(array))
        self._enter(directory / _ARRAY, memoryview((directory / _ARRAY).read_bytes()))
        self._names.append(output.name)

    def close(self) -> None:
        """Writes the metadata, and the list of all files last."""
        small = {
            _METADATA: _tree_metadata(self._names),
            "_CHECKPOINT_METADATA": _checkpoint_metadata(),
            **self._extra_files,
        }
        for name, content in small.items():
            self._write(self._path / name, memoryview(content))
        sync_all([self._path / name for name in self._files])
        write_integrity(self._path, self._files)

    def abandon(self) -> None:
        """Nothing is open between two arrays."""

    def _write(self, path: Path, content: memoryview) -> None:
        with open(path, "wb") as file:
            file.write(content)
        self._enter(path, content)

    def _enter(self, path: Path, content: memoryview) -> None:
        name = path.relative_to(self._path).as_posix()
        self._files[name] = {"bytes": content.nbytes, "crc32": zlib.crc32(content)}


def _zarray(array: np.ndarray) -> str:
    dtype = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
    return json.dumps(
        {
            "chunks": list(array.shape),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(array.shape),
            "zarr_format": 2,
        }
    )


def _tree_metadata(names: list[str]) -> bytes:
    """Orbax's description of a tree of dictionaries (key type 2) of numpy arrays."""
    entries = {}
    for name in names:
        keys = name.split("/")
        entries[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    description = {
        "tree_metadata": entries,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(description).encode()


def _checkpoint_metadata() -> bytes:
    now = time.time_ns()
    description = {
        "item_handlers": _HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    return json.dumps(description).encode()
