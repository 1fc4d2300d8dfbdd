"""A task over a user's files of examples: TFRecord files or JSON Lines."""

from __future__ import annotations

import functools
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t0repro.config.run import InferRun
from t0repro.errors import UserError
from t0repro.tasks import rows

if TYPE_CHECKING:
    import tensorflow as tf


_SPLIT = "infer"


def register_files(plan: InferRun) -> None:
    """Registers a task whose split "infer" has the examples of the plan's files; once per name.

    Raises:
      UserError: If there is no such file.

    Source: t5x.infer.create_task_from_tfexample_file.
    """
    import seqio
    import tensorflow as tf

    from t0repro.data.vocabulary_checks import seqio_vocabulary

    files = plan.files
    assert files is not None
    found = sorted({path for pattern in files.paths for path in glob.glob(pattern)})
    if not found:
        raise UserError(
            "The files of examples are not there.",
            where=", ".join(files.paths),
            fix="Correct their paths or patterns in the gin file.",
        )
    # SeqIO refuses a name twice, and a run repeated in one process gets here again.
    if files.name in seqio.TaskRegistry.names():
        return
    keys = [key for key in (files.inputs_key, files.targets_key) if key]
    if files.kind == "tfrecord":
        texts = {key: tf.io.FixedLenFeature([], tf.string) for key in keys}
        source: Any = seqio.TFExampleDataSource({_SPLIT: found}, texts)
    else:
        read = functools.partial(_rows_of_files, found, keys)
        source = seqio.FunctionDataSource(read, splits=(_SPLIT,))
    # SeqIO sets a feature whose key is None to empty text.
    key_map = {"inputs": files.inputs_key, "targets": files.targets_key}
    seqio.TaskRegistry.add(
        files.name,
        source,
        preprocessors=[
            functools.partial(seqio.preprocessors.rekey, key_map=key_map),
            seqio.preprocessors.tokenize_and_append_eos,
        ],
        output_features={
            name: seqio.Feature(seqio_vocabulary(vocabulary), add_eos=add_eos)
            for name, (vocabulary, add_eos) in files.features.items()
        },
    )


def _rows_of_files(
    paths: Sequence[str],
    keys: Sequence[str],
    split: str,
    shuffle_files: bool,
    seed: int | None = None,
) -> tf.data.Dataset:
    del split, shuffle_files, seed  # one split, and examples in the files' order
    import tensorflow as tf

    signature = {key: tf.TensorSpec((), tf.string) for key in keys}
    return tf.data.Dataset.from_generator(
        functools.partial(_rows, paths, keys), output_signature=signature
    )


def _rows(paths: Sequence[str], keys: Sequence[str]) -> Iterator[dict[str, str]]:
    """The fields of each row, as text.

    Raises:
      UserError: If a file is damaged, or a row lacks a field.
    """
    for path in map(Path, paths):
        for number, row in enumerate(rows.read_rows(path)):
            if any(not isinstance(row.get(key), str) for key in keys):
                raise UserError(
                    f"The row lacks a text: {' and '.join(keys)} are needed.",
                    where=rows.place_of_row(path, number),
                    fix="Bind create_task_from_tfexample_file.inputs_key and targets_key to its"
                    " fields.",
                )
            yield {key: row[key] for key in keys}
