"""The user's file of machines, which defines the labels of cells and platforms.

It is YAML, with two tables of entries; a cell's fields override a platform's:

    platforms:
      jf_2x2:                      # any name: what --auxiliary_job_platform is given
        launcher: slurm            # a launcher of auxiliary jobs
        options: [--partition=gpu, --gres=gpu:1]
        memory_gb: 64
    cells:
      iz:                          # what --auxiliary_job_cell is given
        environment: {CUDA_VISIBLE_DEVICES: "1"}
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import dacite

from t0repro import yaml_files
from t0repro.cloud.launchers.table import LAUNCHERS
from t0repro.errors import UserError, nearest_names
from t0repro.words import shortened

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The fields of an entry that every launcher reads.

    Attributes:
      launcher: a launcher of auxiliary jobs.
      options: for the launcher's own command that submits (sbatch).
      cpus: processors of each job.
      time_limit: seconds that a job may take.
      environment: variables for the jobs.
    """

    launcher: str = "local"
    options: list[str] = dataclasses.field(default_factory=list)
    cpus: int | None = None
    memory_gb: float | int | None = None
    time_limit: float | int | None = None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Machine(Entry):
    """Where jobs run, and their resource limits there.

    Attributes:
      settings: the fields that only one launcher reads (`Row.settings`), by their names.
      file: the file of machines.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    file: Path | None = dataclasses.field(default=None, compare=False)

    def read_settings(self, name: str, kind: type[T]) -> T | None:
        """A launcher's own settings as this dataclass; None if there are none.

        Raises:
          UserError: for a field that is missing, unknown or of another type.
        """
        fields = self.settings.get(name)
        return None if fields is None else _read_fields(fields, kind, self.file)

    def path(self, name: str) -> Path | None:
        """A path among the settings, relative to the file of machines; None if there is none.

        So a command works from any folder.

        Raises:
          UserError: for what cannot be a path.
        """
        text = self.settings.get(name)
        if text is None:
            return None
        if not isinstance(text, str) or "\0" in text:
            raise UserError(
                f"An entry of the file of machines is wrong: {name} is {reprlib.repr(text)}, not a"
                " path.",
                where=str(self.file),
                fix="Write the path of a file, relative to the file of machines.",
            )
        return (self.file.parent if self.file else Path()) / text


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
    names = {row.settings for row in LAUNCHERS.values() if row.settings in fields}
    settings = {name: fields.pop(name) for name in names if name is not None}
    entry = _read_fields(fields, Entry, file)
    for name in ("cpus", "memory_gb", "time_limit"):
        limit = getattr(entry, name)
        # NaN is not within the limits, and True is an int for Python.
        if limit is not None and (isinstance(limit, bool) or not 0 < limit < 10**9):
            raise UserError(
                f"An entry of the file of machines is wrong: {name} is {limit}.",
                where=str(file),
                fix="Give a number above 0 and below 10**9, or leave it out for no limit.",
            )
    for text in (entry.launcher, *entry.options, *entry.environment, *entry.environment.values()):
        if "\0" in text:
            raise UserError(
                f"An entry of the file of machines is wrong: {shortened(repr(text), 100)} has a"
                " zero byte, which no command takes.",
                where=str(file),
                fix="Remove it.",
            )
    return Machine(**vars(entry), settings=settings, file=file)


def _read_fields(fields: Mapping[str, Any], kind: type[T], file: Path | None) -> T:
    """Fields of the file of machines as a dataclass.

    Raises:
      UserError: for a field that is missing, unknown or of another type.
    """
    try:
        # strict: dacite would ignore a misspelled field.
        return dacite.from_dict(kind, fields, dacite.Config(strict=True))
    # A ValueError comes of a mapping in place of a list.
    except (dacite.DaciteError, ValueError) as error:
        names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
        if kind is Entry:
            names += [row.settings for row in LAUNCHERS.values() if row.settings]
        raise UserError(
            f"An entry of the file of machines is wrong: {_what_is_wrong(error, fields)}.",
            where=str(file),
            fix=f"Its fields: {', '.join(names)}."
            " The values of environment are texts: write a number in quotes.",
        ) from error


def _what_is_wrong(error: Exception, fields: Mapping[str, Any]) -> str:
    # For a string in place of a list, dacite would show the generator that it made of it.
    name = getattr(error, "field_path", None)
    if not isinstance(error, dacite.DaciteError) or name == "options":
        given = reprlib.repr(fields.get("options"))
        return f"options should be a list, as [--partition=gpu], and is {given}"
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
