"""A page as data, and its renderings: one HTML file, GitHub-flavored Markdown, terminal tables.

One description serves all three, so that they cannot disagree. Names come from files by others; no
rendering lets a name act as markup.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

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
      plot: HTML from drawing.inline_plot.
      legend: (CSS class of the key, its meaning), below the plot.
      header: the table's columns; the first is the key, which every rendering shows in full.
      rows: the table's rows.
      bold: indices of the rows to set in bold.
      facts: (name, value) pairs.
      text: preformatted text.
      level: 2 for a section, 3 for a part of the section before it.
      folded: whether HTML hides the content until a reader opens it.
      terminal_rows: how many rows a terminal shows, which has no pages to turn.
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
    terminal_rows: int = 40


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
