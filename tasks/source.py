"""Sources: a split's rows, checked and converted to the schema of T0's time, and their template."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks import readers
from t0repro.tasks.catalog import label
from t0repro.tasks.prompt_environment import TemplateFailure, UndefinedVariable
from t0repro.tasks.readers import Reader
from t0repro.tasks.rendering import compiled
from t0repro.tasks.rows import choose_rows
from t0repro.tasks.schema import Schema, SchemaError, columns_read, schema_of
from t0repro.tasks.templates import Drop, Rendering, is_own


@dataclasses.dataclass(frozen=True)
class Split:
    """The source of the rows of a task's split.

    Attributes:
      file: The split's name on disk, for instance `dev_r1`.
      max_rows: Maximum number of rows to take; None takes all. They are evenly spaced over the
        file, since some files are sorted by label.
      seed: Draws those rows at random instead, as T-Few does (t0repro.tasks.rows.choose_rows).
    """

    file: str
    max_rows: int | None = None
    seed: int | None = None


def schema_of_rows(
    dataset: str, subset: str | None, reader: Reader, columns: frozenset[str]
) -> Schema | None:
    """The schema that a reader's rows are converted to, or None if the catalog has none.

    Args:
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      reader: Reads the rows.
      columns: Columns to read in addition to those that promptsource's templates of the dataset
        read.
    """
    # Use tuples, because they are cache keys of compiled schemas.
    names = tuple((column, tuple(found)) for column, found in reader.class_names().items())
    return schema_of(dataset, subset, columns, names)


def check_rows(
    dataset: str,
    subset: str | None,
    reader: Reader,
    schema: Schema | None,
    limit: Split | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number in the data, from 0; row) for each row of a split.

    Args:
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      reader: Reads the rows.
      schema: The schema to convert rows to; None leaves them as they are.
      limit: Which of the data's rows to keep; None keeps all.
      start: The first row, counted in the data before `limit` drops any.
      stop: The row to stop before; None reads to the end.

    Raises:
      UserError: If a row is broken or does not fit the schema, or if there is none at all; it names
        column, file and line.
    """
    # Counting takes a pass over the data; skip it if all rows are taken.
    kept = None
    if limit is not None and limit.max_rows is not None:
        kept = choose_rows(reader.count(), limit.max_rows, limit.seed)
    number = None
    for number, row in enumerate(reader.read(start, stop), start=start):
        if kept is not None and number not in kept:
            continue
        try:
            yield number, row if schema is None else schema.bring(row)
        except SchemaError as error:
            raise UserError(
                f"A row of {label(dataset, subset)} does not fit its schema. {error}",
                where=reader.place(number),
                fix="Give the row the fields and types that the dataset had in datasets 1.12.",
            ) from error
    # A failed download leaves an empty file, from which training would silently learn nothing.
    if number is None and start == 0 and stop != 0:
        raise UserError(
            f"{label(dataset, subset)} has no rows.",
            where=reader.place(0),
            fix="Write the file again, or remove it if the split has no rows.",
        )


class PromptedRows:
    """Rows of a dataset configuration, read on demand and rendered by one template.

    Args:
      name: Seeds the template's random choices, together with the split and the row's number.
      dataset: The Hugging Face name.
      subset: The configuration, or None.
      template: A promptsource `Template`.
      splits: Names of the task's splits -> where their rows come from.
      root: The folder of datasets; defaults to the one that T0REPRO_DATA_DIR names at the time
        when rows are read.
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
        # Copy, so that no caller can add splits to a registered task.
        self.files_of_splits = dict(splits)

    def drop_split(self, split: str) -> None:
        """Leaves a split out, as if the task had never had it."""
        self.files_of_splits.pop(split, None)  # its twin, over the same rows, may come first

    def reader(self, split: str) -> Reader:
        """The reader of a split's rows, which are not checked yet.

        Raises:
          UserError: If the rows are nowhere; it lists every way to get them.
        """
        return readers.find_reader(
            self.root, self.dataset, self.subset, self.files_of_splits[split].file
        )

    def available_splits(self) -> list[str]:
        """The splits with rows on this machine; reads no row."""
        files = {
            name: readers.local_reader(self.root, self.dataset, self.subset, split.file)
            for name, split in self.files_of_splits.items()
        }
        return [name for name, reader in files.items() if reader is not None]

    def origin(self, split: str) -> dict[str, Any]:
        """The origin and version of the split's rows, as JSON values."""
        taken = self.files_of_splits[split]
        limits = {"max_rows": taken.max_rows, "seed": taken.seed}
        known = {name: value for name, value in limits.items() if value is not None}
        return {**self.reader(split).origin(), **known}

    def row_count(self, split: str) -> int:
        """Number of rows in a split's data, unchecked; `rows` numbers them from 0 to below this."""
        return self.reader(split).count()

    def num_input_examples(self, split: str) -> int:
        """Number of rows in the split before templates drop any; checks all of them."""
        count, limit = self.checked_count(split), self.files_of_splits[split].max_rows
        return count if limit is None else min(count, limit)

    def rows(
        self, split: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The split's rows in order, checked and converted to the schema of T0's time.

        Args:
          split: The task's split.
          start: The first row, counted in the data before `max_rows` drops any.
          stop: The row to stop before; None reads to the end.

        Returns:
          An iterator of (number in the data, row). The number, from 0, seeds the row's random
          choices.

        Raises:
          UserError: If a row is broken or does not fit the schema; it names column, file and line.
        """
        reader, limit = self.reader(split), self.files_of_splits[split]
        schema = self._schema(reader)
        return check_rows(self.dataset, self.subset, reader, schema, limit, start, stop)

    def examples(self, split: str) -> Iterator[dict[str, Any]]:
        """Yields the split's prompted examples in the file's order.

        If the prompt is a user's own, rows that give no example are logged by reason.
        """
        dropped: Counter[Drop] = Counter()
        for index, row in self.rows(split):
            rendering = self.render(split, index, row)
            if isinstance(rendering, Drop):
                dropped[rendering] += 1
                continue
            # The keys of PromptedSource's signature, which tf.data requires in every example.
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

    def dropped_rows(self, split: str, examples: int) -> list[int] | None:
        """The rows that give no example, before the row of the last of so many examples.

        Args:
          split: The task's split.
          examples: Number of examples, from the first on.

        Returns:
          Their numbers among the split's rows, from 0; None if the split has fewer examples.
        """
        limit, count = self.files_of_splits[split].max_rows, self.row_count(split)
        if examples == (count if limit is None else min(count, limit)):
            return []  # every row gives one
        dropped: list[int] = []
        for number, (index, row) in enumerate(self.rows(split)):
            if isinstance(self.render(split, index, row), Drop):
                dropped.append(number)
            elif number + 1 - len(dropped) == examples:
                return dropped
        return None

    def render(self, split: str, index: int, row: Mapping[str, Any]) -> Rendering | Drop:
        """Renders one row of a split, or returns why it gives no example.

        Raises:
          UserError: If the template fails on the row.
        """
        try:
            return compiled(self.template).render(row, f"{self.name}/{split}/{index}")
        except UserError:  # the template itself is broken
            raise
        # A template calls filters and methods of the row's values, which may raise anything.
        except Exception as error:
            raise cannot_render(
                self.template.name, error, row, self.reader(split).place(index)
            ) from error

    def _schema(self, reader: Reader) -> Schema | None:
        return schema_of_rows(self.dataset, self.subset, reader, columns_read(self.template))

    def checked_count(self, split: str) -> int:
        """Number of rows in the split's data, after checking each of them once per process."""
        reader = self.reader(split)
        # The schema is part of the key: the same data may be checked for different columns.
        key = (reader, self._schema(reader))
        if key not in _checked:
            found = check_rows(self.dataset, self.subset, reader, key[1])
            _checked[key] = sum(1 for _ in found)
        return _checked[key]


def cannot_render(template: str, error: Exception, row: Mapping[str, Any], where: str) -> UserError:
    """The error for a template that fails on a row."""
    if isinstance(error, UndefinedVariable):
        fields = ", ".join(map(repr, row))
        hint = name_nearest(error, row) or f"the row has {fields}"
        return UserError(
            f"Template {template!r} reads what a row does not have: {error}; {hint}.",
            where=where,
            fix=f"Fix the name (the row has {fields}), or write"
            " {{ name | default('') }} where it may be missing.",
        )
    reason = str(error) if isinstance(error, TemplateFailure) else repr(error)
    return UserError(
        f"Template {template!r} cannot render a row: {reason}.",
        where=where,
        fix="Fix the template or the row. Those of T0's own datasets are as in datasets 1.12.",
    )


def name_nearest(error: UndefinedVariable, row: Mapping[str, Any]) -> str | None:
    """Names the field of a row closest to the variable that it lacks; None if none is close."""
    unknown = re.match(r"'(\w+)' is undefined", str(error))
    fields = [name.replace("-", "_") for name in row]  # their names in a template
    for nearest in difflib.get_close_matches(unknown[1] if unknown else "", fields, n=1):
        if nearest.isidentifier():
            return f"nearest: {nearest!r}"
        return f"nearest: {nearest!r}, which no template can name; rename the column in the rows"
    return None


# Row counts of checked data; otherwise every template of a dataset would check it again.
_checked: dict[tuple[Reader, Schema | None], int] = {}
