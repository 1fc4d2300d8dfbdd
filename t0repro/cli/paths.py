"""Paths on command lines: what a command reads or writes, on this disk or at an address.

A local path stays as it is, and an address (`gs://...`) becomes its working copy. A text option
keeps the address, because the code that reads it opens addresses itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from t0repro.cli.spelling import canonical
from t0repro.errors import UserError
from t0repro.storage import check_address, check_folder, check_readable, input_path, output_path

# Of files that commands write or read: nobody means a folder of such a name.
_FILES = (
    *(".bin", ".csv", ".html", ".index", ".json", ".jsonl", ".md", ".msgpack", ".npz", ".pdf"),
    *(".png", ".pt", ".safetensors", ".svg", ".txt"),
)


def output(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """The callback of each option or argument that names a folder that the command writes.

    Raises:
      UserError: For the name of a file, or an address that cannot be opened.
    """
    if value is None:
        return None
    _check_names_folder(str(value), _name(parameter))
    return output_path(value, _name(parameter))


def _check_names_folder(path: str, name: str) -> None:
    stem, _, _ = path.rpartition(".")
    if path.endswith(_FILES) and not os.path.isdir(path):
        raise UserError(
            "A folder is written, and this is the name of a file.",
            where=f"{name} {path}",
            fix=f"Name a folder, such as {stem}.",
        )


def output_file(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """The callback of each option that names a single file that the command writes.

    Raises:
      UserError: For a file that exists, a folder, a path below a file, or an address that cannot
        be opened.
    """
    path = None if value is None else output_path(value, _name(parameter))
    if path is not None:
        if path.is_dir():
            raise UserError(
                "This is a folder, and one file is written.",
                where=f"{_name(parameter)} {path}",
                fix=f"Name the file: {path / 'NAME'}",
            )
        check_folder(path.parent, f"{_name(parameter)} {path}")
        if path.exists():
            raise UserError(
                "The file exists.",
                where=f"{_name(parameter)} {path}",
                fix="Choose another name, or remove it.",
            )
    return path


def target(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """The callback of each argument that names where a converted checkpoint goes.

    Raises:
      UserError: For the name of a file, or an address that cannot be opened.
    """
    if value is not None:
        _check_names_folder(value, _name(parameter))
        # An address stays one: conversions write to it without a copy on this machine's disk.
        check_address(value, _name(parameter))
    return value


def source(parameter: typer.CallbackParam, value: str | list[str] | None) -> str | list[str] | None:
    """The callback of each option or argument that is text and names what the command reads.

    Raises:
      UserError: For an address that cannot be opened, before the imports of what would open it.
    """
    for words in [value] if isinstance(value, str) else value or ():
        for path in words.split(","):  # folders of caches may be in one word
            check_readable(path, _name(parameter))
    return value


def read_addresses(context: Any, parameter: Any, value: Any) -> Any:
    """The callback, in Click's form, of each `Path` that names what the command reads."""
    del context
    if isinstance(value, list | tuple):
        return [input_path(each, _name(parameter)) for each in value]
    return None if value is None else input_path(value, _name(parameter))


def _name(parameter: Any) -> str:
    name = parameter.opts[0]
    return f"--{canonical(name[2:])}" if name.startswith("--") else name.upper()
