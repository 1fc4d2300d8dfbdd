"""Trees in msgpack: T5X's file `checkpoint`, which points to Zarr arrays, and Flax models.

T5X's own Checkpointer writes `checkpoint` into `checkpoint_<step>/` (t5x/checkpoints.py, versions 2
and 3): {"version": 3, "optimizer": {"target": ..., "state": ...}}. A leaf is an array itself, or a
TensorStore specification whose path, relative to the directory, names a Zarr array beside the file.
Orbax wrote one until 2023, the tree alone, where an array beside the file is a leaf
"PLACEHOLDER://<name>".

transformers 4 saved a Flax model as flax_model.msgpack, the tree of its arrays; 5 reads none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from t0repro import storage
from t0repro.converters.orbax_dir import OrbaxArrays
from t0repro.converters.tensors import TensorInfo
from t0repro.converters.witnesses import check_names, damage_error, lost_file_error, read_checked
from t0repro.errors import UserError

FILE = "checkpoint"
_PLACEHOLDER = "PLACEHOLDER://"
_STATE = "state/param_states/"
_VERSION = 3


class MsgpackArrays:
    """The arrays of a T5X directory by their paths in the tree ("target/a/kernel").

    Args:
      path: a `checkpoint_<step>` directory with the file `checkpoint`.

    Raises:
      UserError: if the file is damaged or too old, or names a missing array.

    Attributes:
      lost_state: names of the optimizer's arrays if none of them is there: people who want the
        model alone leave out the folders state*, and T5X then still reads the model.
    """

    def __init__(self, path: str):
        file = storage.join(path, FILE)
        self._arrays = OrbaxArrays(path, has_metadata=False)
        tree, version = _load(file, read_checked(path, FILE, self._arrays.integrity))
        self._inline: dict[str, np.ndarray] = {}
        self._places: dict[str, str] = {}
        # Version 2 kept bfloat16's bits as uint16.
        self._bits_as_uint16 = version < _VERSION
        shapes: dict[str, Any] = {}
        for name, leaf in _leaves(tree):
            if isinstance(leaf, dict):
                self._places[name] = _array_at(_path_of(leaf, file, name))
                metadata = leaf.get("metadata")
                shapes[name] = metadata.get("shape") if isinstance(metadata, dict) else None
            elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
                self._places[name] = _array_at(leaf.removeprefix(_PLACEHOLDER))
            elif leaf is not None:
                self._inline[name] = _numbers(leaf, file, name)
        state = [name for name in self._places if name.startswith(_STATE)]
        is_lost = not any(self._places[name] in self._arrays.tensors for name in state)
        self.lost_state = state if is_lost else []
        if self.lost_state:  # what is in the file itself is of no use alone
            for names in (self._places, shapes, self._inline):
                for name in [each for each in names if each.startswith(_STATE)]:
                    del names[name]
        self._check_places(file, shapes)
        # bfloat16 may be stored as bits in uint16, so this is the translated type.
        self.tensors = {
            name: self._info(self._arrays.tensors[place]) for name, place in self._places.items()
        } | {name: TensorInfo(array.shape, array.dtype) for name, array in self._inline.items()}

    def read(self, name: str) -> np.ndarray:
        """One array.

        Raises:
          UserError: if it cannot be read.
        """
        if name in self._inline:
            return self._inline[name]
        array = self._arrays.read(self._places[name])
        # The same bits, viewed as the type they represent.
        return array.view(self._info(self._arrays.tensors[self._places[name]]).dtype)

    @property
    def has_integrity(self) -> bool:
        """See `OrbaxArrays.has_integrity`."""
        return self._arrays.has_integrity

    def place(self, name: str) -> str:
        """Where a name's array is, or should be; arrays in the file itself always exist."""
        return self._arrays.place(FILE if name in self._inline else self._places.get(name, name))

    def list_unchecked(self) -> list[str]:
        """See `OrbaxArrays.list_unchecked`."""
        missing = set(self._arrays.list_unchecked())
        return [name for name, place in self._places.items() if place in missing]

    def _check_places(self, file: str, shapes: Mapping[str, Any]) -> None:
        """Checks that the arrays beside the file have the names and shapes in the file."""
        owners = {place: name for name, place in self._places.items()}
        # This project's own checkpoints also have the step as an array beside the file.
        there = self._arrays.tensors.keys() - (self._inline.keys() - owners.keys())
        check_names(
            [owners.get(place, place.replace("/", ".")) for place in there],
            self._places.keys(),
            file,
            self.place,
        )
        for name, shape in shapes.items():
            stored = self._arrays.tensors[self._places[name]].shape
            if isinstance(shape, list | tuple) and list(shape) != list(stored):
                raise damage_error(
                    self.place(name), f"its shape is {list(stored)}, but {FILE} says {list(shape)}"
                )

    def _info(self, info: TensorInfo) -> TensorInfo:
        if self._bits_as_uint16 and info.dtype == np.uint16:
            return TensorInfo(info.shape, np.dtype(ml_dtypes.bfloat16))
        return info


def _array_at(place: str) -> str:
    """The array's name among the directories; only a path's last part counts."""
    # T5X records the path on the machine that wrote the checkpoint.
    return place.rstrip("/").rpartition("/")[2].replace(".", "/")


class FlaxFile:
    """A flax_model.msgpack, or a shard of one; its tensors have PyTorch's names and axes.

    The format has no index, so the whole file is in memory while it is open.

    Args:
      path: the file.

    Raises:
      UserError: if it is missing or damaged.
    """

    def __init__(self, path: str):
        try:
            packed = storage.read(path)
        except OSError:
            raise lost_file_error(path) from None
        tree = _unpack(path, packed)
        if not isinstance(tree, dict):
            raise damage_error(path, "it holds no tree of arrays")
        self._arrays: dict[str, np.ndarray] = {}
        for name, leaf in _leaves(tree):
            array = _numbers(leaf, path, name)
            # Flax keeps kernels as [in, out], PyTorch as [out, in].
            self._arrays[torch_name(name)] = array.T if name.endswith("/kernel") else array
        self.tensors = {
            name: TensorInfo(array.shape, array.dtype) for name, array in self._arrays.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor."""
        return self._arrays[name]


def torch_name(name: str) -> str:
    """PyTorch's name of an array of a Flax T5: "shared/embedding" -> "shared.weight"."""
    return re.sub(r"/(kernel|embedding|weight)$", "/weight", name).replace("/", ".")


def _load(path: str, packed: bytes) -> tuple[dict[str, Any], int]:
    """The tree in a file's bytes, and T5X's version of it; Orbax's count as today's."""
    content = _unpack(path, packed)
    content = content if isinstance(content, dict) else {}
    if isinstance(content.get("target"), dict):
        return content, _VERSION
    version, tree = content.get("version", 0), content.get("optimizer")
    if version not in (2, 3) or not isinstance(tree, dict):
        raise UserError(
            f"T5X's checkpoint is of version {version}; versions 2 and 3 can be read.",
            where=path,
            fix="Save it again with T5X, which writes version 3.",
        )
    return tree, version


def _unpack(path: str, packed: bytes) -> Any:
    """What a file's bytes hold.

    Raises:
      UserError: if they are damaged.
    """
    # flax takes a second to import, which only these files need.
    from flax import serialization

    try:
        # It makes arrays of bytes and shapes; an array of objects is an error, never unpickled.
        return serialization.msgpack_restore(packed)
    except Exception as error:  # msgpack raises many kinds for a damaged file.
        raise damage_error(path, f"it cannot be unpacked ({type(error).__name__})") from error


def _path_of(spec: Mapping[str, Any], file: str, name: str) -> str:
    """The path in a TensorStore specification: beside `kvstore` for a bucket, otherwise in it."""
    kvstore = spec["kvstore"]
    place = spec.get("path") or (kvstore.get("path") if isinstance(kvstore, dict) else None)
    if not isinstance(place, str):
        raise damage_error(file, f"{name} has no path")
    return place


def _numbers(leaf: Any, file: str, name: str) -> np.ndarray:
    array = np.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic | int | float) else None
    if array is None or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        raise damage_error(file, f"{name} is not an array of numbers")
    return array


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        # A dictionary with a driver is a TensorStore specification; any other is a branch of the
        # tree.
        if isinstance(value, dict) and not {"driver", "kvstore"} <= value.keys():
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def msgpack_file(tensors: Mapping[str, TensorInfo], step: int) -> bytes:
    """The file's content, with the step, for arrays that an `OrbaxWriter` writes beside it."""
    from flax import serialization

    tree: dict[str, Any] = {}
    for name, info in tensors.items():
        *parents, leaf = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = {
            "driver": "zarr",
            "dtype": info.dtype.name,
            "kvstore": {"driver": "file", "path": name.replace("/", ".")},
            "metadata": {"shape": list(info.shape), "chunks": list(info.shape), "compressor": None},
        }
    # T5X keeps the step in the file itself, not as an array beside it.
    tree["state"]["step"] = np.asarray(step, np.int32)
    return serialization.msgpack_serialize({"version": _VERSION, "optimizer": tree})
