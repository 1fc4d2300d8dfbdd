"""What every format's reader offers: names and shapes at once, values one tensor at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy: np.dtype("bfloat16"))
import numpy as np

from t0repro.parameters.layout import NormNames

Format = Literal["mtf", "t5x", "jax", "hf"]
FORMATS: tuple[Format, ...] = get_args(Format)


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
    """A checkpoint that is there: its format, its path (a prefix for mtf) and its global step.

    `step` is None only where the name does not say it.
    """

    format: Format
    path: str
    step: int | None


class CheckpointReader(Protocol):
    """An open checkpoint, in T5X's flat keys, without T5X's dummies for slots that are not used."""

    @property
    def ref(self) -> CheckpointRef:
        """What is being read."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Flat key -> shape and type, as stored."""
        ...

    @property
    def norm_names(self) -> NormNames | None:
        """How Mesh TensorFlow spells this model's norms, where the source says so."""
        ...

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor.

        Raises:
          UserError: if the file that holds it is damaged.
        """
        ...

    def native_name(self, key: str) -> str:
        """The name of a flat key in the checkpoint's own format, for messages."""
        ...


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor of a target format and how it is made.

    Attributes:
      name: in the target.
      info: shape and type in the target.
      keys: flat keys of what it is made from.
      build: makes it from their values, each read when it is asked for.
      file: the target's file that it belongs to, where it writes several.
    """

    name: str
    info: TensorInfo
    keys: tuple[str, ...]
    build: Callable[[Iterator[np.ndarray]], np.ndarray]
    file: str = ""


class Writer(Protocol):
    """Writes a target's tensors one by one into a directory that nobody reads yet."""

    def stored(self, output: Output) -> np.ndarray | None:
        """What an interrupted writer left in a tensor's place, whole or not; None if too little."""
        ...

    def keep(self, output: Output, array: np.ndarray) -> None:
        """Takes what `stored` gave as written."""
        ...

    def add(self, output: Output, array: np.ndarray) -> None:
        """Writes a tensor. Tensors come in the order of the plan, each kept or added."""
        ...

    def close(self) -> None:
        """Writes what makes the tensors a checkpoint, and syncs all."""
        ...

    def abandon(self) -> None:
        """Closes files without making a checkpoint of them."""
        ...


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, not copied; those of bfloat16 too."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def sync_all(paths: Iterable[Path]) -> None:
    """Flushes files and the directories that they are in to the disk, several at a time."""
    paths = list(paths)

    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [*paths, *{path.parent for path in paths}]))


def total_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of all tensors together."""
    return sum(info.nbytes for info in tensors.values())
