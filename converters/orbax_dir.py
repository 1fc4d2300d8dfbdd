"""Reads and writes Orbax directories one tensor at a time.

`ocp.PyTreeCheckpointHandler` saves and restores whole trees; reading and writing single tensors
means that a checkpoint need not fit into memory. This module writes the layout that Orbax calls
"not OCDBT": a directory per array, named by its path with dots, with a Zarr 2 array of one
uncompressed chunk, plus two JSON files. Orbax restores it like its own. This module reads that
layout with any chunks and compression (through TensorStore), and OCDBT's single key-value store.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro import storage
from t0repro.converters import tensors
from t0repro.converters.tensors import Output, TensorInfo, bytes_of
from t0repro.converters.witnesses import (
    INTEGRITY,
    OrbaxTree,
    Written,
    check_contents,
    check_names,
    damage_error,
    lost_file_error,
    orbax_tree,
    read_checked,
    read_integrity,
    write_integrity,
)
from t0repro.errors import UserError
from t0repro.storage.access import store_error

METADATA = "_METADATA"
_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"  # Orbax's marker in a bucket

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_ARRAY = ".zarray"
_OCDBT = "manifest.ocdbt"
# The name of a chunk in either version of Zarr: numbers, possibly after "c".
_IS_CHUNK = re.compile(r"(?:c[./])?\d+(?:[./]\d+)*|c")


def is_orbax(path: str) -> bool:
    """Returns whether a directory is a complete Orbax checkpoint, or one of this project's."""
    if storage.is_address(path):
        return _is_committed(path)
    # On a disk, a checkpoint gets its folder's name by a rename once it is complete.
    names = (INTEGRITY, METADATA, _CHECKPOINT_METADATA)
    return any(storage.is_file(storage.join(path, name)) for name in names)


def _is_committed(path: str) -> bool:
    """Whether an Orbax directory in a bucket, which appears file by file, is complete."""
    names = set(storage.list_names(path))
    # Orbax writes COMMITTED last, this project INTEGRITY.
    if not names.isdisjoint((INTEGRITY, COMMITTED)):
        return True
    if _CHECKPOINT_METADATA not in names:
        return METADATA in names
    # A copy of a local directory has no COMMITTED, but this time, which Orbax writes late too.
    try:
        described = json.loads(storage.read(storage.join(path, _CHECKPOINT_METADATA)))
        return described["commit_timestamp_nsecs"] is not None
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        return False


class OrbaxArrays:
    """The arrays of an Orbax directory by their paths in the tree ("target/a/kernel").

    Args:
      path: The directory with the arrays. A remote one is read in place; only arrays that this
        project did not write are copied here, from a store that TensorStore does not know.
      has_metadata: Whether `_METADATA` describes the tree, as in all of Orbax's directories today.

    Raises:
      UserError: If a file is missing or its length differs from what was written, or if the arrays
        are not those in `_METADATA`.
    """

    def __init__(self, path: str, *, has_metadata: bool = True):
        self._path = storage.absolute(path)
        self.integrity = read_integrity(self._path)
        tree = self._tree() if has_metadata else None
        self._has_every_chunk = tree is not None and tree.has_every_chunk
        self._ocdbt = storage.is_file(self._inside(_OCDBT))
        self._base = _Base(self._path) if self._ocdbt else None
        if self._base is not None:
            # In an OCDBT store, an array has no file of its own to check on reading.
            check_contents(self._base.path, self.integrity)
        self._sizes = storage.file_sizes(self._path)
        self._chunks: dict[str, set[str]] = {}  # array -> its chunks, of an OCDBT store
        # Names of arrays have no dots; in the tree, a slash takes their place.
        self._arrays = {name.replace(".", "/"): array for name, array in self._list()}
        if tree is not None:
            check_names(self._arrays, tree.arrays, tree.file, self.place)
        self.tensors = {name: description.info for name, description in self._arrays.items()}

    @property
    def has_integrity(self) -> bool:
        """Whether there is a list of all files with their checksums."""
        return bool(self.integrity)

    def list_unchecked(self) -> list[str]:
        """Lists the arrays whose missing chunks nothing would reveal: those with a fill value."""
        return [
            name
            for name, description in self._arrays.items()
            if not (self._is_complete(description) or self.integrity)
        ]

    def check_chunks(self) -> None:
        """Checks that every array has all of its chunks, as far as the files show.

        Raises:
          UserError: Naming a chunk that is missing or does not belong to its array.
        """
        for name in self._arrays:
            chunks = self._chunks.get(name)
            self._check_chunks(name, self._files(name) if chunks is None else chunks)

    def read(self, name: str) -> np.ndarray:
        """Reads one array as stored.

        Raises:
          UserError: if it cannot be read or differs from what was written.
        """
        description = self._arrays[name]
        info = description.info
        chunk_name = f"{name.replace('/', '.')}/{description.first_chunk}"
        chunk = self._inside(chunk_name)
        # Fast path for arrays written by this project: one uncompressed chunk, read straight into
        # memory.
        if self._ocdbt or not description.is_plain or chunk_name not in self._sizes:
            return self._read_by_tensorstore(name)
        array = tensors.empty(info.shape, info.dtype)
        size = self._sizes[chunk_name]
        if size != info.nbytes or not storage.read_into(chunk, 0, bytes_of(array)):
            raise damage_error(chunk, f"it has {size:,} bytes, not {info.nbytes:,}")
        expected = self.integrity.get(chunk_name)
        if expected and zlib.crc32(bytes_of(array)) != expected["crc32"]:
            raise damage_error(chunk, "its CRC-32 differs from what was written")
        return array

    def place(self, name: str) -> str:
        """Where a name's array is, or should be."""
        return self._inside(name.replace("/", "."))

    def _inside(self, name: str) -> str:
        return storage.join(self._path, name)

    def _tree(self) -> OrbaxTree:
        """The content of the directory's `_METADATA`."""
        file = self._inside(METADATA)
        if not storage.is_file(file):
            raise lost_file_error(file)
        tree = orbax_tree(file, read_checked(self._path, METADATA, self.integrity))
        if tree.is_ocdbt and not storage.is_file(store := self._inside(_OCDBT)):
            raise lost_file_error(store)
        return tree

    def _is_complete(self, description: _Description) -> bool:
        """Whether all chunks of an array were written."""
        # TensorStore omits chunks that contain only the fill value, and reads a lost chunk as if it
        # did. Without a fill value it writes every chunk. `_METADATA` may say that it did anyway.
        return self._has_every_chunk or not description.has_fill_value

    def _check_chunks(self, name: str, files: Collection[str]) -> None:
        description, directory = self._arrays[name], self.place(name)
        expected = set()
        for chunk in description.chunk_names():
            if chunk not in files and self._is_complete(description):
                raise UserError(
                    f"A chunk of {name} is missing.",
                    where=storage.join(directory, chunk),
                    fix="Copy the whole directory again, or choose another checkpoint.",
                )
            expected.add(chunk)
        chunks = filter(_IS_CHUNK.fullmatch, files)
        if surplus := next((chunk for chunk in chunks if chunk not in expected), None):
            raise damage_error(
                storage.join(directory, surplus),
                f"an array of shape {list(description.info.shape)} in chunks of"
                f" {list(description.chunks)} has no such chunk",
            )

    def _files(self, name: str) -> set[str]:
        """The files below an array's directory, by their names relative to it."""
        directory = f"{name.replace('/', '.')}/"
        return {file.removeprefix(directory) for file in self._sizes if file.startswith(directory)}

    def _read_by_tensorstore(self, name: str) -> np.ndarray:
        import tensorstore as ts

        array = name.replace("/", ".")
        directory = self._inside(array)
        # TensorStore decodes all kinds of chunks and compression.
        if self._base is not None:
            base = self._base
            store = base.ocdbt(array)
            self._check_chunks(name, self._chunks.get(name, set()))
        else:
            base = _Base(directory)
            store = base.spec
            files = self._files(name)
            self._check_chunks(name, files)
            written = {
                file: self.integrity[f"{array}/{file}"]
                for file in files
                if f"{array}/{file}" in self.integrity
            }
            check_contents(base.path, written)
        spec = {"driver": self._arrays[name].driver, "kvstore": store}
        try:
            opening = ts.open(spec, read=True, context=base.context)
            values = np.asarray(opening.result().read().result())
        except Exception as error:
            raise base.failure(error, directory) from error
        info = self.tensors[name]
        if (values.shape, values.dtype) != (info.shape, info.dtype):
            raise damage_error(directory, f"it holds {values.dtype} of shape {list(values.shape)}")
        return values

    def _check_described(self, described: Collection[str]) -> None:
        """Raises UserError if an array has chunks, but no description."""
        for file in self._sizes:
            array, _, chunk = file.partition("/")
            if array not in described and _IS_CHUNK.fullmatch(chunk):
                raise UserError(
                    f"The chunks of {array} are there, but not the file that describes them,"
                    f" {_DESCRIPTIONS[0]}.",
                    where=self._inside(array),
                    fix="Copy the files whose names begin with a dot too: `cp -r DIR`, not `cp"
                    " DIR/*`.",
                )

    def _list(self) -> Iterator[tuple[str, _Description]]:
        """Name with dots and description of each array."""
        if self._base is None:
            files = [file for file in self._sizes if file.partition("/")[2] in _DESCRIPTIONS]
            self._check_described({file.partition("/")[0] for file in files})
            contents = storage.call_at_once(
                lambda file: read_checked(self._path, file, self.integrity), files
            )
            for file, content in zip(files, contents, strict=True):
                yield file.partition("/")[0], _zarr_description(self._inside(file), content)
            return
        import tensorstore as ts

        try:
            store = ts.KvStore.open(self._base.ocdbt(), context=self._base.context).result()
            for key in store.list().result():
                # No array's name has a slash, but a chunk's may.
                array, _, name = key.decode().partition("/")
                self._chunks.setdefault(array.replace(".", "/"), set()).add(name)
                if name in _DESCRIPTIONS:
                    content = store.read(key).result().value
                    yield array, _zarr_description(self._inside(f"{_OCDBT}, {array}"), content)
        # `_zarr_description` has already named the array whose description is damaged.
        except UserError:
            raise
        except Exception as error:
            raise self._base.failure(error, self._path) from error


# With these, TensorStore says that a store did not do what it was asked.
_REFUSALS = (
    *("UNAVAILABLE", "DEADLINE", "PERMISSION", "UNAUTHENT", "RESOURCE", "ABORTED", "INTERNAL"),
)


class _Base:
    """A directory that TensorStore reads, in place or as a copy on this machine.

    Attributes:
      path: The directory or its copy.
      spec: TensorStore's name for it.
      context: What TensorStore keeps from one call to the next: an OCDBT store's tree.
    """

    def __init__(self, directory: str):
        import tensorstore as ts

        # Without this cache, TensorStore would read an OCDBT store's tree again for every array.
        self.context = ts.Context({"cache_pool#tree": {"total_bytes_limit": 1 << 24}})
        self.path = directory
        spec = storage.tensorstore_spec(directory)
        if spec is None:
            self._copy = storage.copy_here(directory)  # until this object is deleted
            assert self._copy is not None
            self.path = self._copy.path
            spec = storage.tensorstore_spec(self.path)
        assert spec is not None
        self.spec: dict[str, Any] = spec

    def ocdbt(self, array: str = "") -> dict[str, Any]:
        """TensorStore's name for an OCDBT store in the directory, or for one array of it."""
        # Not a URL, in which %, # and ? in a folder's name would have another meaning.
        path = array and f"{array}/"
        return {"driver": "ocdbt", "base": self.spec, "path": path, "cache_pool": "cache_pool#tree"}

    def failure(self, error: Exception, where: str) -> UserError:
        """The error for one of TensorStore's, which are of many kinds for a damaged file."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if storage.is_address(self.path) and reason.startswith(_REFUSALS):
            return store_error(error, where)
        return damage_error(where, reason)


class OrbaxWriter:
    """Writes an Orbax directory, array by array.

    Args:
      path: The directory, created if missing, or an address; files of an interrupted writer in a
        directory can be kept.
      extra_files: Name -> content of further files, written at the end.
      item: Folder inside `path` for the tree, as Orbax's CheckpointManager has one per item of a
        checkpoint; by default the tree is in `path` itself.
      metadata: Whether to write Orbax's own metadata; False for directories that other readers must
        not mistake for Orbax's.
    """

    def __init__(
        self,
        path: str,
        extra_files: Mapping[str, bytes] | None = None,
        *,
        item: str = "",
        metadata: bool = True,
    ):
        self._root, self._path = path, storage.join(path, item) if item else path
        self._extra_files = dict(extra_files or {})
        self._metadata = metadata
        self._names: list[str] = []
        self._files: dict[str, Written] = {}
        storage.make_folder(self._path)

    def add(self, output: Output, array: np.ndarray) -> None:
        """Writes an array under its tree path."""
        directory = output.name.replace("/", ".")
        storage.make_folder(storage.join(self._path, directory))
        self._write(f"{directory}/{_plain_chunk(array.shape)}", bytes_of(array))
        self._write(f"{directory}/{_ARRAY}", memoryview(_plain_text(array).encode()))
        self._names.append(output.name)

    def read_back(self, output: Output) -> np.ndarray | None:
        """Returns an array's stored bytes, or None; the metadata is written after the values."""
        directory = Path(self._path, output.name.replace("/", "."))
        chunk = directory / _plain_chunk(output.info.shape)
        if not (directory / _ARRAY).is_file() or not chunk.is_file():
            return None
        if chunk.stat().st_size != output.info.nbytes:
            return None
        array = tensors.empty(output.info.shape, output.info.dtype)
        return array if storage.read_into(str(chunk), 0, bytes_of(array)) else None

    def keep(self, output: Output, array: np.ndarray) -> None:
        """Adds an existing array to the lists of names and files."""
        directory = output.name.replace("/", ".")
        description = storage.read(storage.join(self._path, f"{directory}/{_ARRAY}"))
        self._enter(f"{directory}/{_plain_chunk(array.shape)}", bytes_of(array))
        self._enter(f"{directory}/{_ARRAY}", memoryview(description))
        self._names.append(output.name)

    def close(self) -> None:
        """Writes the metadata, and the list of all files last."""
        small = dict(self._extra_files)
        if self._metadata:
            small[METADATA] = _tree_metadata(self._names)
            if self._root == self._path:
                small[_CHECKPOINT_METADATA] = _checkpoint_metadata(_HANDLER)
            else:
                # Orbax's CheckpointManager looks for the marker in the checkpoint's own folder, not
                # in its items'.
                marker = storage.join(self._root, _CHECKPOINT_METADATA)
                storage.write_atomically(marker, _checkpoint_metadata(None))
        for name, content in small.items():
            self._write(name, memoryview(content))
        # Sync everything before the listing that vouches for it.
        storage.sync_all(storage.join(self._path, name) for name in self._files)
        write_integrity(self._path, self._files)

    def abandon(self) -> None:
        """Does nothing: no file is open between two arrays."""

    def _write(self, name: str, content: memoryview) -> None:
        storage.write_large(storage.join(self._path, name), content)
        self._enter(name, content)

    def _enter(self, name: str, content: memoryview) -> None:
        self._files[name] = {"bytes": content.nbytes, "crc32": zlib.crc32(content)}


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
        # True: no chunk is ever left out, so that a missing one is known to be lost.
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(description).encode()


def _checkpoint_metadata(handler: str | None) -> bytes:
    """Orbax's marker of a finished checkpoint; names the handler if one reads all of it."""
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


# Zarr's descriptions of arrays, versions 2 and 3: shape, dtype and chunks. Orbax and T5X write
# through TensorStore and use little of Zarr: numbers, little-endian and in C order, in chunks no
# larger than their array. Any other description counts as damaged: one flipped bit turns "<f4" into
# the big-endian ">f4".

# The file in an array's directory that describes it, of either version.
_DESCRIPTIONS = (".zarray", "zarr.json")
_FIELDS = ("shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters")


@dataclasses.dataclass(frozen=True)
class _Description:
    """An array of numbers.

    Attributes:
      info: Its shape and type.
      chunks: The shape of a chunk.
      driver: TensorStore's name of Zarr's version.
      prefix: The text before the numbers in a chunk's name.
      separator: The text between them.
      has_fill_value: Whether a missing chunk stands for a single value.
      is_plain: Whether the array is one chunk of its bytes and nothing else.
    """

    info: TensorInfo
    chunks: tuple[int, ...]
    driver: str
    prefix: str
    separator: str
    has_fill_value: bool
    is_plain: bool

    @property
    def first_chunk(self) -> str:
        """The name of the first chunk."""
        return self._name((0,) * len(self.chunks))

    def chunk_names(self) -> Iterator[str]:
        """Yields the name of each chunk that the array has."""
        # Round up: chunks at the ends may extend beyond the array.
        sizes = zip(self.info.shape, self.chunks, strict=True)
        counts = [-(-size // chunk) if size else 0 for size, chunk in sizes]
        return map(self._name, np.ndindex(*counts))

    def _name(self, place: tuple[int, ...]) -> str:
        # A scalar has one chunk: "0" in version 2, "c" in version 3.
        numbers = self.separator.join(map(str, place))
        if self.prefix:
            return self.separator.join(filter(None, (self.prefix, numbers)))
        return numbers or "0"


def _zarr_description(path: str, content: bytes) -> _Description:
    """Reads a description.

    Args:
      path: Its file, for messages.
      content: The file's content.

    Raises:
      UserError: If it does not describe an array of numbers as TensorStore writes one.
    """
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise damage_error(path, "it is not JSON") from None
    if not isinstance(parsed, dict):
        raise damage_error(path, "it is not a description of an array")
    description = _third(path, parsed) if parsed.get("zarr_format") == 3 else _second(path, parsed)
    sizes = list(zip(description.info.shape, description.chunks, strict=False))
    fits = len(description.chunks) == len(description.info.shape)
    if not fits or not all(0 < chunk <= size or chunk == size for size, chunk in sizes):
        raise damage_error(
            path,
            f"chunks of shape {list(description.chunks)} do not divide an array of shape"
            f" {list(description.info.shape)}",
        )
    return description


def _second(path: str, content: Mapping[str, Any]) -> _Description:
    if missing := [field for field in _FIELDS if field not in content]:
        raise damage_error(path, f"it does not say the array's {missing[0]!r}")
    dtype = str(content["dtype"])
    if content["order"] != "C" or dtype.startswith(">"):
        raise damage_error(
            path,
            f"it describes an array of {dtype!r} in {content['order']!r} order, not '<' and 'C'",
        )
    info = _info(path, content["dtype"], content["shape"])
    chunks = _sizes(path, content["chunks"])
    return _Description(
        info,
        chunks,
        driver="zarr",
        prefix="",
        separator=_separator(path, content.get("dimension_separator", ".")),
        has_fill_value=content["fill_value"] is not None,
        is_plain=content["compressor"] is None
        and not content["filters"]
        and chunks == info.shape
        # An array without elements has no chunk to read.
        and math.prod(info.shape) > 0,
    )


def _third(path: str, content: Mapping[str, Any]) -> _Description:
    try:
        info = _info(path, content["data_type"], content["shape"])
        chunks = content["chunk_grid"]["configuration"]["chunk_shape"]
        encoding = content["chunk_key_encoding"]
        by_default = encoding["name"] == "default"
        # Zarr 3's defaults, which a description may leave out.
        separator = encoding.get("configuration", {}).get("separator", "/" if by_default else ".")
    except (KeyError, TypeError, AttributeError):
        raise damage_error(path, "it does not describe a Zarr 3 array") from None
    return _Description(
        info,
        _sizes(path, chunks),
        driver="zarr3",
        prefix="c" if by_default else "",
        separator=_separator(path, separator),
        has_fill_value=True,  # version 3 always has one
        is_plain=False,
    )


def _info(path: str, name: Any, shape: Any) -> TensorInfo:
    try:
        dtype = np.dtype(str(name))
    except (TypeError, ValueError):
        raise damage_error(path, f"it describes an array of {name!r}") from None
    # Numbers only: an array of objects ("O") would be unpickled, which can run any code.
    if dtype.kind not in "biuf" and dtype != np.dtype("bfloat16"):
        raise damage_error(path, f"it describes an array of {name!r}")
    return TensorInfo(_sizes(path, shape), dtype)


def _sizes(path: str, sizes: Any) -> tuple[int, ...]:
    # A bool is an int to Python.
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise damage_error(path, f"it describes an array with the sizes {sizes!r}")
    return tuple(sizes)


def _separator(path: str, separator: Any) -> str:
    if separator not in (".", "/"):
        raise damage_error(path, f"the names of its chunks are separated by {separator!r}")
    return separator


def _plain_chunk(shape: Sequence[int]) -> str:
    """The name of the only chunk of an array that `_plain_text` describes."""
    return ".".join("0" for _ in shape) or "0"


def _plain_text(array: np.ndarray) -> str:
    """The content of `.zarray` for an array in one uncompressed chunk."""
    # numpy's own code for bfloat16 is a void type ("<V2"); Zarr's readers use the name.
    dtype = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
    return json.dumps(
        {
            "chunks": list(array.shape),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype,
            # Without a fill value TensorStore reports a lost chunk instead of reading zeros.
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(array.shape),
            "zarr_format": 2,
        }
    )
