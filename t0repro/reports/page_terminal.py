"""A page in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from t0repro.reports.page import Page, Section, as_cell, as_column
from t0repro.terminal import print_table, terminal
from t0repro.words import counted, printable

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
            [
                [Text(cell.text, _TONES[cell.tone]) for cell in map(as_cell, row)]
                for row in section.rows[: section.terminal_rows]
            ],
            numbers={name for name, text, _ in columns[1:] if not text},
            sentences={name for name, _, wide in columns if wide},
            bold=section.bold,
        )
        if omitted := section.rows[section.terminal_rows :]:
            console.print(f"... and {counted(len(omitted), 'more row')}.")
    elif section.lines:
        console.print(Text(printable(section.title), "bold"))
    for line in section.lines:
        console.print(printable(line))
