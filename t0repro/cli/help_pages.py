"""Help pages that fit 80 columns: options under headings, examples that can be pasted.

Typer's own panels cut long option names to fit; here a long name gets its own line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import click

WIDTH = 74  # of an example's lines, which Click indents by 4
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
_EXAMPLE = re.compile(
    r"(?P<before>.*?)(?P<name>[^.:]*):\s+(?P<commands>(?:[A-Z0-9_]+=\S+ )?"
    r"(?:t0repro|t5_mesh_transformer) .*)",
    re.S,
)


def arrange(command: Any) -> None:
    """Makes a Typer command print its help as this module describes."""
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


def page(program: str, text: str, sections: dict[str, list[tuple[str, str]]]) -> str:
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
    r"""A command's words in lines of at most `WIDTH`, each but the last ending in ` \`."""
    # An option and its value stay together if a line has room for both.
    parts: list[str] = []
    for word in words:
        last = parts[-1] if parts else ""
        takes_value = last.startswith("--") and " " not in last and not word.startswith("-")
        if takes_value and len(last) + len(word) < WIDTH - 6:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > WIDTH - 2:
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
