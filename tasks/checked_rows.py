"""A split's rows as templates want them: brought to the schema of T0's time, and checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks.catalogue import label
from t0repro.tasks.readers import Reader
from t0repro.tasks.rows import kept_row
from t0repro.tasks.schema import Schema, SchemaError
from t0repro.tasks.schemas import schema_of


def schema_of_rows(
    dataset: str, subset: str | None, reader: Reader, columns: frozenset[str]
) -> Schema | None:
    """The schema that a reader's rows are brought to, or None where the catalogue has none.

    Args:
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      reader: of the rows.
      columns: what is read besides what promptsource's templates of the dataset read.
    """
    names = tuple((column, tuple(found)) for column, found in reader.class_names().items())
    return schema_of(dataset, subset, columns, names)


def checked_rows(
    dataset: str,
    subset: str | None,
    reader: Reader,
    schema: Schema | None,
    max_rows: int | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number in the data, from 0; row) of each row that a split takes.

    Args:
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      reader: of the rows.
      schema: what they are brought to; None leaves them as they are.
      max_rows: take only so many, evenly spaced over the whole data; None takes all.
      start: the first row, counted in the data before `max_rows` leaves any out.
      stop: the row to end before; None is the end.

    Raises:
      UserError: if a row is broken or does not fit the schema; it names column, file and line.
    """
    count = 0 if max_rows is None else reader.count()
    for number, row in enumerate(reader.read(start, stop), start=start):
        if not kept_row(number, count, max_rows):
            continue
        try:
            yield number, row if schema is None else schema.bring(row)
        except SchemaError as error:
            raise UserError(
                f"A row of {label(dataset, subset)} does not fit its schema. {error}",
                where=reader.place(number),
                fix="Give the row the fields, of the types, that the dataset had in datasets 1.12.",
            ) from error
