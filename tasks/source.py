"""Sources: a split's rows, checked and brought to the schema of T0's time, and their template."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks import readers
from t0repro.tasks.catalogue import label
from t0repro.tasks.readers import Reader
from t0repro.tasks.rows import kept_row
from t0repro.tasks.schema import Schema, SchemaError, columns_read, schema_of
from t0repro.tasks.templates import (
    Drop,
    Rendering,
    TemplateFailure,
    UndefinedVariable,
    compiled,
    is_own,
)


@dataclasses.dataclass(frozen=True)
class Split:
    """Where a task's split comes from.

    Attributes:
      file: the split's name on disk, for instance `dev_r1`.
      max_rows: take only so many rows, evenly spaced, since some files are sorted by label; None
        takes all.
    """

    file: str
    max_rows: int | None = None


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


class PromptedRows:
    """Rows of a dataset configuration, rendered by one template, read when they are asked for.

    Args:
      name: seeds the template's random draws, together with the split and the row's number.
      dataset: the Hugging Face name.
      subset: the configuration, or None.
      template: a promptsource `Template`.
      splits: names of the task's splits -> where each comes from.
      root: the folder of the datasets, or None for the one that T0REPRO_DATA_DIR names when rows
        are read.
    """

    def __init__(
        self,
        name: str,
        dataset: str,
        subset: str | None,
        template: Any,
        splits: Mapping[str, Split],
        root: Path | None = None,
    ):
        self.name, self.dataset, self.subset = name, dataset, subset
        self.template, self.root = template, root
        self.files_of_splits = dict(splits)

    def reader(self, split: str) -> Reader:
        """The rows behind a split, unchecked: local, of the hub, or of their authors.

        Raises:
          UserError: if they are nowhere; it says every way to get them.
        """
        return readers.find_reader(
            self.root, self.dataset, self.subset, self.files_of_splits[split].file
        )

    def splits_at_hand(self) -> list[str]:
        """The splits whose rows lie on this machine; no row is read."""
        files = {
            name: readers.local_reader(self.root, self.dataset, self.subset, split.file)
            for name, split in self.files_of_splits.items()
        }
        return [name for name, reader in files.items() if reader is not None]

    def origin(self, split: str) -> dict[str, Any]:
        """What the split's rows are and of which version, as JSON."""
        limit = self.files_of_splits[split].max_rows
        return {**self.reader(split).origin(), **({} if limit is None else {"max_rows": limit})}

    def row_count(self, split: str) -> int:
        """Number of rows behind a split, unchecked: `rows` numbers them from 0 to this."""
        return self.reader(split).count()

    def num_input_examples(self, split: str) -> int:
        """Rows of the split, all checked, before templates drop any."""
        count, limit = self.checked_count(split), self.files_of_splits[split].max_rows
        return count if limit is None else min(count, limit)

    def rows(
        self, split: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The split's rows in their order, brought to the schema of T0's time and checked.

        Args:
          split: of the task.
          start: the first row, counted in the data before `max_rows` leaves any out.
          stop: the row to end before; None is the end.

        Returns:
          Each row's number in the data, from 0, which seeds its draws, and the row.

        Raises:
          UserError: if a row is broken or does not fit the schema; it names column, file and line.
        """
        reader, limit = self.reader(split), self.files_of_splits[split].max_rows
        schema = self._schema(reader)
        return checked_rows(self.dataset, self.subset, reader, schema, limit, start, stop)

    def examples(self, split: str) -> Iterator[dict[str, Any]]:
        """The split's prompted examples in the file's order.

        Rows that one's own prompt makes no example of are counted by reason in the log.
        """
        dropped: Counter[Drop] = Counter()
        for index, row in self.rows(split):
            rendering = self.render(split, index, row)
            if isinstance(rendering, Drop):
                dropped[rendering] += 1
                continue
            example: dict[str, Any] = {"inputs": rendering.inputs, "targets": rendering.targets}
            if self.template.answer_choices:
                example["answer_choices"] = rendering.answer_choices
            yield example
        if is_own(self.template):
            for reason, count in dropped.items():
                logging.warning(
                    "%s, split %s: %d rows give no example: %s",
                    self.name,
                    split,
                    count,
                    reason.value,
                )

    def render(self, split: str, index: int, row: Mapping[str, Any]) -> Rendering | Drop:
        """Renders one row of a split, or says why T0 drops the example.

        Raises:
          UserError: if the template fails on it.
        """
        try:
            return compiled(self.template).render(row, f"{self.name}/{split}/{index}")
        except UserError:  # the template itself is broken
            raise
        except Exception as error:
            raise cannot_render(
                self.template.name, error, row, self.reader(split).place(index)
            ) from error

    def _schema(self, reader: Reader) -> Schema | None:
        return schema_of_rows(self.dataset, self.subset, reader, columns_read(self.template))

    def checked_count(self, split: str) -> int:
        """Rows behind the split, each read once and found to fit."""
        reader = self.reader(split)
        key = (reader, self._schema(reader))
        if key not in _checked:
            found = checked_rows(self.dataset, self.subset, reader, key[1])
            _checked[key] = sum(1 for _ in found)
        return _checked[key]


def cannot_render(template: str, error: Exception, row: Mapping[str, Any], where: str) -> UserError:
    """The error about a template that fails on a row."""
    if isinstance(error, UndefinedVariable):
        return UserError(
            f"Template {template!r} reads what a row does not have: {error}.",
            where=where,
            fix=f"Fix the name (the row has {', '.join(map(repr, row))}), or write"
            " {{ name | default('') }} where it may be missing.",
        )
    reason = str(error) if isinstance(error, TemplateFailure) else repr(error)
    return UserError(
        f"Template {template!r} cannot render a row: {reason}.",
        where=where,
        fix="Fix the template, or give the row the fields, of the types, that the dataset had in"
        " datasets 1.12.",
    )


# Rows that were read once and found to fit, counted: every template of a dataset reads them again.
_checked: dict[tuple[Reader, Schema | None], int] = {}
