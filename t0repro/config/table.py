"""A run as a table: field, value and where the value was set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from t0repro.config.run import Run
from t0repro.config.settings import place_of


def render(config: Run) -> str:
    """One line per value: dotted field, value, and the file and line or override that set it."""
    rows = [
        (field, repr(value), place_of(field, config.provenance) or "")
        for field, value in flatten(config)
        if not field.startswith("provenance")
    ]
    return align_columns(rows)


def align_columns(rows: Sequence[tuple[str, str, str]]) -> str:
    """Names, values and places in three columns; a long value pushes its place to the right."""
    # Widths of fields and values; places come last and need none.
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{field:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {place}".rstrip()
        for field, value, place in rows
    )


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dataclasses with their dotted names, in declaration order."""
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(item):
            yield from flatten(item, f"{name}.")
        else:
            yield name, item
