"""Pretraining objectives over a user's own texts, without TensorFlow Datasets.

    T0REPRO_TEXTS='span:my_texts=/data/books/*.txt' with `import t0repro.tasks.texts` in a gin file

or, in a module of your own that a gin file imports:

    from t0repro.tasks.texts import add_text_task
    add_text_task("my_texts", {"train": "/data/books/*.txt"}, objective="span_corruption")

The preprocessors are t5's. A text is a line of a text file, or a field of a row, of C4's files for
instance.
Several texts fill one example, and a long one is split, as in T5's pretraining on C4.
"""

from __future__ import annotations

import functools
import glob
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from t0repro.errors import UserError, nearest_names
from t0repro.tasks import rows
from t0repro.tasks.csv_rows import DELIMITERS
from t0repro.tasks.vocabulary import VocabularyFile, default_vocabulary
from t0repro.words import counted

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf

Objective = Literal["span_corruption", "prefix_lm"]
OBJECTIVES: tuple[Objective, ...] = ("span_corruption", "prefix_lm")
TEXTS_VARIABLE = "T0REPRO_TEXTS"
_SHUFFLE_BUFFER = 10_000
_GZIPPED = ".gz"


def add_text_task(
    name: str,
    files: Mapping[str, str | Sequence[str]],
    *,
    objective: Objective = "span_corruption",
    field: str | Sequence[str] = "text",
    vocabulary: VocabularyFile | seqio.Vocabulary | None = None,
    merge_examples: bool = True,
) -> None:
    """Registers a SeqIO task that pretrains on text files.

    Args:
      name: The task's name.
      files: Split -> files, or patterns of files; JSON, gzipped JSON, Parquet and Arrow files have
        rows, by their endings (docs/data.md). All others have a text per line, gzipped if they end
        in .gz.
      objective: "span_corruption" as in T5's pretraining, or "prefix_lm", with which T0's
        checkpoint was adapted to language modeling: a text's two halves are its inputs and targets.
      field: The row's field with the text; if several are given, the first that a row has.
      vocabulary: The vocabulary; defaults to T5's.
      merge_examples: In span corruption, whether short texts are joined to fill an example.

    Raises:
      UserError: If a pattern matches no file or one that is no text, the objective is unknown, or
        the name is taken.
    """
    if objective not in OBJECTIVES:
        raise UserError(
            f"There is no objective {objective!r}.",
            fix=f"Choose one of {', '.join(OBJECTIVES)}.",
        )
    found = {split: _match_names(name, patterns) for split, patterns in files.items()}
    from t0repro import compat

    compat.install()
    import seqio

    if name in seqio.TaskRegistry.names():
        raise UserError(
            f"There is a task {name!r} already.", fix="Give the texts' task another name."
        )
    seqio.TaskRegistry.add(
        name,
        _source(found, (field,) if isinstance(field, str) else tuple(field)),
        preprocessors=[
            # No inputs yet: the objective makes them out of the targets.
            functools.partial(
                seqio.preprocessors.rekey, key_map={"inputs": None, "targets": "text"}
            ),
            seqio.preprocessors.tokenize,
            # Cached before the objective, which samples new noise in every epoch.
            seqio.CacheDatasetPlaceholder(),
            _make_denoising(objective, merge_examples),
            # Trims first: SeqIO's own trim at the end would cut EOS off a long example.
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=dict.fromkeys(("inputs", "targets"), _feature(vocabulary)),
        metric_fns=[],
        shuffle_buffer_size=_SHUFFLE_BUFFER,
    )


def _feature(vocabulary: VocabularyFile | seqio.Vocabulary | None) -> Any:
    """A seqio.Feature: tokens of a vocabulary, T5's if none is given, that end in EOS."""
    import seqio
    import tensorflow as tf

    from t0repro.tasks.seqio_tasks import seqio_vocabulary

    encoding = seqio_vocabulary(vocabulary or default_vocabulary())
    return seqio.Feature(encoding, add_eos=True, dtype=tf.int32)


def _make_denoising(objective: Objective, merge_examples: bool) -> Callable[..., Any]:
    """t5's preprocessor that turns a text's tokens into inputs and targets."""
    from t5.data import preprocessors

    if objective == "prefix_lm":
        return preprocessors.prefix_lm
    return functools.partial(
        preprocessors.span_corruption, merge_examples_to_reduce_padding=merge_examples
    )


def add_described(description: str) -> list[str]:
    """Registers the tasks that a description names and returns their names.

    The form is `span:NAME=FILES` or `prefix:NAME=FILES`, separated by semicolons if there are
    several. FILES is a pattern of files for the split "train"; `NAME[SPLIT]` names another split.

    Raises:
      UserError: If the description is malformed, or like `add_text_task`.
    """
    kinds: dict[str, Objective] = {"span": "span_corruption", "prefix": "prefix_lm"}
    tasks: dict[str, tuple[Objective, dict[str, str]]] = {}
    for part in filter(None, map(str.strip, description.split(";"))):
        kind, _, rest = part.partition(":")
        target, equals, files = rest.partition("=")
        name, _, split = target.strip().removesuffix("]").partition("[")
        if kind not in kinds or not equals or not name:
            raise UserError(
                f"{part!r} does not describe a task over texts"
                + (f": {kind!r} is not an objective" if kind not in kinds else "")
                + f" (nearest: {nearest_names(kind, kinds)}).",
                where=TEXTS_VARIABLE,
                fix="Write span:NAME=FILES or prefix:NAME=FILES; several are joined by ';'.",
            )
        # Collect all `NAME[SPLIT]` entries of a task, since SeqIO registers its splits together.
        tasks.setdefault(name, (kinds[kind], {}))[1][split or "train"] = files.strip()
    for name, (objective, files) in tasks.items():
        add_text_task(name, files, objective=objective)
    return list(tasks)


def _match_names(name: str, patterns: str | Sequence[str]) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    # Sorted: glob lists files in the file system's order, which is not that of another machine.
    found = sorted({path for pattern in patterns for path in glob.glob(pattern)})
    if not found:
        raise UserError(
            f"No file of the task {name!r} is there.",
            where=", ".join(patterns),
            fix="Correct the path; a pattern such as /data/*.txt may match several files.",
        )
    if not any(os.path.getsize(path) for path in found):
        raise UserError(
            f"The task {name!r} has no text: {counted(len(found), 'empty file')}.",
            where=", ".join(found),
            fix="Write the texts, one a line, or rows in a file that ends in .jsonl.",
        )
    for path in found:
        if not _has_rows(path) and not path.endswith(_GZIPPED):
            _check_is_text(Path(path))
    return found


def _check_is_text(path: Path) -> None:
    rows.check_is_text(path)
    with open(path, "rb") as file:
        if file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE):
            raise UserError("The file is UTF-16.", where=str(path), fix="Save it as UTF-8.")


def _has_rows(path: str) -> bool:
    suffix = rows.rows_suffix(Path(path))
    return suffix is not None and suffix not in DELIMITERS  # of a table, each line is a text


def _source(files: Mapping[str, list[str]], fields: Sequence[str]) -> Any:
    """The texts as a SeqIO source: scalar strings `text`; empty ones are left out."""
    import seqio

    return seqio.FunctionDataSource(functools.partial(_texts, files, fields), splits=tuple(files))


def _texts(
    files: Mapping[str, list[str]],
    fields: Sequence[str],
    split: str,
    shuffle_files: bool,
    seed: int | None = None,
) -> tf.data.Dataset:
    import tensorflow as tf

    def lines_of(path: str) -> Any:
        if _has_rows(path):
            return tf.data.Dataset.from_generator(
                functools.partial(_field_of_rows, Path(path), fields),
                output_signature=tf.TensorSpec((), tf.string),
            )
        return tf.data.TextLineDataset(path, "GZIP" if path.endswith(_GZIPPED) else None)

    paths = list(files[split])
    # SeqIO asks for it only in training; one seed gives one order.
    if shuffle_files:
        import random

        random.Random(seed).shuffle(paths)
    dataset = lines_of(paths[0])
    for path in paths[1:]:
        dataset = dataset.concatenate(lines_of(path))
    dataset = dataset.filter(lambda text: tf.strings.length(tf.strings.strip(text)) > 0)
    return dataset.map(lambda text: {"text": text})


def _field_of_rows(path: Path, fields: Sequence[str]) -> Iterator[str]:
    """The first of these fields of each row of a file.

    Raises:
      UserError: If the file is damaged, or a row lacks the field.
    """
    for number, row in enumerate(rows.read_rows(path)):
        texts = [row[field] for field in fields if isinstance(row.get(field), str)]
        if not texts:
            raise UserError(
                f"The row has no text {' or '.join(map(repr, fields))}.",
                where=rows.place_of_row(path, number),
                fix="Name the field that holds the text, or correct the row.",
            )
        yield texts[0]


# Runs on import, since a gin file can only import a module.
if os.environ.get(TEXTS_VARIABLE):
    add_described(os.environ[TEXTS_VARIABLE])
