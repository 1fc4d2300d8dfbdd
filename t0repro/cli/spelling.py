"""How command lines are spelled (dashes, T5X's and absl's forms, paths) and their help shown."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import click
import typer

from t0repro.buckets import check_readable
from t0repro.errors import UserError
from t0repro.files import check_address, input_path, output_path

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
    # The log always goes to standard error, so these have no effect.
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
_SWITCH = re.compile(r"--(replace_gin_file|alsologtostderr|logtostderr|sync)=(?i:(true|false))")


def as_click_reads(argument: str) -> str | None:
    """An argument in absl's spelling as Click parses it; None if it has no effect."""
    if short := _SHORT_VERBOSITY.fullmatch(argument):
        return f"--verbosity={short[1]}"
    if switch := _SWITCH.fullmatch(argument):
        return f"--{switch[1]}" if switch[2].lower() == "true" else None
    return None if argument == "--nosync" else argument


# ---- How options are spelled: `--at-hand` as `--at_hand`, and T5X's ways -------------------------


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
        # Only words that look like options; "--" alone ends the options.
        if argument.startswith("--") and argument != "--":
            name, equals, value = argument[2:].partition("=")
            argument = f"--{canonical(name)}{equals}{value}"
        spelled.append(argument)
    return spelled


def with_t5x_overrides(arguments: Iterable[str]) -> list[str]:
    """The command line with T5X's spellings replaced by this program's.

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
    _arrange(command)
    for parameter in command.params:
        # Help shows these lists; both spellings are accepted all the same (see `canonical`).
        for names in (parameter.opts, getattr(parameter, "secondary_opts", [])):
            names[:] = [
                f"--{canonical(name[2:])}" if name.startswith("--") else name for name in names
            ]
    for child in getattr(command, "commands", {}).values():
        show_canonical(child)


# ---- Paths on command lines ----------------------------------------------------------------------

# A local path stays as it is, and an address (`gs://...`) becomes its working copy. A text option
# keeps the address, because the code that reads it opens addresses itself.


def output(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """The callback of each option or argument that names what the command writes.

    Raises:
      UserError: For an address that cannot be opened.
    """
    return None if value is None else output_path(value, _name(parameter))


def target(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """The callback of each argument that names where a converted checkpoint goes.

    Raises:
      UserError: For an address that cannot be opened.
    """
    if value is not None:
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


def check_inputs(command: Any) -> None:
    """Makes a Typer command and its subcommands read addresses where they read a `Path`."""
    for parameter in command.params:
        # A path with a callback, such as `output`, is checked by that.
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


# ---- Help pages that fit 80 columns: options under headings, examples that can be pasted ---------

# Typer's own panels cut long option names to fit; here a long name gets its own line.

_WIDTH = 74  # of an example's lines, which Click indents by 4
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
_EXAMPLE = re.compile(
    r"(?P<before>.*?)(?P<name>[^.:]*):\s+(?P<commands>(?:[A-Z0-9_]+=\S+ )?"
    r"(?:t0repro|t5_mesh_transformer) .*)",
    re.S,
)


def _arrange(command: Any) -> None:
    """Makes a Typer command print its help in this form."""
    command.rich_markup_mode = None
    # Click truncates a summary that it derives itself, but not an explicit one.
    command.short_help = command.short_help or _summary(command.help or "")
    command.help = _text(command.help or "")
    command.epilog = _text(command.epilog or "")
    command.format_options = functools.partial(_format_options, command)
    for parameter in command.params:
        kind = parameter.type_descriptor
        # As users type it: Typer shows its normalized form, lm_eval for lm-eval.
        if kind.is_choice and not kind.is_list and all(isinstance(c, str) for c in kind.choices):
            parameter.metavar = parameter.metavar or f"<{'|'.join(kind.choices)}>"


def help_page(program: str, text: str, sections: dict[str, list[tuple[str, str]]]) -> str:
    """The help page of a command that Typer does not parse: its text, then flags by headings.

    Args:
      program: the command's name.
      text: what it does, and an example, as a Typer command's help.
      sections: heading -> each flag with its kind of value, and its help.
    """
    formatter = click.HelpFormatter(width=80)
    formatter.write_usage(program, "[FLAGS]")
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(_text(text))
    for heading, records in sections.items():
        with formatter.section(heading):
            formatter.write_dl(records)
    return formatter.getvalue()


def _summary(text: str) -> str:
    """The first paragraph of a help text, on one line."""
    return " ".join(text.split("\n\n")[0].split())


def _format_options(command: Any, context: Any, formatter: Any) -> None:
    """Writes arguments, then options by their headings, those without one first."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            is_argument = parameter.param_type_name == "argument"
            heading = getattr(parameter, "rich_help_panel", None) or "Options"
            sections.setdefault("Arguments" if is_argument else heading, []).append(record)
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)
    if hasattr(command, "format_commands"):
        command.format_commands(context, formatter)


def _text(text: str) -> str:
    """A help text with each paragraph on one line and each example as lines to paste."""
    # Click keeps the line breaks of a paragraph that begins with \b.
    found = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            found.append(paragraph)
        elif match := _EXAMPLE.fullmatch(paragraph.strip()):
            if match["before"].strip():
                found.append(" ".join(match["before"].split()))
            lines = [f"  {line}" for each in _commands(match["commands"]) for line in each]
            found.append("\n".join(["\b", f"{match['name'].strip()}:", *lines]))
        elif "\n " in paragraph:
            found.append(f"\b\n{paragraph}")
        else:
            found.append(" ".join(paragraph.split()))
    return "\n\n".join(found)


def _commands(text: str) -> Iterator[list[str]]:
    """The lines of each command of an example; lines that continue one are indented further."""
    lines = text.splitlines()
    base = min((len(line) - len(line.lstrip()) for line in lines[1:]), default=0)
    joined: list[str] = []
    for number, line in enumerate(lines):
        if number == 0 or (
            line.lstrip().startswith("t0repro ") and len(line) - len(line.lstrip()) == base
        ):
            joined.append(line)
        else:
            joined[-1] += f" {line}"
    for command in joined:
        yield _wrapped(_WORD.findall(command))


def _wrapped(words: list[str]) -> list[str]:
    r"""A command's words in lines of at most `_WIDTH`, each but the last ending in ` \`."""
    # An option and its value stay together if a line has room for both.
    parts: list[str] = []
    for word in words:
        last = parts[-1] if parts else ""
        takes_value = last.startswith("--") and " " not in last and not word.startswith("-")
        if takes_value and len(last) + len(word) < _WIDTH - 6:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > _WIDTH - 2:
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
