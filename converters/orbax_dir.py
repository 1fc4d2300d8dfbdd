"""Reads and writes Orbax directories one tensor at a time.

`ocp.PyTreeCheckpointHandler` saves and restores whole trees; reading and writing single tensors
means that a checkpoint need not fit into memory. It writes the layout that Orbax calls "not OCDBT":
one directory per array, named by its path with dots, holding a Zarr 2 array of one uncompressed
chunk, plus two JSON files. Orbax restores it like its own. It reads that layout with any chunks and
compression (through TensorStore), and OCDBT's single key-value store.
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
from t0repro.files import make_folder, write_atomically

METADATA = "_METADATA"
_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_ARRAY = ".zarray"


def is_orbax(path: str) -> bool:
    """Returns whether a directory is a complete Orbax checkpoint, or one of this project's."""
    names = (INTEGRITY, METADATA, _CHECKPOINT_METADATA)
    return any(storage.is_file(storage.join(path, name)) for name in names)


class OrbaxArrays:
    """The arrays of an Orbax directory by their paths in the tree ("target/a/kernel").

    Args:
      path: The directory that holds the arrays. In a remote one, arrays in plain files, as this
        project writes them, are read in place; others are copied here, each when it is read, but an
        OCDBT store is copied whole.

    Raises:
      UserError: If there are none, or a file is missing or has another length than was written.
    """

    def __init__(self, path: str):
        self._path = path if storage.is_remote(path) else os.path.abspath(path)
        self._ocdbt = storage.is_file(self._inside("manifest.ocdbt"))
        self._copy = storage.LocalCopy(self._path) if self._ocdbt else None
        self._integrity = read_integrity(self._path)
        if self._copy is not None:
            # In OCDBT's store an array has no file of its own to be checked when it is read.
            check_contents(self._copy.path, self._integrity)
        self._chunks: dict[str, set[str]] = {}  # array -> its chunks, of an OCDBT store
        self._metadata = dict(self._list())
        self.tensors = {
            name: _info(self._inside(name.replace("/", ".")), value)
            for name, value in self._metadata.items()
        }

    @property
    def has_integrity(self) -> bool:
        """Whether there is a list of all files with their checksums."""
        return bool(self._integrity)

    def unchecked(self) -> list[str]:
        """Lists the arrays that may lack chunks without anyone noticing: those with a fill value.

        TensorStore leaves out chunks that hold only the fill value, and reads a lost chunk as the
        same. Without a fill value it writes every chunk, so a lost one is noticed.
        """
        return [
            name
            for name, metadata in self._metadata.items()
            if metadata.get("fill_value") is not None and not self._integrity
        ]

    def read(self, name: str) -> np.ndarray:
        """Reads one array as stored.

        Raises:
          UserError: if it cannot be read or is not what was written.
        """
        info, metadata = self.tensors[name], self._metadata[name]
        chunk_name = f"{name.replace('/', '.')}/{_chunk_name(metadata)}"
        chunk = self._inside(chunk_name)
        # Fast path for arrays as this project writes them: one uncompressed chunk, read
        # straight into memory.
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
        # TensorStore decodes chunks and compression of every kind, but reads only local
        # files here.
        if self._copy is not None:
            store = self._ocdbt_store(self._copy.path, name.replace("/", "."))
            chunks = self._chunks.get(name, set())
        else:
            copy = storage.LocalCopy(directory)
            store = {"driver": "file", "path": f"{copy.path}/"}
            chunks = {os.path.relpath(file, copy.path) for file in storage.walk(copy.path)}
        for chunk in _chunk_names(self._metadata[name]):
            if chunk not in chunks:
                raise UserError(
                    f"A chunk of {name} is missing.",
                    where=storage.join(directory, chunk),
                    fix="Copy the whole directory again, or choose another checkpoint.",
                )
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
        # No address, in which %, # and ? of a folder's name would mean something else.
        base = {"driver": "file", "path": f"{path}/"}
        return {"driver": "ocdbt", "base": base, "path": array and f"{array}/"}

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
                # No array's name has a slash, but a chunk's may.
                array, _, name = key.decode().partition("/")
                array = array.replace(".", "/")
                self._chunks.setdefault(array, set()).add(name)
                if name in (_ARRAY, "zarr.json"):
                    yield array, _parse(self._path, store.read(key).result().value)
        except UserError:
            raise
        except Exception as error:  # TensorStore raises many kinds for a damaged store.
            raise damaged(self._path, str(error).splitlines()[0]) from error


def _parse(path: str, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise damaged(path, "it is not JSON") from None
    if not isinstance(parsed, dict):
        raise damaged(path, "it is not a description of an array")
    return parsed


def _info(path: str, metadata: Mapping[str, Any]) -> TensorInfo:
    """The shape and type of an array.

    Raises:
      UserError: if the description gives none that an array of numbers can have.
    """
    try:
        name = metadata["dtype"] if "dtype" in metadata else metadata["data_type"]
        dtype = np.dtype(str(name))
        shape = tuple(metadata["shape"])
    except (KeyError, TypeError, ValueError):
        raise damaged(path, "its description has no shape or no type") from None
    # Numbers only: an array of objects ("O") would be unpickled, which can run any code.
    is_number = dtype.kind in "biuf" or dtype == np.dtype("bfloat16")
    if not is_number or not all(type(size) is int and size >= 0 for size in shape):
        raise damaged(path, f"it describes an array of {name!r} and shape {list(shape)}")
    return TensorInfo(shape, dtype)


def _chunk_names(metadata: Mapping[str, Any]) -> Iterator[str]:
    """The chunks that an array must have: all if no fill value stands for those left out."""
    if metadata.get("zarr_format") != 2 or metadata.get("fill_value") is not None:
        return
    counts = [
        # Rounded up: chunks at the ends may stick out.
        -(-size // chunk)
        for size, chunk in zip(metadata["shape"], metadata["chunks"], strict=True)
    ]
    separator = metadata.get("dimension_separator", ".")
    for place in np.ndindex(*counts):
        # A scalar has one chunk, "0".
        yield separator.join(map(str, place)) or "0"


def _is_plain(metadata: Mapping[str, Any]) -> bool:
    """Whether an array is one chunk of its bytes and nothing else."""
    return (
        metadata.get("zarr_format") == 2
        and metadata["compressor"] is None
        and not metadata.get("filters")
        and metadata["order"] == "C"
        and list(metadata["chunks"]) == list(metadata["shape"])
        # An array without elements has no chunk to read.
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
      path: The directory, created if missing; files of an interrupted writer can be kept.
      extra_files: Name -> content of further files, written at the end.
      item: Folder inside `path` for the tree, as Orbax's CheckpointManager has one for each item of
        a checkpoint; by default the tree is in `path` itself.
      metadata: Whether to write Orbax's own metadata; False for directories that another reader
        must not mistake for Orbax's.
    """

    def __init__(
        self,
        path: Path,
        extra_files: Mapping[str, bytes] | None = None,
        *,
        item: str = "",
        metadata: bool = True,
    ):
        self._root, self._path = path, path / item
        self._extra_files = dict(extra_files or {})
        self._metadata = metadata
        self._names: list[str] = []
        self._files: dict[str, Written] = {}
        make_folder(self._path)

    def add(self, output: Output, array: np.ndarray) -> None:
        """Writes an array under its tree path."""
        directory = self._path / output.name.replace("/", ".")
        directory.mkdir(exist_ok=True)
        # `_chunk_name`'s default separator is the one that `_zarray` writes.
        chunk = directory / _chunk_name({"shape": array.shape})
        self._write(chunk, bytes_of(array))
        self._write(directory / _ARRAY, memoryview(_zarray(array).encode()))
        self._names.append(output.name)

    def stored(self, output: Output) -> np.ndarray | None:
        """Returns what is stored of an array, or None; the metadata is written after the values."""
        directory = self._path / output.name.replace("/", ".")
        chunk = directory / _chunk_name({"shape": output.info.shape})
        if not (directory / _ARRAY).is_file() or not chunk.is_file():
            return None
        if chunk.stat().st_size != output.info.nbytes:
            return None
        array = recycling.empty(output.info.shape, output.info.dtype)
        return array if _fill(array, chunk) else None

    def keep(self, output: Output, array: np.ndarray) -> None:
        """Adds an array that is there already to the lists of names and files."""
        directory = self._path / output.name.replace("/", ".")
        self._enter(directory / _chunk_name({"shape": array.shape}), bytes_of(array))
        self._enter(directory / _ARRAY, memoryview((directory / _ARRAY).read_bytes()))
        self._names.append(output.name)

    def close(self) -> None:
        """Writes the metadata, and the list of all files last."""
        small = dict(self._extra_files)
        if self._metadata:
            small[METADATA] = _tree_metadata(self._names)
            if self._root == self._path:
                small[_CHECKPOINT_METADATA] = _checkpoint_metadata(_HANDLER)
            else:
                # Orbax's CheckpointManager looks for the mark in the checkpoint's
                # own folder, not in its items'.
                write_atomically(self._root / _CHECKPOINT_METADATA, _checkpoint_metadata(None))
        for name, content in small.items():
            self._write(self._path / name, memoryview(content))
        # Everything is on the disk before the listing that vouches for it.
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
    # numpy's own code for bfloat16 is a void type ("<V2"); Zarr's readers go by the name.
    dtype = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
    return json.dumps(
        {
            "chunks": list(array.shape),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype,
            # Without a fill value TensorStore reports a lost chunk instead of reading
            # zeros.
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


def _checkpoint_metadata(handler: str | None) -> bytes:
    """Orbax's mark of a finished checkpoint; names the handler if one reads it all."""
    now = time.time_ns()
    description: dict[str, Any] = {"init_timestamp_nsecs": now, "commit_timestamp_nsecs": now}
    if handler:
        description |= {
            "item_handlers": handler,
            "metrics": {},
            "performance_metrics": {},
            "custom_metadata": {},
        }
    return json.dumps(description).encode()
