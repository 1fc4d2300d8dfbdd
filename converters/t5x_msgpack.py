"""The file `checkpoint` of T5X's own directories: a tree in msgpack that points to Zarr arrays.

Both T5X's older Checkpointer and its Orbax CheckpointManager write it (t5x/checkpoints.py, versions
2 and 3): {"version": 3, "optimizer": {"target": ..., "state": ...}}. A leaf is an array itself, or
a TensorStore specification whose path, relative to the directory, names a Zarr array beside the
file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from t0repro.converters import storage
from t0repro.converters.integrity import damaged
from t0repro.converters.orbax_dir import OrbaxArrays
from t0repro.converters.tensors import TensorInfo
from t0repro.errors import UserError

FILE = "checkpoint"
_VERSION = 3


class MsgpackArrays:
    """The arrays of a T5X directory by their paths in the tree ("target/a/kernel").

    Args:
      path: a `checkpoint_<step>` directory with the file `checkpoint`.

    Raises:
      UserError: if the file is damaged, too old, or names an array that is not there.
    """

    def __init__(self, path: str):
        content = _load(storage.join(path, FILE))
        self._arrays = OrbaxArrays(path)
        self._inline: dict[str, np.ndarray] = {}
        self._places: dict[str, str] = {}
        # Version 2 kept bfloat16's bits as uint16.
        self._bits_as_uint16 = content["version"] < _VERSION
        for name, leaf in _leaves(content["optimizer"]):
            if isinstance(leaf, dict):
                self._places[name] = self._find(path, name, leaf)
            elif leaf is not None:
                self._inline[name] = np.asarray(leaf)
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
        return array.view(self._info(self._arrays.tensors[self._places[name]]).dtype)

    def _find(self, path: str, name: str, spec: Mapping[str, Any]) -> str:
        """The array's name among the directories."""
        # Written to a bucket, the path stands beside `kvstore`, otherwise in it.
        place = spec.get("path") or spec["kvstore"]["path"]
        directory = place.rstrip("/").rpartition("/")[2]
        if (array := directory.replace(".", "/")) not in self._arrays.tensors:
            raise UserError(
                f"The array of {name} is missing.",
                where=storage.join(path, directory),
                fix="Copy the whole directory again, or choose another checkpoint.",
            )
        return array

    def _info(self, info: TensorInfo) -> TensorInfo:
        if self._bits_as_uint16 and info.dtype == np.uint16:
            return TensorInfo(info.shape, np.dtype(ml_dtypes.bfloat16))
        return info


def _load(path: str) -> dict[str, Any]:
    # flax takes a second to import, which only these files need.
    from flax import serialization

    try:
        content: Any = serialization.msgpack_restore(storage.read(path))
    except Exception as error:  # msgpack raises many kinds for a damaged file.
        raise damaged(path, f"it cannot be unpacked ({type(error).__name__})") from error
    version = content.get("version", 0) if isinstance(content, dict) else 0
    if version < 2 or "optimizer" not in content:
        raise UserError(
            f"T5X's checkpoint is of version {version}; versions 2 and 3 can be read.",
            where=path,
        )
    return content


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and not {"driver", "kvstore"} <= value.keys():
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def msgpack_file(tensors: Mapping[str, TensorInfo], step: int) -> bytes:
    """The file's content for arrays that an `OrbaxWriter` writes beside it, the step in itself."""
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
            "metadata": {
                "shape": list(info.shape),
                "chunks": list(info.shape),
                "compressor": None,
            },
        }
    tree["state"]["step"] = np.asarray(step, np.int32)
    return serialization.msgpack_serialize({"version": _VERSION, "optimizer": tree})
