"""Comparing two checkpoints of any formats, tensor by tensor under one set of names."""

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
      key: its flat key.
      reason: "values", "shape", "type" (equal values of another type) or "only in A" or "only in
        B".
      max: largest absolute difference; NaN where values cannot be compared.
      rms: root mean square of the differences; NaN likewise.
      detail: what the two sides are, where they cannot be compared value by value.
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
      tensors: number of names in a or b.
      differences: every tensor that is not the same bit for bit, the largest difference first.
      tolerance: largest absolute difference that is let pass.
    """

    a: CheckpointRef
    b: CheckpointRef
    tensors: int
    differences: tuple[TensorDifference, ...]
    tolerance: float

    @property
    def failures(self) -> tuple[TensorDifference, ...]:
        """The differences beyond the tolerance; with tolerance 0 that is every one."""
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
      a: a checkpoint, see `sources.find_checkpoint`.
      b: another.
      tolerance: largest absolute difference that counts as equal; 0 asks for the same bits and
        types.
      slots: False compares parameters and step alone.

    Raises:
      UserError: if either cannot be read.
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
        # An int64 in Mesh TensorFlow, an int32 in T5X: the number counts.
        left, right = left.astype(np.int64), right.astype(np.int64)
    same_type = left.dtype == right.dtype
    if same_type and left.tobytes() == right.tobytes():
        return None
    wide = np.subtract(left, right, dtype=np.float64)
    largest = float(np.max(np.abs(wide))) if wide.size else 0.0
    rms = float(np.sqrt(np.mean(np.square(wide)))) if wide.size else 0.0
    detail = "" if same_type else f"{left.dtype.name} and {right.dtype.name}"
    reason = "type" if not same_type and largest == 0 else "values"
    return TensorDifference(key, reason, largest, rms, detail)
