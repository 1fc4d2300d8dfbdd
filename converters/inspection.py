"""Lists what a checkpoint holds: every tensor with its norm, and which model it is."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from t0repro.converters.run_files import check_run_files
from t0repro.converters.sources import (
    check_checkpoint,
    find_checkpoint,
    has_slots,
    open_checkpoint,
)
from t0repro.converters.tensors import CheckpointRef, total_bytes
from t0repro.parameters import layout
from t0repro.parameters.shape import ModelShape
from t0repro.progress import byte_progress


@dataclasses.dataclass(frozen=True)
class TensorSummary:
    """One tensor.

    Attributes:
      name: Its name in the checkpoint's own format.
      key: Its flat key in T5X's tree.
      norm: Euclidean norm, summed in float64.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    norm: float


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint's contents.

    Attributes:
      step: Its global step.
      parameters: Number of parameters, not counting slots.
      slots: Whether it has optimizer slots.
      bytes: Total size of all tensors.
    """

    checkpoint: CheckpointRef
    family: ModelShape
    step: int
    parameters: int
    slots: bool
    bytes: int
    tensors: tuple[TensorSummary, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the inspection as JSON values, with the model's name added."""
        return {"name": self.family.name, **dataclasses.asdict(self)}


def inspect_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Inspection:
    """Reads every tensor of a checkpoint and summarizes it.

    Args:
      path: See `sources.find_checkpoint`.
      step: See `sources.find_checkpoint`.

    Raises:
      UserError: If the checkpoint is damaged, incomplete or not a T5.
    """
    reader = open_checkpoint(find_checkpoint(path, step))
    family = check_checkpoint(reader)
    check_run_files(reader.ref, family)
    summaries = []
    with byte_progress("Reading", total_bytes(reader.tensors)) as done:
        for key, info in reader.tensors.items():
            # einsum sums in float64 without a float64 copy of the tensor.
            flat = reader.read(key).reshape(-1)
            norm = float(
                np.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64, casting="unsafe"))
            )
            name = reader.native_name(key)
            summaries.append(TensorSummary(name, key, info.shape, info.dtype.name, norm))
            done(info.nbytes)
    return Inspection(
        checkpoint=reader.ref,
        family=family,
        step=int(reader.read(layout.STEP)),
        parameters=family.parameter_count(),
        slots=has_slots(reader),
        bytes=total_bytes(reader.tensors),
        tensors=tuple(sorted(summaries, key=lambda item: item.name)),
    )
