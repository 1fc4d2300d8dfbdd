"""SeqIO sources: rows on disk, rendered by one template."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import seqio
import tensorflow as tf

from t0repro.errors import UserError
from t0repro.tasks.rows import count_rows, data_folder, kept_row, read_rows, rows_file
from t0repro.tasks.splits import Split
from t0repro.tasks.templates import Rendering, render


class PromptedSource(seqio.FunctionDataSource):
    """Rows of a dataset configuration, rendered by one template.

    Yields `inputs` and `targets`, strings, and `answer_choices`, strings of shape [choices], where
    the template has them. Nothing is read before a dataset or a number of examples is asked for.

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
        super().__init__(self._dataset, splits=tuple(splits))

    def path(self, split: str) -> Path:
        """The file behind a split; a missing one is a UserError."""
        root = self.root or data_folder()
        return rows_file(root, self.dataset, self.subset, self.files_of_splits[split].file)

    def num_input_examples(self, split: str) -> int:
        """Rows of the split before templates drop any."""
        count, limit = count_rows(self.path(split)), self.files_of_splits[split].max_rows
        return count if limit is None else min(count, limit)

    def examples(self, split: str) -> Iterator[dict[str, Any]]:
        """The split's prompted examples in the file's order."""
        path, limit = self.path(split), self.files_of_splits[split].max_rows
        count = count_rows(path)
        for index, row in enumerate(read_rows(path)):
            if not kept_row(index, count, limit):
                continue
            rendering = self._render(split, index, row, path)
            if rendering is None:
                continue
            example: dict[str, Any] = {"inputs": rendering.inputs, "targets": rendering.targets}
            if self.template.answer_choices:
                example["answer_choices"] = rendering.answer_choices
            yield example

    def _render(self, split: str, index: int, row: dict[str, Any], path: Path) -> Rendering | None:
        try:
            return render(self.template, row, draw_key=f"{self.name}/{split}/{index}")
        except Exception as error:
            raise UserError(
                f"Template {self.template.name!r} cannot render a row: {error!r}.",
                where=f"{path}, row {index + 1}",
                fix="Give the row the fields, of the types, that the dataset had in datasets 1.12.",
            ) from error

    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # one file a split; SeqIO shuffles the examples
        # Broken rows are found here, where a Python exception still reaches the user as it is.
        count_rows(self.path(split))
        signature: dict[str, tf.TensorSpec] = {
            "inputs": tf.TensorSpec((), tf.string),
            "targets": tf.TensorSpec((), tf.string),
        }
        if self.template.answer_choices:
            signature["answer_choices"] = tf.TensorSpec((None,), tf.string)
        return tf.data.Dataset.from_generator(
            functools.partial(self.examples, split), output_signature=signature
        )
