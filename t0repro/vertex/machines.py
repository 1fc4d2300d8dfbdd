"""Which accelerators the machines of Vertex AI take, how much memory they have and where they are.

What is not in these tables is not refused: Google adds machines and regions. Sources, read on
2026-11-22: Google Cloud's pages on TPU regions and zones, on Vertex AI's MachineSpec, and on the
machine types of Compute Engine with GPUs.
"""

from __future__ import annotations

import dataclasses
import re

from t0repro.errors import UserError
from t0repro.partitioning.topologies import GIB
from t0repro.vertex.spec import CLOUD_TPU, Machines


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator.

    Attributes:
      machines: pattern of the machine types that take it.
      counts: how many a machine may have.
      memory: bytes of each device, for GPUs; precompile knows a TPU's.
      topology: the prefix of precompile's names, for TPUs.
      regions: region -> largest slice in cores, where that is published; None if it is not.
    """

    machines: str
    counts: tuple[int, ...]
    memory: int | None = None
    topology: str | None = None
    regions: dict[str, int] | None = None


def _gpu(machines: str, counts: tuple[int, ...], gigabytes: float) -> Accelerator:
    return Accelerator(machines, counts, memory=int(gigabytes * GIB))


# In cores, as Vertex AI counts: a chip of v2 or v3 has two.
_SLICES = (8, 32, 64, 128, 256, 512, 1024, 2048)
# GPUs that one machine of a series may have.
_A2, _A3 = (1, 2, 4, 8, 16), (1, 2, 4, 8)
ACCELERATORS = {
    "TPU_V2": Accelerator(
        CLOUD_TPU,
        (8, 32, 128, 256, 512),
        topology="v2",
        regions={"us-central1": 512, "europe-west4": 512, "asia-east1": 8},
    ),
    "TPU_V3": Accelerator(
        CLOUD_TPU, _SLICES, topology="v3", regions={"us-central1": 8, "europe-west4": 2048}
    ),
    "NVIDIA_TESLA_P4": _gpu(r"n1-\w+-\d+", (1, 2, 4), 8),
    "NVIDIA_TESLA_P100": _gpu(r"n1-\w+-\d+", (1, 2, 4), 16),
    "NVIDIA_TESLA_V100": _gpu(r"n1-\w+-\d+", (1, 2, 4, 8), 16),
    "NVIDIA_TESLA_T4": _gpu(r"n1-\w+-\d+", (1, 2, 4), 16),
    "NVIDIA_L4": _gpu(r"g2-standard-\d+", (1, 2, 4, 8), 24),
    "NVIDIA_TESLA_A100": _gpu(r"a2-(high|mega)gpu-(\d+)g", _A2, 40),
    "NVIDIA_A100_80GB": _gpu(r"a2-ultragpu-(\d+)g", _A2, 80),
    "NVIDIA_H100_80GB": _gpu(r"a3-(high|edge)gpu-(\d+)g", _A3, 80),
    "NVIDIA_H100_MEGA_80GB": _gpu(r"a3-megagpu-(\d+)g", (8,), 80),
    "NVIDIA_H200_141GB": _gpu(r"a3-ultragpu-(\d+)g", (8,), 141),
}


def check_machines(machines: Machines, location: str) -> list[str]:
    """Checks that machines of this kind exist, and where.

    Returns:
      What could not be checked, in words.

    Raises:
      UserError: For an accelerator that the machine does not take, in this number or region.
    """
    kind = ACCELERATORS.get(machines.accelerator_type or "")
    if machines.machine_type == CLOUD_TPU:
        if kind is None or kind.topology is None:
            tpus = [name for name, one in ACCELERATORS.items() if one.topology]
            raise UserError(
                f"{CLOUD_TPU} takes TPUs, not {machines.accelerator_type or 'CPUs alone'}.",
                where="--accelerator_type",
                fix=f"Give {' or '.join(tpus)}.",
            )
        if machines.replica_count != 1:
            raise UserError(
                "A TPU slice is one replica, however many cores it has.",
                where="--replica_count",
                fix="Leave it out, and say the slice's size as --accelerator_count.",
            )
    if machines.accelerator_type is None:
        return []
    if kind is None:
        return [f"{machines.accelerator_type}: not in the table of accelerators, so not checked"]
    _check_fit(machines, kind)
    return _check_region(machines, kind, location)


def _check_fit(machines: Machines, kind: Accelerator) -> None:
    matched = re.fullmatch(kind.machines, machines.machine_type)
    if matched is None:
        raise UserError(
            f"{machines.machine_type} does not take {machines.accelerator_type}.",
            where="--machine_type",
            fix=f"Choose a machine type such as {_example(kind.machines)}.",
        )
    # The names of the A2 and A3 machines end in their number of GPUs.
    counts = (int(matched[matched.lastindex]),) if matched.lastindex else kind.counts
    if machines.accelerator_count not in counts:
        raise UserError(
            f"{machines.machine_type} does not take {machines.accelerator_count}"
            f" {machines.accelerator_type}.",
            where="--accelerator_count",
            fix=f"Give {' or '.join(map(str, counts))}.",
        )


def _check_region(machines: Machines, kind: Accelerator, location: str) -> list[str]:
    if kind.regions is None:
        return [
            f"warning: which regions have {machines.accelerator_type} is not known here; see your"
            f" project's quotas in {location}"
        ]
    largest = kind.regions.get(location, 0)
    if machines.accelerator_count > largest:
        wide = [name for name, most in kind.regions.items() if most >= machines.accelerator_count]
        some = f"slices of up to {largest} cores of" if largest else "no"
        raise UserError(
            f"{location} has {some} {machines.accelerator_type}.",
            where="--location",
            fix=f"{machines.accelerator_count} cores are in {' and '.join(wide)}.",
        )
    return []


def _example(pattern: str) -> str:
    named = {CLOUD_TPU: CLOUD_TPU, r"n1-\w+-\d+": "n1-standard-8"}
    simple = re.sub(r"\(high\|\w+\)", "high", pattern)
    return named.get(pattern, simple.replace(r"(\d+)", "8").replace(r"\d+", "12"))
