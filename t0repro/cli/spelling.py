"""How options are spelled: `--at-hand` as `--at_hand`, and T5X's ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from t0repro.cli import help_pages
from t0repro.cli.log_flags import as_click_reads
from t0repro.errors import UserError


def canonical(name: str) -> str:
    """An option's name as --help shows it: with underscores, like t5's own flags."""
    return name.replace("-", "_")


def canonical_arguments(arguments: Iterable[str]) -> list[str]:
    """The command line with canonical option names; values are unchanged.

    Raises:
      UserError: If a path begins with a `~` that the shell left as it was.
    """
    spelled = []
    for argument in arguments:
        _check_home(argument)
        # Only what looks like an option; "--" alone ends them.
        if argument.startswith("--") and argument != "--":
            name, equals, value = argument[2:].partition("=")
            argument = f"--{canonical(name)}{equals}{value}"
        spelled.append(argument)
    return spelled


def with_t5x_overrides(arguments: Iterable[str]) -> list[str]:
    """The command line with T5X's spellings as this program has them.

    `--gin.NAME=VALUE` becomes `--gin_bindings=NAME = VALUE`. `--replace_gin_file=True`, as T5X's
    page on auxiliary jobs writes it, becomes the flag alone, and `-v=1` becomes `--verbosity=1`.
    What follows `--` is another command's, and stays as it is.

    Raises:
      UserError: If one has no "=", or a path begins with a `~` that the shell left as it was.
    """
    spelled, remaining = [], iter(arguments)
    for argument in remaining:
        if argument == "--":
            return [*spelled, argument, *remaining]
        _check_home(argument)
        if argument.startswith("--gin."):
            name, equals, value = argument.removeprefix("--gin.").partition("=")
            if not equals:
                raise UserError(
                    f"{argument} has no value.", fix=f"Write it as --gin.{name}=VALUE, in one word."
                )
            argument = f"--gin_bindings={name} = {value}"
        if (spelling := as_click_reads(argument)) is not None:
            spelled.append(spelling)
    return spelled


def _check_home(argument: str) -> None:
    """Refuses `--out=~/runs`: shells leave that `~` alone, and it would become a folder's name."""
    option, equals, value = argument.partition("=")
    if not (equals and option.startswith("--")):
        option, value = "", argument
    if value == "~" or value.startswith("~/"):
        raise UserError(
            f"The shell did not expand the ~ of {value!r}, which would be a folder of that name.",
            where=option or None,
            fix=f"Write {f'{option} {value}' if option else value}, without = and quotes, or $HOME"
            " in place of ~.",
        )


def show_canonical(command: Any) -> None:
    """Makes the help of a Typer command and its subcommands fit 80 columns, by canonical names."""
    help_pages.arrange(command)
    for parameter in command.params:
        # Help shows these lists; both spellings are accepted all the same (see `canonical`).
        for names in (parameter.opts, getattr(parameter, "secondary_opts", [])):
            names[:] = [
                f"--{canonical(name[2:])}" if name.startswith("--") else name for name in names
            ]
    for child in getattr(command, "commands", {}).values():
        show_canonical(child)
