"""Prints tables on a terminal of any width; keys are never truncated, nor names read as markup."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from t0repro.words import printable

# Widths of the narrowest columns that are still readable when folded: the key's, one of sentences,
# and other text's
_READABLE_KEY, _READABLE_SENTENCES, _READABLE = 22, 40, 12
# Rich puts a space on either side of a cell and one between cells
_BETWEEN = 3
_BARS = "▁▂▃▄▅▆▇█"


def terminal(width: int = 120) -> Console:
    """A console for the terminal, or of this width if output goes to a file or another program.

    COLUMNS, if it is set, is the width in either case. Rich's markup and emoji codes are off,
    because names may contain them.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(markup=False, emoji=False, highlight=False, width=width)


def bars(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """A curve on one line: a bar for each value, between two extremes, by default the values'."""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    numbers: Collection[str] = (),
    sentences: Collection[str] = (),
    bold: Collection[int] = (),
) -> None:
    """Prints a table whose first column is its key.

    Text folds if space is short. If even folded columns do not fit, each row is printed as its key,
    with the other cells indented below it and labeled by column.

    Args:
      console: the console to print to.
      title: heading above the table; may be empty.
      header: the columns' names.
      rows: the cells of each row.
      numbers: names of the numeric columns, which are right-aligned and never folded.
      sentences: names of the columns of sentences, which need more room than other text.
      bold: indices of the rows to print in bold.
    """
    cells = [[_safe(cell) for cell in row] for row in rows]
    widths = _widths(header, cells, numbers, sentences, console.width - _BETWEEN * len(header))
    if widths is None:
        _print_records(console, title, header, cells, bold)
        return
    table = Table(
        title=Text(printable(title)) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for at, name in enumerate(header):
        table.add_column(
            Text(printable(name)),
            justify="right" if name in numbers else "left",
            overflow="fold",
            width=widths[at],
        )
    for at, row in enumerate(cells):
        table.add_row(*row, style="bold" if at in bold else None)
    console.print(table)


def _safe(cell: str | Text) -> Text:
    if isinstance(cell, Text):
        return Text(printable(cell.plain), cell.style)
    return Text(printable(cell))


def _widths(
    header: Sequence[str],
    rows: Sequence[Sequence[Text]],
    numbers: Collection[str],
    sentences: Collection[str],
    room: int,
) -> list[int] | None:
    """Column widths in characters, the key served first; None if the columns do not fit.

    Not left to Rich, which drops columns if numbers take most of the width.
    """
    wanted, least = [], []
    for at, name in enumerate(header):
        longest = max((row[at].cell_len for row in rows), default=0)
        enough = _READABLE_SENTENCES if name in sentences else _READABLE if at else _READABLE_KEY
        readable = longest if name in numbers else min(longest, enough)
        # A heading wraps at spaces, text at any character
        words = max(map(cell_len, printable(name).split()), default=0)
        wanted.append(max(longest, cell_len(printable(name))))
        least.append(max(readable, words))
    spare = room - sum(least)
    if spare < 0:
        return None
    # Distribute the remaining width from the first column on, each up to its own width.
    widths = []
    for most, width in zip(wanted, least, strict=True):
        more = min(most - width, spare)
        widths.append(width + more)
        spare -= more
    return widths


def _print_records(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Text]],
    bold: Collection[int],
) -> None:
    if title:
        console.print(Text(printable(title), "italic"))
    for at, row in enumerate(rows):
        key = row[0].copy()
        if at in bold:
            key.stylize("bold")
        console.print(key, overflow="fold")
        parts = [
            Text.assemble((f"{printable(name)}: ", "dim"), cell)
            for name, cell in zip(header[1:], row[1:], strict=True)
            if cell.plain
        ]
        # One indented paragraph per row.
        for line in Text(", ").join(parts).wrap(console, console.width - 2):
            console.print(Text("  ") + line, overflow="fold")
