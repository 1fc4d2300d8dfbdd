"""A dataset's rows and the template that renders them: what a prompted task is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.tasks import readers
from t0repro.tasks.checked_rows import checked_rows, schema_of_rows
from t0repro.tasks.columns import columns_read
from t0repro.tasks.readers import Reader
from t0repro.tasks.schema import Schema
from t0repro.tasks.splits import Split
from t0repro.tasks.templates import Drop, Rendering, compiled


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
        """The split's prompted examples in the file's order."""
        for index, row in self.rows(split):
            rendering = self.render(split, index, row)
            if isinstance(rendering, Drop):
                continue
            example: dict[str, Any] = {"inputs": rendering.inputs, "targets": rendering.targets}
            if self.template.answer_choices:
                example["answer_choices"] = rendering.answer_choices
            yield example

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
            raise UserError(
                f"Template {self.template.name!r} cannot render a row: {error!r}.",
                where=self.reader(split).place(index),
                fix="Mend the template, or give the row the fields, of the types, that the dataset"
                " had in datasets 1.12.",
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


# Rows that were read once and found to fit, counted: every template of a dataset reads them again.
_checked: dict[tuple[Reader, Schema | None], int] = {}
