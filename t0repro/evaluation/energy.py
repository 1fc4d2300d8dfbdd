"""Joules that an evaluation took, where the machine tells: NVIDIA's counters and the CPUs' RAPL.

Both count everything that runs on the device meanwhile, ours or not. RAPL's files are readable by
root alone on many systems; what cannot be read is left out, and the report then says nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


class EnergyMeter:
    """Joules since the last look at it, of all counters that can be read.

    Args:
      powercap: where RAPL's counters are.
      gpus: whether to ask NVIDIA's library too.

    Attributes:
      source: what is counted, in words; empty where nothing is.
    """

    def __init__(self, powercap: Path = POWERCAP, *, gpus: bool = True):
        cpus, devices = _rapl_counters(powercap), _nvml_counters() if gpus else []
        self._counters = [*cpus, *devices]
        names = [("CPU packages (RAPL)", cpus), ("GPUs (NVML)", devices)]
        self.source = " and ".join(f"{len(found)} {name}" for name, found in names if found)
        self.joules()

    def joules(self) -> float | None:
        """Joules since the last call; None where no counter can be read."""
        values = [counter() for counter in self._counters]
        return sum(values) if values else None


def _rapl_counters(powercap: Path) -> list[Callable[[], float]]:
    """A counter for each package; the parts of a package are in its own figure."""
    return [
        _rapl_counter(folder)
        for folder in sorted(powercap.glob("intel-rapl:*"))
        if folder.name.count(":") == 1 and _microjoules(folder / "energy_uj") is not None
    ]


def _rapl_counter(folder: Path) -> Callable[[], float]:
    last = _microjoules(folder / "energy_uj") or 0
    around = _microjoules(folder / "max_energy_range_uj") or 0

    def joules() -> float:
        nonlocal last
        now = _microjoules(folder / "energy_uj")
        if now is None:
            return 0.0
        since = now - last if now >= last else now + around - last  # it starts again from 0
        last = now
        return since / 1e6

    return joules


def _microjoules(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _nvml_counters() -> list[Callable[[], float]]:
    """A counter for each GPU that has one (Volta and later)."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(_NVML)
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        found = [_nvml_counter(nvml, index) for index in range(count.value)]
        return [counter for counter in found if counter is not None]
    return []


def _nvml_counter(nvml: ctypes.CDLL, index: int) -> Callable[[], float] | None:
    device = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        return None

    def millijoules() -> int | None:
        value = ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(value))
        return None if failed else value.value

    last = millijoules()
    if last is None:
        return None

    def joules() -> float:
        nonlocal last
        now = millijoules()
        since = 0 if now is None or last is None else now - last
        last = last if now is None else now
        return since / 1e3

    return joules
