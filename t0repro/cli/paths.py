"""Paths on command lines: local ones as they are, and working copies of addresses (`gs://...`).

An option that is text is checked by what opens it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from t0repro.cli.spelling import canonical
from t0repro.files import input_path, output_path


def output(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """The callback of each option or argument that names what the command writes.

    Raises:
      UserError: For an address that cannot be opened.
    """
    return None if value is None else output_path(value, _name(parameter))


def check_inputs(command: Any) -> None:
    """Makes a Typer command and its subcommands read addresses where they read a `Path`."""
    for parameter in command.params:
        if parameter.callback is None and "Path" in str(parameter.type_descriptor.annotation):
            parameter.callback = _input
    for child in getattr(command, "commands", {}).values():
        check_inputs(child)


def _input(context: typer.Context, parameter: Any, value: Any) -> Any:
    del context
    if isinstance(value, list | tuple):
        return [input_path(each, _name(parameter)) for each in value]
    return None if value is None else input_path(value, _name(parameter))


def _name(parameter: Any) -> str:
    name = parameter.opts[0]
    return f"--{canonical(name[2:])}" if name.startswith("--") else name.upper()
