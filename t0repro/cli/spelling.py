"""One spelling for the options of all commands: `--at-hand` and `--at_hand` are the same option."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from t0repro.errors import UserError


def canonical(name: str) -> str:
    """An option's name as help shows it: with underscores, as t5's own flags have them."""
    return name.replace("-", "_")


def canonical_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line whose options have their canonical names; their values stay as they are."""
    spelled = []
    for argument in arguments:
        if argument.startswith("--") and argument != "--":
            name, equals, value = argument[2:].partition("=")
            argument = f"--{canonical(name)}{equals}{value}"
        spelled.append(argument)
    return spelled


def with_t5x_overrides(arguments: Iterable[str]) -> list[str]:
    """A command line whose `--gin.NAME=VALUE` are spelt `--gin_bindings=NAME = VALUE`, as T5X does.

    Raises:
      UserError: if one has no "=".
    """
    spelled = []
    for argument in arguments:
        if argument.startswith("--gin."):
            name, equals, value = argument.removeprefix("--gin.").partition("=")
            if not equals:
                raise UserError(
                    f"{argument} has no value.", fix=f"Write it as --gin.{name}=VALUE, in one word."
                )
            argument = f"--gin_bindings={name} = {value}"
        spelled.append(argument)
    return spelled


def show_canonical(command: Any) -> None:
    """Makes the help of a Typer command, and of those below it, show canonical names."""
    for parameter in command.params:
        for names in (parameter.opts, getattr(parameter, "secondary_opts", [])):
            names[:] = [
                f"--{canonical(name[2:])}" if name.startswith("--") else name for name in names
            ]
    for child in getattr(command, "commands", {}).values():
        show_canonical(child)
