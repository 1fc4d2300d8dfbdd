"""Tasks over a handful of strings, for runs of Mesh TensorFlow that take seconds.

Imported by name in subprocesses (`--module_import=tiny_tasks`). The vocabulary is the file that
T0REPRO_TINY_VOCAB names; `train_vocabulary` makes one.
"""

import functools
import os
from pathlib import Path

import seqio
import tensorflow as tf
from t5.data import postprocessors, preprocessors
from t5.evaluation import metrics

from t0repro.errors import UserError
from t0repro.tasks.seqio_tasks import PromptedSource
from t0repro.tasks.source import PromptedRows, Split

COLORS = ("red", "green", "blue", "white")
THINGS = ("house", "car", "bird", "door", "stone", "lamp", "tree", "boat")
ROWS = [
    {"inputs": f"the {thing} is {color} . which colour ?", "targets": color, "label": index % 4}
    for number, thing in enumerate(THINGS)
    for index, color in enumerate(COLORS)
    if (number + index) % 2 == 0
]


def train_vocabulary(path: str) -> str:
    """Trains a SentencePiece model on the rows; returns its path."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{row['inputs']} {row['targets']}" for row in ROWS]),
        model_prefix=path.removesuffix(".model"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return path


def _rows(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
    del shuffle_files, seed
    rows = ROWS if split == "train" else ROWS[:5]
    return tf.data.Dataset.from_tensor_slices(
        {
            "inputs": [row["inputs"] for row in rows],
            "targets": [row["targets"] for row in rows],
            "label": [row["label"] for row in rows],
        }
    )


def _no_rows(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
    return _rows(split, shuffle_files, seed).take(0)


def _broken_rows(split: str, shuffle_files: bool = False, seed: int | None = None):
    del split, shuffle_files, seed

    def rows():
        yield {"inputs": "the house is red . which colour ?", "targets": "red"}
        raise UserError("Row 3 is broken.", where="rows.jsonl:3", fix="Fix it.")

    text = tf.TensorSpec((), tf.string)
    return tf.data.Dataset.from_generator(rows, output_signature={"inputs": text, "targets": text})


def _features() -> dict[str, seqio.Feature]:
    vocabulary = seqio.SentencePieceVocabulary(os.environ["T0REPRO_TINY_VOCAB"])
    return {
        "inputs": seqio.Feature(vocabulary, add_eos=False),
        "targets": seqio.Feature(vocabulary, add_eos=True),
    }


def register() -> None:
    """Registers a task to learn, its rank classification, and four that must fail."""
    source = seqio.FunctionDataSource(_rows, splits=("train", "validation"))
    tokenize = [
        seqio.preprocessors.tokenize,
        seqio.CacheDatasetPlaceholder(),
        seqio.preprocessors.append_eos,
    ]
    seqio.TaskRegistry.add(
        "tiny_generate",
        source,
        preprocessors=tokenize,
        output_features=_features(),
        metric_fns=[metrics.accuracy],
    )
    expand = functools.partial(
        preprocessors.rank_classification,
        inputs_fn=lambda example: tf.repeat(example["inputs"], len(COLORS)),
        targets_fn=lambda example: tf.constant(COLORS),
        is_correct_fn=lambda example: tf.equal(tf.constant(COLORS), example["targets"]),
    )
    seqio.TaskRegistry.add(
        "tiny_generate_score_eval",
        source,
        preprocessors=[expand, *tokenize],
        output_features=_features(),
        postprocess_fn=postprocessors.rank_classification,
        metric_fns=[functools.partial(metrics.rank_classification, num_classes=len(COLORS))],
    )
    seqio.TaskRegistry.add(
        "tiny_bytes",
        source,
        preprocessors=tokenize,
        output_features={
            name: seqio.Feature(seqio.ByteVocabulary()) for name in ("inputs", "targets")
        },
        metric_fns=[metrics.accuracy],
    )
    seqio.TaskRegistry.add(
        "tiny_broken_rows",
        seqio.FunctionDataSource(_broken_rows, splits=("train",)),
        preprocessors=tokenize,
        output_features=_features(),
    )
    empty = seqio.FunctionDataSource(_no_rows, splits=("train",))
    seqio.TaskRegistry.add("tiny_empty", empty, preprocessors=tokenize, output_features=_features())
    no_rows = PromptedRows("tiny", "super_glue", "rte", None, {"train": Split("train")}, Path("no"))
    missing = PromptedSource(no_rows)
    seqio.TaskRegistry.add(
        "tiny_missing_rows", missing, preprocessors=tokenize, output_features=_features()
    )
    seqio.MixtureRegistry.add("tiny_train", ["tiny_generate"], default_rate=1.0)
    seqio.MixtureRegistry.add("tiny_eval", ["tiny_generate_score_eval"], default_rate=1.0)


if "T0REPRO_TINY_VOCAB" in os.environ:
    register()
