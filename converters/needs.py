"""Estimates the disk and memory that a released checkpoint needs, and what this machine has."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from t0repro.config.recipe import ADAFACTOR
from t0repro.converters.released import Released
from t0repro.partitioning.memory import slot_bytes

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that a model takes, without activations, which depend on batch size and length.

    Attributes:
      parameters: Number of parameters (a count, not bytes).
      disk: The checkpoint in float32, without slots.
      training_disk: One checkpoint of a training run: parameters and Adafactor's slots.
      evaluation: Memory for float32 parameters.
      training: Memory for float32 parameters, gradients and Adafactor's slots.
    """

    parameters: int
    disk: int
    training_disk: int
    evaluation: int
    training: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this machine has, in bytes.

    Attributes:
      disk: Free space on the folder's disk.
      memory: Memory available to a new process.
      accelerators: Name and total memory of each.
    """

    disk: int
    memory: int
    accelerators: tuple[tuple[str, int], ...]


def needs_of(released: Released) -> Needs:
    """Computes what a released checkpoint needs, from its shapes.

    Parameters and Adafactor's slots are float32, as both stacks train and evaluate.
    """
    weights = _FLOAT32 * released.shape.parameter_count()
    slots = slot_bytes(released.shape, ADAFACTOR)
    return Needs(
        parameters=released.shape.parameter_count(),
        disk=weights,
        training_disk=weights + slots,
        evaluation=weights,
        # The gradients are as large as the parameters, and both are there at once.
        training=2 * weights + slots,
    )


def this_machine(folder: Path) -> Machine:
    """Returns this machine's resources and the free space on the disk of a folder.

    The folder need not exist yet.
    """
    import psutil

    # The folder need not exist; its nearest existing parent is on the same disk.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return Machine(
        disk=shutil.disk_usage(there).free,
        memory=psutil.virtual_memory().available,
        accelerators=tuple(_accelerators()),
    )


def _accelerators() -> list[tuple[str, int]]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        # No driver or no GPU: nothing to list.
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            (
                str(pynvml.nvmlDeviceGetName(handle)),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()
