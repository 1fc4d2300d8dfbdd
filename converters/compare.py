"""Compares two checkpoints of any formats, tensor by tensor, under one set of names."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np

from t0repro.converters.sources import find_checkpoint, open_checkpoint
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, total_bytes
from t0repro.parameters import layout
from t0repro.progress import byte_progress


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs.

    Attributes:
      key: Its flat key.
      reason: "values", "shape", "type" (equal values in different types), "only in A" or "only in
        B".
      max: Largest absolute difference; NaN if the values cannot be compared.
      rms: Root mean square of the differences; NaN if the values cannot be compared.
      detail: The two shapes or types, if they differ.
    """

    key: str
    reason: str
    max: float = math.nan
    rms: float = math.nan
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of checkpoints a and b.

    Attributes:
      tensors: Number of names in a or b.
      differences: Every tensor that is not bit-identical, the largest difference first.
      tolerance: Largest absolute difference that passes.
    """

    a: CheckpointRef
    b: CheckpointRef
    tensors: int
    differences: tuple[TensorDifference, ...]
    tolerance: float

    @property
    def failures(self) -> tuple[TensorDifference, ...]:
        """The differences beyond the tolerance; with tolerance 0, all of them."""
        return tuple(item for item in self.differences if not self._passes(item))

    def _passes(self, item: TensorDifference) -> bool:
        return self.tolerance > 0 and item.max <= self.tolerance


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tolerance: float = 0.0,
    slots: bool = True,
) -> Comparison:
    """Compares two checkpoints.

    Args:
      a: A checkpoint; see `sources.find_checkpoint`.
      b: Another.
      tolerance: Largest absolute difference that counts as equal; 0 requires identical bits and
        types.
      slots: False compares only parameters and the step.

    Raises:
      UserError: If either cannot be read.
    """
    readers = [open_checkpoint(find_checkpoint(path)) for path in (a, b)]
    names = [
        {key for key in reader.tensors if slots or not key.startswith(layout.SLOTS)}
        for reader in readers
    ]
    differences = [
        TensorDifference(key, "only in A" if key in names[0] else "only in B")
        for key in sorted(names[0] ^ names[1])
    ]
    with byte_progress("Comparing", total_bytes(readers[0].tensors)) as done:
        for key in sorted(names[0] & names[1]):
            if difference := _compare_tensor(key, *readers):
                differences.append(difference)
            done(readers[0].tensors[key].nbytes)
    # Tensors that cannot be compared (NaN) come first.
    differences.sort(key=lambda item: -item.max if item.max == item.max else -math.inf)
    return Comparison(
        readers[0].ref, readers[1].ref, len(names[0] | names[1]), tuple(differences), tolerance
    )


def _compare_tensor(key: str, a: CheckpointReader, b: CheckpointReader) -> TensorDifference | None:
    shapes = a.tensors[key].shape, b.tensors[key].shape
    if shapes[0] != shapes[1]:
        return TensorDifference(key, "shape", detail=f"{shapes[0]} and {shapes[1]}")
    left, right = a.read(key), b.read(key)
    if key == layout.STEP:
        # Mesh TensorFlow stores an int64, T5X an int32; only the number matters.
        left, right = left.astype(np.int64), right.astype(np.int64)
    same_type = left.dtype == right.dtype
    if same_type and left.tobytes() == right.tobytes():
        return None
    # In float64, so that the differences themselves are not rounded.
    wide = np.subtract(left, right, dtype=np.float64)
    largest = float(np.max(np.abs(wide))) if wide.size else 0.0
    rms = float(np.sqrt(np.mean(np.square(wide)))) if wide.size else 0.0
    detail = "" if same_type else f"{left.dtype.name} and {right.dtype.name}"
    reason = "type" if not same_type and largest == 0 else "values"
    return TensorDifference(key, reason, largest, rms, detail)
