"""A page as data, and its renderings: one HTML file, GitHub-flavored Markdown, terminal tables.

One description serves all three, so that they cannot disagree. Names come from files by others; no
rendering lets a name act as markup.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from t0repro.terminal import print_table, terminal
from t0repro.words import counted, printable

Tone = Literal["", "good", "bad"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A table's cell.

    Attributes:
      text: the displayed text.
      value: HTML's sort key for the column, if not the text.
      tip: HTML's tooltip, on hover and focus.
      tone: whether the text is good or bad news.
    """

    text: str
    value: float | None = None
    tip: str = ""
    tone: Tone = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of text, which wraps and is left-aligned; a column of numbers is a plain string.

    Attributes:
      name: the heading.
      wide: whether the cells hold sentences, which need room.
    """

    name: str
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, sentences, plots and a table; all but the heading may be empty.

    Attributes:
      title: the heading.
      lines: paragraphs.
      note: a remark in smaller type.
      plot: HTML from plots.inline_plot.
      legend: (CSS class of the key, its meaning), below the plot.
      header: the table's columns; the first is the key, which every rendering shows in full.
      rows: the table's rows.
      bold: indices of the rows to set in bold.
      facts: (name, value) pairs.
      text: preformatted text.
      level: 2 for a section, 3 for a part of the section before it.
      folded: whether HTML hides the content until a reader opens it.
    """

    title: str
    lines: tuple[str, ...] = ()
    note: str = ""
    plot: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    header: tuple[str | Column, ...] = ()
    rows: tuple[tuple[str | Cell, ...], ...] = ()
    bold: frozenset[int] = frozenset()
    facts: tuple[tuple[str, str], ...] = ()
    text: str = ""
    level: Literal[2, 3] = 2
    folded: bool = False


@dataclasses.dataclass(frozen=True)
class Card:
    """A headline figure: its title, the figure, and sentences about it."""

    title: str
    figure: str
    lines: tuple[str, ...]
    verdict: str
    tone: Tone


@dataclasses.dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
      title: the heading.
      sections: the body.
      lead: a sentence that introduces the page.
      warning: what a reader must know before trusting a figure; shown as a banner.
      notes: further sentences.
      cards: headline figures.
    """

    title: str
    sections: tuple[Section, ...]
    lead: str = ""
    warning: str = ""
    notes: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()


def as_cell(cell: str | Cell) -> Cell:
    """Wraps plain text in a Cell; returns a Cell unchanged."""
    return Cell(cell) if isinstance(cell, str) else cell


def as_column(column: str | Column) -> tuple[str, bool, bool]:
    """A column's name, whether it holds text, and whether it holds sentences."""
    if isinstance(column, Column):
        return column.name, True, column.wide
    return column, False, False


# ---- HTML ----------------------------------------------------------------------------------------


_TEMPLATES = Path(__file__).parent / "templates"


def render_html(page: Page) -> str:
    """Renders the page with style, script and plots inline, so that it makes no requests."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        # Names come from tasks and files, so escape everything except our own HTML.
        autoescape=True,
        # By default Jinja renders a name that it does not know as nothing.
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
