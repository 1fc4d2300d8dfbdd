"""A task over a user's files of examples: TFRecord files or JSON Lines."""

from __future__ import annotations

import functools
import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from t0repro.config.run import InferRun
from t0repro.errors import UserError
from t0repro.words import json_fault

if TYPE_CHECKING:
    import tensorflow as tf


def register_files(plan: InferRun) -> None:
    """Registers the task that reads the plan's files."""
    import seqio

    from t0repro.data.vocabulary_checks import seqio_vocabulary

    assert plan.files is not None
    _add_example_files(
        plan.files.name,
        plan.files.kind,
        plan.files.paths,
        inputs_key=plan.files.inputs_key,
        targets_key=plan.files.targets_key,
        features={
            name: seqio.Feature(seqio_vocabulary(vocabulary), add_eos=add_eos)
            for name, (vocabulary, add_eos) in plan.files.features.items()
        },
    )


_SPLIT = "infer"


def _add_example_files(
    name: str,
    kind: Literal["tfrecord", "jsonl"],
    paths: Sequence[str],
    *,
    inputs_key: str,
    targets_key: str | None,
    features: Mapping[str, Any],
) -> None:
    """Registers a task whose split "infer" has the files' examples; only once per name.

    Args:
      name: The task's name.
      kind: "tfrecord" for tf.train.Examples, "jsonl" for a JSON object on each line.
      paths: Files, or patterns of files.
      inputs_key: The feature or field with the text of the inputs.
      targets_key: The feature or field with the text of the targets; None makes them empty.
      features: seqio.Features `inputs` and `targets`.

    Raises:
      UserError: If there is no such file.
    """
    import seqio
    import tensorflow as tf

    found = sorted({path for pattern in paths for path in glob.glob(pattern)})
    if not found:
        raise UserError("The files of examples are not there.", where=", ".join(paths))
    # SeqIO refuses a name twice, and a run repeated in one process gets here again.
    if name in seqio.TaskRegistry.names():
        return
    keys = [key for key in (inputs_key, targets_key) if key]
    if kind == "tfrecord":
        texts = {key: tf.io.FixedLenFeature([], tf.string) for key in keys}
        source: Any = seqio.TFExampleDataSource({_SPLIT: found}, texts)
    else:
        source = seqio.FunctionDataSource(
            functools.partial(_rows_of_files, found, keys), splits=(_SPLIT,)
        )
    seqio.TaskRegistry.add(
        name,
        source,
        preprocessors=[
            functools.partial(
                # SeqIO sets a feature whose key is None to empty text.
                seqio.preprocessors.rekey,
                key_map={"inputs": inputs_key, "targets": targets_key},
            ),
            seqio.preprocessors.tokenize_and_append_eos,
        ],
        output_features=features,
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
      UserError: If a line is not a JSON object or lacks a field.
    """
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _fields(line, keys, f"{path}:{number}")


def _fields(line: str, keys: Sequence[str], where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"The line is not JSON: {json_fault(error)}.", where=where) from error
    if not isinstance(row, dict) or any(not isinstance(row.get(key), str) for key in keys):
        raise UserError(
            f"The row lacks a text: {' and '.join(keys)} are needed.",
            where=where,
            fix="Bind create_task_from_tfexample_file.inputs_key and targets_key to its fields.",
        )
    return {key: row[key] for key in keys}
