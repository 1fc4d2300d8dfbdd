"""Energy used by an evaluation, if the hardware reports it: GPUs through NVML, CPUs through RAPL.

Both count everything that runs on the device at the time, not just this process. On many systems
only root can read RAPL's files; counters that cannot be read are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

# The Linux kernel's interface to RAPL, in which AMD's processors appear as intel-rapl too.
POWERCAP = Path("/sys/class/powercap")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time and energy spent on outputs.

    Attributes:
      seconds: wall-clock time.
      joules: energy; None if the hardware does not report it.
      energy_source: what measured the joules; empty if nothing did.
    """

    seconds: float
    joules: float | None = None
    energy_source: str = ""

    def __add__(self, other: Cost) -> Cost:
        # If one part's energy is unknown, so is the total.
        joules = None
        if self.joules is not None and other.joules is not None:
            joules = self.joules + other.joules
        return Cost(self.seconds + other.seconds, joules, other.energy_source)

    def as_record(self) -> dict[str, Any]:
        """Seconds and, if known, joules with their source, as they go into a task's record."""
        if self.joules is None:
            return {"seconds": self.seconds}
        return dataclasses.asdict(self)


class EnergyMeter:
    """Sums the joules used since the last reading, over all counters that can be read.

    Args:
      powercap: folder of RAPL's counters.
      gpus: whether to read NVIDIA GPUs too.

    Attributes:
      source: description of what is counted; empty if nothing is.
    """

    def __init__(self, powercap: Path = POWERCAP, *, gpus: bool = True):
        cpus, devices = _rapl_counters(powercap), _nvml_counters() if gpus else []
        self._counters = [*cpus, *devices]
        names = [("CPU packages (RAPL)", cpus), ("GPUs (NVML)", devices)]
        self.source = " and ".join(
            f"{len(counters)} {name}" for name, counters in names if counters
        )
        # The first reading starts the count.
        self.joules()

    def joules(self) -> float | None:
        """Joules since the last call; None if no counter can be read."""
        values = [counter() for counter in self._counters]
        return sum(values) if values else None


def _rapl_counters(powercap: Path) -> list[Callable[[], float]]:
    """A counter for each CPU package."""
    # Zones named intel-rapl:0:1 are parts of package 0 and already in its figure.
    return [
        _counter(
            functools.partial(_microjoules, folder / "energy_uj"),
            1e6,
            _microjoules(folder / "max_energy_range_uj") or 0,
        )
        for folder in sorted(powercap.glob("intel-rapl:*"))
        if folder.name.count(":") == 1 and _microjoules(folder / "energy_uj") is not None
    ]


def _nvml_counters() -> list[Callable[[], float]]:
    """A counter for each GPU that has one (Volta and later); none without NVIDIA's driver."""
    counters = []
    with contextlib.suppress(pynvml.NVMLError):
        # Never shut down: the counters are read as long as the process lives.
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            if _millijoules(device) is not None:
                counters.append(_counter(functools.partial(_millijoules, device), 1e3))
    return counters


def _counter(
    read: Callable[[], int | None], per_joule: float, most: int = 0
) -> Callable[[], float]:
    """A function that returns the joules since its last call, or since this one.

    Args:
      read: Reads the hardware's counter, which only grows; None if it cannot be read.
      per_joule: The counter's units in a joule.
      most: What it grows to before it starts at 0 again; 0 if it never does.
    """
    last = read() or 0

    def joules() -> float:
        nonlocal last
        now = read()
        if now is None:
            return 0.0
        since = now - last if now >= last else now + most - last
        last = now
        return since / per_joule

    return joules


def _microjoules(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _millijoules(device: Any) -> int | None:
    """Energy that a GPU has used since its driver was loaded; None if it has no counter."""
    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
    except pynvml.NVMLError:
        return None
