"""A page as GitHub-flavored Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from t0repro.reports.page import Cell, Column, Page, Section, as_cell, as_column
from t0repro.words import printable

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
            f"- **{escape(card.title)}: {escape(card.figure)}**; {escape('; '.join(card.lines))}"
            f" ({escape(card.verdict)})"
            for card in page.cards
        ]
        parts.append("\n".join(lines))
    for section in _drop_empty(page.sections):
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
    return _AT_START.sub(_escape_start, _inline(text))


def _inline(text: str) -> str:
    """Text that Markdown displays literally, within a line."""
    return _ACTIVE.sub(lambda match: "\\" + match[0], printable(text))


def _escape_start(match: re.Match[str]) -> str:
    space, sign = match.groups()
    return f"{space}{sign}\\" if sign.isdigit() else f"{space}\\{sign}"


def _drop_empty(sections: Sequence[Section]) -> list[Section]:
    """The sections with content below their heading; plots and legends do not count."""
    kept: list[Section] = []
    # Backward, so that a section's parts are decided before the section.
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
        parts.append(_fence(section.text))
    return parts


def _fence(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{printable(text, keep=chr(10))}\n{fence}"
