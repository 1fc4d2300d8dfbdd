"""Machines that need not be attached: TPU slices by name, and published figures of their chips.

The number in a name counts what Google's names count: cores up to v5p, chips for v5e and v6e.

    v3-512     512 devices (cores) on 256 chips, 16 x 16
    v4-128     64 devices (chips), 4 x 4 x 4
    v5e-256    256 devices (chips), 16 x 16

libtpu's compiler, the extra `tpu`, compiles for them on any machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

from t0repro.errors import UserError
from t0repro.progress import NOT_ON_A_TPU

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device, with its maker's published figures; no speed here is measured.

    Sources: Google Cloud's pages on the system architecture of each TPU version; for the links of
    v2 and v3, Jouppi et al. 2020 (A Domain-Specific Supercomputer for Training Deep Neural
    Networks); NVIDIA's data sheets.

    Attributes:
      memory: bytes of memory for programs; for a TPU, as reported by libtpu.
      flops: bfloat16 FLOP/s, dense.
      link: bytes per second that a device sends in one direction of one link.
    """

    memory: int
    flops: float
    link: float


@dataclasses.dataclass(frozen=True)
class _Family:
    """The slices of one TPU version.

    Attributes:
      chip: each device.
      library: libtpu's name of the version.
      per_chip: how many units of the name's number one chip counts as.
      axes: number of axes of the torus.
      options: libtpu's options for the devices as JAX uses them.
    """

    chip: Chip
    library: str
    per_chip: int
    axes: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def _chip(memory: float, flops: float, link: float) -> Chip:
    return Chip(int(memory * GIB), flops, link)


_FAMILIES = {
    "v2": _Family(_chip(7.48, 22.5e12, 62e9), "v2", 2, 2),
    "v3": _Family(_chip(15.48, 61.5e12, 82e9), "v3", 2, 2),
    "v4": _Family(_chip(30.75, 275e12, 45e9), "v4", 2, 3, {"chip_config_name": "megacore"}),
    "v5e": _Family(_chip(15.75, 197e12, 45e9), "v5e", 1, 2),
    "v5p": _Family(_chip(95.74, 459e12, 90e9), "v5p", 2, 3),
    "v6e": _Family(_chip(31.25, 918e12, 90e9), "v6e", 1, 2),
}
# JAX's full names of device kinds: "TPU v4 lite" is another chip than "TPU v4".
_TPU_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
# Their link is NVLink, in one direction. A device kind begins with one of these names.
_GPUS = {
    "NVIDIA H100": _chip(80, 989e12, 450e9),
    "NVIDIA H200": _chip(141, 989e12, 450e9),
}


def devices_of(topology: str) -> tuple[list[Any], Chip]:
    """The devices of a TPU slice, to compile for, and their published figures.

    Raises:
      UserError: for an unknown name, or without libtpu.
    """
    family, chips = _parse(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"Compiling for {topology} takes libtpu, which is not installed.",
            where="--topology",
            fix="Install the extra tpu: EXTRAS=tpu bash scripts/setup.sh.",
        )
    for variable, value in NOT_ON_A_TPU.items():
        os.environ.setdefault(variable, value)
    import jax
    from jax.experimental import topologies
    from jax.experimental.compilation_cache import compilation_cache

    # What such a compiler finds in the cache it cannot load, and warns.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else it stays as the first program found it
    name = f"{family.library}:{'x'.join(map(str, torus(chips, family.axes)))}"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **family.options)
    except Exception as error:  # libtpu raises various errors for a slice that does not exist
        raise UserError(
            f"libtpu does not support the slice {topology} ({name}): {str(error).splitlines()[0]}",
            where="--topology",
            fix="Choose a size that Google Cloud offers.",
        ) from error
    return list(found.devices), family.chip


def chip_of(topology: str) -> Chip:
    """The published figures of a TPU slice's devices; does not need libtpu.

    Raises:
      UserError: for an unknown name.
    """
    return _parse(topology)[0].chip


def find_chip(device_kind: str) -> Chip | None:
    """The published figures of a device kind, by JAX's name; None if unknown here."""
    if device_kind in _TPU_KINDS:
        return _FAMILIES[_TPU_KINDS[device_kind]].chip
    return next((chip for name, chip in _GPUS.items() if device_kind.startswith(name)), None)


def memory_of(device: Any) -> int | None:
    """Bytes that programs may use on a device; None if unknown, as on a CPU.

    For an attached device this is JAX's limit, which on a GPU is less than the published size. A
    device that is only described, by `devices_of`, has no statistics.
    """
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, RuntimeError):
        limit = None
    chip = find_chip(device.device_kind)
    return limit or (chip and chip.memory)


def torus(chips: int, axes: int) -> Sequence[int]:
    """The arrangement of chips: powers of two as equal as possible, the longest axis last.

    A 3-D torus of four chips or fewer is flat: v4-8 is 2 x 2 x 1.
    """
    power = chips.bit_length() - 1
    if axes == 3 and power <= 2:
        return (*torus(chips, 2)[::-1], 1)
    return [1 << (power + at) // axes for at in range(axes)]


def _parse(topology: str) -> tuple[_Family, int]:
    """The version and the number of chips of a name such as v3-512 or v5litepod-16."""
    # Google's accelerator types use v5litepod for v5e.
    name = topology.lower().replace("v5litepod", "v5e")
    match = re.fullmatch(r"(v\w+)-(\d+)", name)
    family = _FAMILIES.get(match[1]) if match else None
    count = int(match[2]) if match else 0
    chips = count // family.per_chip if family else 0
    # A power of two shares no bit with the number before it.
    if family is None or chips < 1 or chips & (chips - 1):
        raise UserError(
            f"There is no topology {topology!r}.",
            where="--topology",
            fix=f"Give VERSION-SIZE, as v3-512, with {', '.join(_FAMILIES)} and a power of two; or"
            " cpu-8 for eight virtual CPU devices.",
        )
    return family, chips
