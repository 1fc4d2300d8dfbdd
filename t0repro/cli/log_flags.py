"""absl's flags of the log, which stand in every command of T5X's documents."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, ClassVar

import typer

_STANDARD_ERROR = "Accepted for T5X's commands: the log always goes to standard error."
_THRESHOLDS = ("debug", "info", "warning", "error", "fatal")


def _print_log(level: int | None) -> int | None:
    """Prints records up to absl's level: -1 warnings, 0 information, 1 and above everything."""
    if level is not None:
        from absl import logging

        # absl's own handler, which prefixes each line with level, time, file and line.
        logging.use_absl_handler()
        logging.set_verbosity(level)
    return level


def _threshold(name: str | None) -> str | None:
    """Takes the name of a level, as absl does."""
    if name is not None and name.lower() not in _THRESHOLDS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(_THRESHOLDS)}.")
    return name


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """How much of the libraries' log is printed."""

    HEADING: ClassVar = "Log"

    verbosity: Annotated[
        int | None,
        typer.Option(
            "-v",
            "--verbosity",
            "--v",
            callback=_print_log,
            metavar="LEVEL",
            help="Print the log of all libraries: -1 warnings, 0 information, 1 everything.",
            show_default="only what matters to a user",
        ),
    ] = None
    # Where absl writes its log is no question here, so these have no effect.
    alsologtostderr: Annotated[
        bool, typer.Option("--alsologtostderr", hidden=True, help=_STANDARD_ERROR)
    ] = False
    logtostderr: Annotated[
        bool, typer.Option("--logtostderr", hidden=True, help=_STANDARD_ERROR)
    ] = False
    stderrthreshold: Annotated[
        str | None, typer.Option(hidden=True, callback=_threshold, help=_STANDARD_ERROR)
    ] = None


# absl takes one dash or two, and a value for a flag that is on or off.
_SHORT_VERBOSITY = re.compile(r"-v=(.*)")
_SWITCH = re.compile(r"--(replace_gin_file|alsologtostderr|logtostderr)=(?i:(true|false))")


def as_click_reads(argument: str) -> str | None:
    """An argument in absl's spelling as Click takes it; None if it says the same as nothing."""
    if short := _SHORT_VERBOSITY.fullmatch(argument):
        return f"--verbosity={short[1]}"
    if switch := _SWITCH.fullmatch(argument):
        return f"--{switch[1]}" if switch[2].lower() == "true" else None
    return argument
