"""The accelerators of Vertex AI's machines, with their memory and regions."""

from __future__ import annotations

import dataclasses
import math
import re

from t0repro.cloud.vertex.spec import CLOUD_TPU, Machines
from t0repro.errors import UserError
from t0repro.partitioning.topologies import GIB

# What is not in these tables is not refused: Google adds machines and regions. Sources, read in
# November 2026: Google Cloud's pages on TPU regions and zones, on Vertex AI's MachineSpec and
# training with TPUs, and on the machine types of Compute Engine with GPUs; for G4 and the hosts of
# TPU v5e, v5p and v6e, the machines that Google's Cluster Toolkit knows. No source that could be
# read says how much memory Google gives a GB200.


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator.

    Attributes:
      machines: pattern of the machine types that take it.
      counts: how many a machine may have, where its name does not say.
      memory: bytes of each device, for GPUs; precompile knows a TPU's. None if it is not known.
      topology: the prefix of precompile's names, for TPUs.
      regions: region -> largest slice in cores, where that is published; None if it is not.
      per_device: what the number in a machine type's name counts for each device.
    """

    machines: str
    counts: tuple[int, ...]
    memory: int | None = None
    topology: str | None = None
    regions: dict[str, int] | None = None
    per_device: int = 1


def _gpu(machines: str, counts: tuple[int, ...], gigabytes: float) -> Accelerator:
    return Accelerator(machines, counts, memory=int(gigabytes * GIB))


# In cores, as Vertex AI counts: a chip of v2 or v3 has two.
_SLICES = (8, 32, 64, 128, 256, 512, 1024, 2048)
# GPUs that one machine of a series may have.
_A2, _A3 = (1, 2, 4, 8, 16), (1, 2, 4, 8)
_G4 = r"g4-standard-(48|96|192|384)"
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
    "NVIDIA_B200": _gpu(r"a4-highgpu-(8)g", (8,), 180),
    "NVIDIA_GB200": Accelerator(r"a4x-highgpu-(4)g", (4,)),
    "NVIDIA_RTX_PRO_6000": Accelerator(_G4, (), memory=96 * GIB, per_device=48),
}
# Machine type of a TPU host, without the number of its chips at the end -> precompile's name of the
# TPU, by how much that name counts each chip, and the number of axes of its slices.
TPU_HOSTS = {
    "ct5lp-hightpu-": ("v5e", 1, 2),
    "ct5p-hightpu-": ("v5p", 2, 3),
    "ct6e-standard-": ("v6e", 1, 2),
}


def tpu_slice(machines: Machines) -> tuple[str, int] | None:
    """The slice that a TPU host's machine type and the topology make.

    Returns:
      Precompile's name of it, and its chips, each of which is one device; None for other machines.

    Raises:
      UserError: If the machine type and the topology do not belong together.
    """
    hosts = [host for host in TPU_HOSTS if machines.machine_type.startswith(host)]
    if not hosts:
        if machines.tpu_topology:
            raise UserError(
                f"{machines.machine_type} takes no --tpu_topology.",
                where="--tpu_topology",
                fix=f"Leave it out, or choose a machine type of {', '.join(TPU_HOSTS)}.",
            )
        return None
    family, per_chip, axes = TPU_HOSTS[hosts[0]]
    if machines.accelerator_type:
        raise UserError(
            f"The machine type {machines.machine_type} already says which TPU it has.",
            where="--accelerator_type",
            fix="Leave it and --accelerator_count out; the slice's size is --tpu_topology.",
        )
    example = "x".join(["2"] * axes)
    if not re.fullmatch("x".join([r"[1-9]\d*"] * axes), machines.tpu_topology or ""):
        raise UserError(
            f"A slice of {family} has {axes} axes, and --tpu_topology is {machines.tpu_topology}.",
            where="--tpu_topology",
            fix=f"Give the chips on each axis, such as {example}.",
        )
    chips = math.prod(int(size) for size in str(machines.tpu_topology).split("x"))
    host = re.fullmatch(r"([1-9]\d*)t", machines.machine_type.removeprefix(hosts[0]))
    if host is None or chips % int(host[1]):
        raise UserError(
            f"{machines.tpu_topology} has {chips} chips, which do not fill whole machines"
            f" {machines.machine_type}.",
            where="--machine_type, --tpu_topology",
            fix=f"Choose a topology of whole machines; {hosts[0]}4t has 4 chips.",
        )
    return f"{family}-{chips * per_chip}", chips


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
    slice_of_hosts = tpu_slice(machines)
    on_slice = slice_of_hosts is not None or machines.machine_type == CLOUD_TPU
    if on_slice and machines.replica_count != 1:
        size = "--accelerator_count" if slice_of_hosts is None else "--tpu_topology"
        raise UserError(
            "A TPU slice is one replica, however large it is.",
            where="--replica_count",
            fix=f"Leave it out, and say the slice's size as {size}.",
        )
    if slice_of_hosts is not None:
        return [_regions_unknown(machines.machine_type, location)]
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
    counts = kind.counts
    if matched.lastindex:
        counts = (int(matched[matched.lastindex]) // kind.per_device,)
    if machines.accelerator_count not in counts:
        raise UserError(
            f"{machines.machine_type} does not take {machines.accelerator_count}"
            f" {machines.accelerator_type}.",
            where="--accelerator_count",
            fix=f"Give {' or '.join(map(str, counts))}.",
        )


def _check_region(machines: Machines, kind: Accelerator, location: str) -> list[str]:
    if kind.regions is None:
        return [_regions_unknown(machines.accelerator_type, location)]
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


def _regions_unknown(what: str | None, location: str) -> str:
    return (
        f"warning: which regions have {what} is not known here; see your project's quotas in"
        f" {location}"
    )


def _example(pattern: str) -> str:
    named = {CLOUD_TPU: CLOUD_TPU, r"n1-\w+-\d+": "n1-standard-8", _G4: "g4-standard-48"}
    simple = re.sub(r"\((high|\d)(\|\w+)?\)", r"\1", pattern)
    return named.get(pattern, simple.replace(r"(\d+)", "8").replace(r"\d+", "12"))
