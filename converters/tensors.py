"""What every format's reader offers: names and shapes at once, values one tensor at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy: np.dtype("bfloat16"))
import numpy as np
from t0repro.converters.layout import NormNames

Format = Literal["mtf", "jax"]


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

    `step` is None only for a Mesh TensorFlow prefix that ends in no number.
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


def total_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of all tensors together."""
    return sum(info.nbytes for info in tensors.values())
