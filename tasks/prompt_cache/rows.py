"""A split's rows, checked, for workers that do not import SeqIO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro.tasks import checked_rows as tasks_rows
from t0repro.tasks.prompt_cache.plan import RowsOfSplit
from t0repro.tasks.readers import Reader, find_reader


def reader_of(rows: RowsOfSplit) -> Reader:
    """Where the rows are now: on this machine, or on the hub."""
    root = None if rows.root is None else Path(rows.root)
    return find_reader(root, rows.dataset, rows.subset, rows.file)


def checked_rows(rows: RowsOfSplit, reader: Reader) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same rows as `t0repro.tasks.sources.PromptedSource.rows`, for all templates of a run.

    Raises:
      UserError: as `t0repro.tasks.checked_rows.checked_rows`.
    """
    columns = frozenset(rows.columns)
    schema = tasks_rows.schema_of_rows(rows.dataset, rows.subset, reader, columns)
    return tasks_rows.checked_rows(rows.dataset, rows.subset, reader, schema, rows.max_rows)
