"""Interfaces of every format: names and shapes up front, values tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy: np.dtype("bfloat16"))
import numpy as np

from t0repro import storage
from t0repro.errors import UserError
from t0repro.parameters.naming import PARAMETERS, STEP, NormNames

Format = Literal["mtf", "t5x", "jax", "hf", "peft"]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Shape and numpy dtype of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class CheckpointRef:
    """An existing checkpoint: its format, path (for mtf, a prefix) and global step.

    `step` is None only if the name does not include it. `base` is read in place of the base that an
    adapter's checkpoint names.
    """

    format: Format
    path: str
    step: int | None
    base: str | None = None

    @property
    def folder(self) -> str:
        """Where the files are that describe it: a directory of Hugging Face's or PEFT's itself."""
        # In other formats, several checkpoints share the directory.
        return self.path if self.format in ("hf", "peft") else os.path.dirname(self.path)

    def beside(self, name: str) -> str:
        """The path of one of the files that describe it."""
        return storage.join(self.folder, name)


class CheckpointReader(Protocol):
    """An open checkpoint under T5X's flat keys, without T5X's placeholders for unused slots."""

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint being read."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Flat key -> shape and type, as stored."""
        ...

    @property
    def norm_names(self) -> NormNames | None:
        """Mesh TensorFlow's spelling of this model's norms; None if the source has none."""
        ...

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor.

        Raises:
          UserError: if its file is damaged.
        """
        ...

    def native_name(self, key: str) -> str:
        """The flat key's name in the checkpoint's own format, for messages."""
        ...


def compare_shapes(
    actual: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> list[tuple[str, str, str]]:
    """Names whose shapes differ, sorted, each with its actual and expected shape, in words."""

    def describe(shape: Sequence[int] | None) -> str:
        return "none" if shape is None else f"of shape {list(shape)}"

    return [
        (name, describe(actual.get(name)), describe(expected.get(name)))
        for name in sorted(actual.keys() | expected.keys())
        if actual.get(name) != expected.get(name)
    ]


def check_types(reader: CheckpointReader) -> None:
    """Checks that the step is an integer and everything else is floating-point.

    Raises:
      UserError: Naming a tensor of another type.
    """
    for key, info in reader.tensors.items():
        # Not `kind == "f"`: NumPy gives bfloat16, which is ml_dtypes' type, the kind V.
        is_integer = info.dtype.kind in "iu"
        if is_integer != (key == STEP) or info.dtype.kind == "b" or (is_integer and info.shape):
            raise UserError(
                f"{reader.native_name(key)} has dtype {info.dtype.name} and shape"
                f" {list(info.shape)}; expected {'a whole number' if key == STEP else 'floats'}.",
                where=reader.ref.path,
                fix="Copy the whole checkpoint again, or choose another one.",
            )


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A checkpoint's tensor that is read each time numpy requests its values.

    A tree of these takes no memory until it is used, and then one tensor at a time.

    Raises:
      UserError: From `np.asarray`, if the file that holds it is damaged.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @classmethod
    def open(cls, reader: CheckpointReader, key: str) -> StoredTensor:
        """The tensor of a flat key."""
        return cls(reader.tensors[key].shape, functools.partial(reader.read, key))

    def astype(self, dtype: np.dtype[Any]) -> StoredTensor:
        """The same, converted when it is read."""
        return StoredTensor(self.shape, lambda: self.read().astype(dtype))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.read(), dtype, copy=copy)


FlatTree = Mapping[str, np.ndarray]
# Tensors in memory, or still in their checkpoint until each is used.
StoredTree = Mapping[str, np.ndarray | StoredTensor]


def cast_parameters(tree: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A flat tree with its parameters in another type; slots and the step stay as they are."""
    return {
        name: value.astype(np.dtype(dtype)) if name.startswith(PARAMETERS) else value
        for name, value in tree.items()
    }


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor of the target and how to build it.

    Attributes:
      name: Its name in the target.
      info: Its shape and type in the target.
      keys: Flat keys of the source tensors from which to build it.
      build: Builds it from an iterator over their values, which reads each one on demand.
      file: The target's file for it, in formats with several.
    """

    name: str
    info: TensorInfo
    keys: tuple[str, ...]
    build: Callable[[Iterator[np.ndarray]], np.ndarray]
    file: str = ""


class Writer(Protocol):
    """Writes the target's tensors one by one into a directory that nobody reads yet."""

    def read_back(self, output: Output) -> np.ndarray | None:
        """An interrupted writer's bytes for a tensor; None if there are too few.

        The bytes may be wrong: the caller compares them with a digest.
        """
        ...

    def keep(self, output: Output, array: np.ndarray) -> None:
        """Accepts what `read_back` returned as written."""
        ...

    def add(self, output: Output, array: np.ndarray) -> None:
        """Writes a tensor. Tensors come in the order of the plan, each kept or added."""
        ...

    def close(self) -> None:
        """Writes the files that make the tensors a checkpoint, and syncs everything."""
        ...

    def abandon(self) -> None:
        """Closes open files without completing the checkpoint."""
        ...


def bytes_of(array: np.ndarray) -> memoryview:
    """The array's bytes, copied only if it is not C-contiguous."""
    # The uint8 view is for bfloat16, whose buffer Python cannot describe.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def total_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Total size of the tensors, in bytes."""
    return sum(info.nbytes for info in tensors.values())


# A conversion processes as many bytes as the checkpoint has, one tensor at a time. Fresh memory
# from the system costs more than all the work on it (0.5 GB/s measured on a virtual machine,
# against 5 GB/s for reading a cached file), and freed large blocks return to the system.


_SMALLEST = 1 << 20  # bytes; smaller blocks are kept by the process's own allocator
_MAX_FREE_BLOCKS = 2  # free blocks to hold on to
_WASTE = 3  # a block may be this many times larger than the request

_free: list[memoryview] = []
_lock = threading.Lock()


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an uninitialized array whose memory is reused once its last view is gone."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _SMALLEST:
        return np.empty(shape, dtype)
    block = _take(nbytes)
    # A numpy view refers to the first array of its chain whose base is not an array. That is this
    # one, so it lives as long as any view and its finalizer can return the block.
    lease = np.frombuffer(block, np.uint8, nbytes)
    weakref.finalize(lease, _give_back, block).atexit = False
    return lease.view(dtype).reshape(shape)


def _take(nbytes: int) -> memoryview:
    with _lock:
        fitting = [
            number
            for number, block in enumerate(_free)
            if nbytes <= block.nbytes <= nbytes * _WASTE
        ]
        if fitting:
            return _free.pop(fitting[-1])  # the smallest: they are sorted
        _free.clear()  # wrong sizes for the current tensors; free them to make room
    return np.empty(nbytes, np.uint8).data


def _give_back(block: memoryview) -> None:
    with _lock:
        _free.append(block)
        _free.sort(key=lambda free: -free.nbytes)
        del _free[_MAX_FREE_BLOCKS:]


def transpose(matrix: np.ndarray) -> np.ndarray:
    """Returns a matrix's transpose as a C-contiguous copy."""
    result = empty(matrix.shape[::-1], matrix.dtype)
    # Copy sixteen rows at a time: all at once, rows of 8 KiB map to the same cache lines (measured
    # for 2048 x 5120 float32: 0.7 GB/s all at once, 2.7 GB/s in slices).
    for start in range(0, len(matrix), 16):
        result[:, start : start + 16] = matrix[start : start + 16].T
    return result
