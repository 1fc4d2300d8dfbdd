"""Renders a page as one HTML file, as GitHub-flavored Markdown, and as tables on a terminal.

Names come from files by others. None of the three renderings lets a name act as markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from t0repro.reports.page import Cell, Column, Page, Section, as_cell, as_column
from t0repro.terminal import print_table, terminal
from t0repro.words import counted, printable

_TEMPLATES = Path(__file__).parent / "templates"


def render_html(page: Page) -> str:
    """Renders the page with style, script and plots inline, so that it makes no requests."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        # Names come from tasks and files, so escape everything except our own HTML.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": as_cell, "column": as_column}
    return environment.get_template("page.html").render(
        page=page,
        css=_asset("page.css"),
        script=_asset("page.js"),
    )


def _shown(value: Any) -> Any:
    """Text with control characters made visible; HTML is returned unchanged."""
    import markupsafe

    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return printable(value, keep="\n\t")
    return value


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


# ---- Markdown ------------------------------------------------------------------------------------


# Characters with a meaning to Markdown inside a line. An underscore inside a word has none, and
# names are full of them. An escaped colon keeps GitHub from linking bare addresses.
_ACTIVE = re.compile(r"[\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.|@(?=\w)")
# Characters with a meaning at the start of a line: headings, lists, rules.
_AT_START = re.compile(r"^(\s*)([#+=-]|\d+(?=[.)]))")


def render_markdown(page: Page) -> str:
    """The page's sentences, tables and texts; its plots are left out."""
    parts = [f"# {escape(page.title)}"]
    if page.warning:
        parts.append(f"> **{escape(page.warning)}**")
    parts += [escape(line) for line in (page.lead, *page.notes) if line]
    if page.cards:
        lines = [
            f"- **{escape(card.title)}: {escape(card.figure)}**; {escape(' '.join(card.lines))}"
            f" ({escape(card.verdict)})"
            for card in page.cards
        ]
        parts.append("\n".join(lines))
    for section in _with_content(page.sections):
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def markdown_table(header: Sequence[str | Column], rows: Iterable[Sequence[str | Cell]]) -> str:
    """A Markdown table: text and the first column left-aligned, numbers right-aligned."""
    columns = [as_column(column) for column in header]
    names = [name for name, _, _ in columns]
    # Markdown sets a column's alignment by colons in the line below the header.
    rule = ["---" if text or not at else "---:" for at, (_, text, _) in enumerate(columns)]
    lines = [
        # A cell never starts a line, so "47.8" needs no escape.
        "| " + " | ".join(_inline(as_cell(cell).text) for cell in line) + " |"
        for line in (names, *rows)
    ]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def escape(text: str) -> str:
    """Text that Markdown displays literally, on a line of its own."""
    # For a number, escape the full stop after it; for other signs, the sign itself.
    return _AT_START.sub(_without_start, _inline(text))


def _inline(text: str) -> str:
    """Text that Markdown displays literally, within a line."""
    return _ACTIVE.sub(lambda match: "\\" + match[0], printable(text))


def _without_start(match: re.Match[str]) -> str:
    space, sign = match.groups()
    return f"{space}{sign}\\" if sign.isdigit() else f"{space}\\{sign}"


def _with_content(sections: Sequence[Section]) -> list[Section]:
    """The sections with content below their heading; plots and legends do not count."""
    kept: list[Section] = []
    # Backwards, so that a section's parts are decided before the section.
    for section in reversed(sections):
        content = (*section.lines, section.note, section.rows, section.facts, section.text)
        has_parts = bool(kept) and kept[-1].level > section.level
        if any(content) or has_parts:
            kept.append(section)
    return kept[::-1]


def _section(section: Section) -> list[str]:
    parts = [f"{'#' * section.level} {escape(section.title)}"]
    parts += [escape(line) for line in (*section.lines, section.note) if line]
    if section.rows:
        parts.append(markdown_table(section.header, section.rows))
    if section.facts:
        parts.append(
            "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in section.facts)
        )
    if section.text:
        parts.append(_fenced(section.text))
    return parts


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{printable(text, keep=chr(10))}\n{fence}"


# ---- Terminal ------------------------------------------------------------------------------------


MAX_ROWS = 40

_TONES = {"": "", "good": "green", "bad": "yellow"}


def print_page(page: Page, console: Console | None = None) -> None:
    """Prints a page's sentences and tables; a truncated table says so."""
    console = console or terminal()
    if page.warning:
        console.print(Text(printable(page.warning), "bold yellow"))
    for note in page.notes:
        console.print(printable(note))
    for section in page.sections:
        _print_section(section, console)


def _print_section(section: Section, console: Console) -> None:
    if section.rows:
        columns = [as_column(column) for column in section.header]
        print_table(
            console,
            section.title,
            [name for name, _, _ in columns],
            # Report omitted rows; never drop them silently.
            [[_text(as_cell(cell)) for cell in row] for row in section.rows[:MAX_ROWS]],
            numbers={name for name, text, _ in columns[1:] if not text},
            bold=section.bold,
        )
        if len(section.rows) > MAX_ROWS:
            console.print(f"... and {counted(len(section.rows) - MAX_ROWS, 'more row')}.")
    elif section.lines:
        console.print(Text(printable(section.title), "bold"))
    for line in section.lines:
        console.print(printable(line))


def _text(cell: Cell) -> Text:
    return Text(cell.text, _TONES[cell.tone])
