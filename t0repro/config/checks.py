"""Checks of the checkpoints that a run reads, before any graph is built or any file is written.

Each raises UserError with what to do.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from t0repro.config.configuration import RunInputs
from t0repro.errors import UserError

_EVALUATION_MODES = (
    "eval",
    "score_eval",
    "perplexity_eval",
    "infer",
    "score_from_dataset",
    "score_from_strings",
)
_EMBEDDINGS = ("shared/embedding", "encoder/embedding", "decoder/embedding")


def check_checkpoints(inputs: RunInputs, *, jax: bool) -> None:
    """Checks the checkpoints that a run will read.

    Args:
      inputs: of the run.
      jax: whether JAX checkpoints are accepted beside Mesh TensorFlow's.

    Raises:
      UserError: for a missing or damaged checkpoint, or a vocabulary that does not match it.
    """
    checkpoints = []
    if inputs.mode in _EVALUATION_MODES:
        steps = inputs.eval_checkpoint_step
        steps = list(steps) if isinstance(steps, tuple) else steps
        checkpoints = checkpoints_to_evaluate(inputs.model_dir, steps, jax=jax)
    elif inputs.mode == "train":
        checkpoints = _checkpoints_to_start_from(inputs, jax=jax)
    for checkpoint in checkpoints:
        check_checkpoint(checkpoint)
        check_vocabulary(checkpoint, inputs.vocabularies, inputs.vocab_divisor)


def checkpoints_to_evaluate(model_dir: str, steps: Any, *, jax: bool) -> list[str]:
    """Mesh TensorFlow checkpoints (prefixes) in model_dir that eval_checkpoint_step chooses.

    Empty when JAX checkpoints take their place, or when evaluation is to wait for new ones (None).

    Raises:
      UserError: if model_dir holds no checkpoint.
    """
    from mesh_tensorflow.transformer import utils

    if not _saved_steps(model_dir):
        if jax and _has_jax_checkpoint(model_dir):
            return []
        if steps is None and os.path.isdir(model_dir):
            return []
        raise UserError(
            f"No checkpoint to evaluate in {model_dir}.",
            where="looked for model.ckpt-<step>.index" + (" and checkpoint_<step>/" if jax else ""),
            fix="Train first, or correct --model_dir.",
        )
    if steps is None:
        return []
    chosen = [path for path in utils.get_checkpoint_iterator(steps, model_dir) if path]
    if not chosen:
        raise UserError(
            f"The latest checkpoint of {model_dir} is not known.",
            where=f"{os.path.join(model_dir, 'checkpoint')}, the file that names it",
            fix='Give the step: --gin_param="eval_checkpoint_step = STEP".',
        )
    return chosen


def _checkpoints_to_start_from(inputs: RunInputs, *, jax: bool) -> list[str]:
    """The checkpoints that training reads: the latest of model_dir, and init_checkpoint."""
    import tensorflow as tf

    chosen = []
    latest = tf.train.latest_checkpoint(inputs.model_dir)
    if latest:
        chosen.append(latest)
    initial = inputs.init_checkpoint
    if initial and not (jax and os.path.isdir(initial)):
        if os.path.isdir(initial):
            # Mesh TensorFlow's tf.train.list_variables takes a directory for its latest one.
            initial = tf.train.latest_checkpoint(initial) or initial
        chosen.append(initial)
    return chosen


def _saved_steps(model_dir: str) -> set[int]:
    import tensorflow as tf

    if not tf.io.gfile.isdir(model_dir):
        return set()
    names = (re.match(r"model\.ckpt-(\d+)\.", name) for name in tf.io.gfile.listdir(model_dir))
    return {int(match.group(1)) for match in names if match}


def _has_jax_checkpoint(model_dir: str) -> bool:
    return any(os.path.isdir(path) for path in glob.glob(os.path.join(model_dir, "checkpoint_*")))


def check_checkpoint(prefix: str) -> None:
    """Raises UserError if a checkpoint of TensorFlow lacks its index, or a shard is missing or cut.

    The index says how many shards there are, and the shapes say how many bytes they hold together.
    """
    import tensorflow as tf

    if not tf.io.gfile.exists(prefix + ".index"):
        raise UserError(
            f"There is no checkpoint {prefix}.",
            where=f"{prefix}.index is missing",
            fix="Give the path up to and without '.index', e.g. DIR/model.ckpt-1000.",
        )
    shards = sorted(tf.io.gfile.glob(prefix + ".data-?????-of-?????"))
    _check_shards_present(prefix, shards)
    try:
        reader = tf.train.load_checkpoint(prefix)
    except (tf.errors.OpError, RuntimeError) as error:
        raise UserError(f"The checkpoint {prefix} cannot be read: {error}.", fix=_COPY) from error
    types, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    # Text (none in what Mesh TensorFlow saves) has no fixed size.
    wanted = sum(
        math.prod(shapes[name]) * dtype.size for name, dtype in types.items() if dtype.size
    )
    present = sum(tf.io.gfile.stat(shard).length for shard in shards)
    if present < wanted:
        raise UserError(
            f"The data of the checkpoint {prefix} is cut: {present:,} of {wanted:,} bytes.",
            where=", ".join(os.path.basename(shard) for shard in shards),
            fix=_COPY,
        )


_COPY = "Copy all files of the checkpoint again (.index and every .data-*), or use another step."


def _check_shards_present(prefix: str, shards: Sequence[str]) -> None:
    """Compares the shard files with the number that each has in its name."""
    count = max((int(shard.rpartition("-of-")[2]) for shard in shards), default=0)
    expected = [f"{prefix}.data-{index:05}-of-{count:05}" for index in range(count)]
    missing = [os.path.basename(path) for path in expected if path not in shards]
    if not shards:
        missing = [f"{os.path.basename(prefix)}.data-*"]
    if missing:
        raise UserError(
            f"The checkpoint {prefix} lacks data files: {', '.join(missing)}.",
            where=os.path.dirname(prefix),
            fix=_COPY,
        )


def check_vocabulary(prefix: str, vocabulary: Any, divisor: int) -> None:
    """Raises UserError unless the checkpoint's embedding has the padded vocabulary's rows.

    Args:
      prefix: a Mesh TensorFlow checkpoint.
      vocabulary: a SeqIO vocabulary, or a pair of them for inputs and targets.
      divisor: Mesh TensorFlow pads the number of pieces to a multiple of it (vocab_divisor).
    """
    import tensorflow as tf

    if vocabulary is None:
        return
    inputs, targets = vocabulary if isinstance(vocabulary, tuple) else (vocabulary, vocabulary)
    shapes = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()
    for name in _EMBEDDINGS:
        if name not in shapes:
            continue
        used = targets if name.startswith("decoder") else inputs
        rows, padded = shapes[name][-2], -(-used.vocab_size // divisor) * divisor
        if rows != padded:
            raise UserError(
                f"The vocabulary does not match the checkpoint: {name} has {rows} rows, and "
                f"{used.vocab_size} pieces are padded to {padded}.",
                where=f"{prefix}; {getattr(used, 'sentencepiece_model_file', used)}",
                fix="Use the vocabulary that the checkpoint was trained with (--vocab or "
                "T0REPRO_VOCAB), or a mixture of its features.",
            )
