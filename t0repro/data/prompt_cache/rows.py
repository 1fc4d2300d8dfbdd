"""A split's rows, brought to their schema and checked, for workers that do not import SeqIO.

The same rows as `t0repro.tasks.sources.PromptedSource.rows`, for all templates of a run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro.data.prompt_cache.plan import RowsOfSplit
from t0repro.errors import UserError
from t0repro.tasks.catalogue import catalogue, features_of, label
from t0repro.tasks.columns import columns_of_dataset
from t0repro.tasks.readers import Reader, find_reader
from t0repro.tasks.rows import kept_row
from t0repro.tasks.schema import Schema, SchemaError


def reader_of(rows: RowsOfSplit) -> Reader:
    """Where the rows are now: on this machine, or on the hub."""
    root = None if rows.root is None else Path(rows.root)
    return find_reader(root, rows.dataset, rows.subset, rows.file)


def checked_rows(rows: RowsOfSplit, reader: Reader) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number in the data, row) of each row that the split takes.

    Raises:
      UserError: if a row is broken or does not fit the schema; it names column, file and line.
    """
    schema = _schema(rows, reader)
    count = reader.count() if rows.max_rows is not None else 0
    for number, row in enumerate(reader.read()):
        if not kept_row(number, count, rows.max_rows):
            continue
        if schema is not None:
            try:
                row = schema.bring(row)
            except SchemaError as error:
                raise UserError(
                    f"A row of {label(rows.dataset, rows.subset)} does not fit its schema. {error}",
                    where=reader.place(number),
                    fix="Give the row the fields, of the types, that the dataset had in"
                    " datasets 1.12.",
                ) from error
        yield number, row


def _schema(rows: RowsOfSplit, reader: Reader) -> Schema | None:
    features = features_of(rows.dataset, rows.subset)
    if features is None:
        return None
    read = set(rows.columns) | columns_of_dataset(rows.dataset, rows.subset)
    required = [column for column in features if column.replace("-", "_") in read]
    aliases = catalogue()[rows.dataset, rows.subset].aliases
    return Schema(features, required, aliases, dict(reader.class_names()))
