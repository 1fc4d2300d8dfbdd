"""SeqIO sources: rows on disk, rendered by one template."""

from __future__ import annotations

import functools

import seqio
import tensorflow as tf

from t0repro.tasks.prompted_rows import PromptedRows


class PromptedSource(PromptedRows, seqio.FunctionDataSource):
    """Prompted rows as SeqIO reads them.

    Yields `inputs` and `targets`, strings, and `answer_choices`, strings of shape [choices], where
    the template has them.
    """

    def __init__(self, rows: PromptedRows):
        PromptedRows.__init__(
            self,
            rows.name,
            rows.dataset,
            rows.subset,
            rows.template,
            rows.files_of_splits,
            rows.root,
        )
        seqio.FunctionDataSource.__init__(self, self._dataset, splits=tuple(rows.files_of_splits))

    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # one file a split; SeqIO shuffles the examples
        # Broken rows are found here, where a Python exception still reaches the user as it is.
        self.checked_count(split)
        signature: dict[str, tf.TensorSpec] = {
            "inputs": tf.TensorSpec((), tf.string),
            "targets": tf.TensorSpec((), tf.string),
        }
        if self.template.answer_choices:
            signature["answer_choices"] = tf.TensorSpec((None,), tf.string)
        return tf.data.Dataset.from_generator(
            functools.partial(self.examples, split), output_signature=signature
        )
