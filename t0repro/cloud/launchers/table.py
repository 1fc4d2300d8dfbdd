"""The table of launchers: what runs auxiliary jobs, and starts commands as several processes.

A launcher is a row of `LAUNCHERS` and a module, imported when it is used. The module has one or
both of these functions:

    make_launcher(machine: Machine) -> Launcher             runs auxiliary jobs (t0repro aux)
    start(launch: Launch, *, dry_run: bool) -> str          `t0repro launch`; returns what to print
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Literal

# The launchers whose modules have `start`.
CommandLauncher = Literal["slurm", "k8s", "skypilot", "gcluster", "tpu-vm"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A launcher.

    Attributes:
      runs_jobs: whether the module has `make_launcher`.
      settings: the launcher's own field of an entry in the file of machines.
    """

    module: str
    runs_jobs: bool = False
    settings: str | None = None


_HERE = "t0repro.cloud.launchers"
LAUNCHERS: Mapping[str, Row] = {
    "local": Row("t0repro.jobs.local_launcher", runs_jobs=True),
    "slurm": Row(f"{_HERE}.slurm", runs_jobs=True),
    "k8s": Row(f"{_HERE}.kubernetes", runs_jobs=True, settings="template"),
    "vertex": Row(f"{_HERE}.vertex", runs_jobs=True, settings="vertex"),
    "skypilot": Row(f"{_HERE}.skypilot"),
    "gcluster": Row(f"{_HERE}.gcluster"),
    "tpu-vm": Row(f"{_HERE}.tpu_vm"),
}
JOB_LAUNCHERS = tuple(name for name, row in LAUNCHERS.items() if row.runs_jobs)


def import_launcher(name: str) -> Any:
    """The module of a launcher in the table."""
    return importlib.import_module(LAUNCHERS[name].module)
