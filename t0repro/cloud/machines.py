"""The user's file of machines, which defines the labels of cells and platforms.

It is YAML, with two tables of entries; a cell's fields override a platform's:

platforms:
  jf_2x2:                      # any name: what --auxiliary_job_platform is given
    launcher: slurm            # local, slurm, k8s or vertex
    options: [--partition=gpu, --gres=gpu:1]
    memory_gb: 64
cells:
  iz:                          # what --auxiliary_job_cell is given
    environment: {CUDA_VISIBLE_DEVICES: "1"}
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dacite

from t0repro import yaml_files
from t0repro.errors import UserError, nearest_names
from t0repro.words import shortened

LAUNCHERS = ("local", "slurm", "k8s", "vertex")


@dataclasses.dataclass(frozen=True)
class VertexMachine:
    """A custom job's machine on Vertex AI, with the options of `t0repro vertex`.

    Attributes:
      image_uri: the image that the jobs run in.
      staging_bucket: `gs://BUCKET`, in which Vertex AI keeps a folder for each job.
    """

    project: str
    location: str
    image_uri: str
    machine_type: str
    staging_bucket: str
    accelerator_type: str | None = None
    accelerator_count: int = 0
    service_account: str | None = None
    network: str | None = None
    labels: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where jobs run, and their resource limits there.

    Attributes:
      options: for the engine's own command that submits (sbatch).
      template: the file of a Job manifest, for Kubernetes; relative to the file of machines.
      vertex: the machine on Vertex AI.
      cpus: processors of each job.
      time_limit: seconds that a job may take.
      environment: variables for the jobs.
    """

    launcher: str = "local"
    options: list[str] = dataclasses.field(default_factory=list)
    template: str | None = None
    vertex: VertexMachine | None = None
    cpus: int | None = None
    memory_gb: float | int | None = None
    time_limit: float | int | None = None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def find_machine(file: Path | None, platform: str | None, cell: str | None) -> Machine:
    """The machine that the two labels stand for.

    Without a file, labels have no effect and jobs run on this machine.

    Raises:
      UserError: if the file cannot be read, or lacks a label.
    """
    if file is None:
        return Machine()
    # An empty file is None in YAML.
    known = yaml_files.read(file, "The file of machines") or {}
    fields: dict[str, Any] = {}
    for kind, label in (("platforms", platform), ("cells", cell)):
        fields |= _entry(known, kind, label, file)
    try:
        # strict: dacite would ignore a misspelled field.
        machine = dacite.from_dict(Machine, fields, dacite.Config(strict=True))
    except dacite.DaciteError as error:
        raise UserError(
            f"An entry of the file of machines is wrong: {_what_is_wrong(error, fields)}.",
            where=str(file),
            fix=f"Its fields: {', '.join(one.name for one in dataclasses.fields(Machine))}."
            " The values of environment are texts: write a number in quotes.",
        ) from error
    for name in ("cpus", "memory_gb", "time_limit"):
        limit = getattr(machine, name)
        if limit is not None and not 0 < limit < math.inf:  # NaN neither
            raise UserError(
                f"An entry of the file of machines is wrong: {name} is {limit}.",
                where=str(file),
                fix="Give a number above 0, or leave it out for no limit.",
            )
    # Relative to the file that names it, so that a command works from any folder.
    if machine.template is not None:
        machine = dataclasses.replace(machine, template=str(file.parent / machine.template))
    return machine


def _what_is_wrong(error: dacite.DaciteError, fields: Mapping[str, Any]) -> str:
    # For a string in place of a list, dacite would show the generator that it made of it.
    name = getattr(error, "field_path", None)
    if isinstance(error, dacite.WrongTypeError) and name == "options":
        return (
            f"options should be a list, as [--partition=gpu], and is {reprlib.repr(fields[name])}"
        )
    return shortened(str(error), 500)


def _entry(known: Any, kind: str, label: str | None, file: Path) -> dict[str, Any]:
    if label is None:
        return {}
    entries = known.get(kind) if isinstance(known, dict) else None
    entry = entries.get(label) if isinstance(entries, dict) else None
    if entry is not None and not isinstance(entry, dict):
        raise UserError(
            f"{label} among the {kind} is not a table of fields: {reprlib.repr(entry)}.",
            where=str(file),
            fix=f"Write them as {label}: {{launcher: slurm}}.",
        )
    if entry is None:
        names = list(entries) if isinstance(entries, dict) else []
        raise UserError(
            f"There is no {label} among the {kind}.",
            where=str(file),
            fix=f"Add it; nearest: {nearest_names(label, names, count=3)}.",
        )
    return entry
