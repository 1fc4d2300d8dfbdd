"""Checks of a run's inputs before any data is read, any graph is built or any file is written.

`check_run` is what a command calls once gin is parsed; the functions below it take plain values, so
that either stack can call them. Each raises UserError with what to do.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from t0repro.config import cloud
from t0repro.errors import UserError, nearest_names

_EVALUATION_MODES = (
    "eval",
    "score_eval",
    "perplexity_eval",
    "infer",
    "score_from_dataset",
    "score_from_strings",
)
_EMBEDDINGS = ("shared/embedding", "encoder/embedding", "decoder/embedding")


@contextlib.contextmanager
def configuration_errors() -> Iterator[None]:
    """Turns what fails while modules are imported and gin is parsed into UserErrors, words kept.

    Whatever fails there is in a file or an override of the user's; the original exception stays
    attached as the cause.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        unknown = re.match(r"No Task or Mixture found with name '(.*)'", str(error))
        if unknown:
            raise _unknown_mixture(unknown.group(1)) from error
        if isinstance(error, ModuleNotFoundError):
            raise UserError(
                f"{error}.",
                where="--module_import, or an `import` line of a gin file",
                fix="Check the module's name; its folder must be on PYTHONPATH or installed.",
            ) from error
        where = None
        if isinstance(error, SyntaxError) and error.text:
            where = f"{error.filename or '--gin_param'}: {error.text.strip()}"
        # gin appends the whole configuration to what it says of an undefined macro.
        message = str(error).partition(" in config string:")[0].strip() or repr(error)
        raise UserError(message, where=where, fix="Mend the gin file or the override.") from error


def check_run(model_dir: str, *, jax: bool) -> None:
    """Checks everything that gin's finalized configuration names.

    Args:
      model_dir: the run's directory.
      jax: whether JAX checkpoints are accepted beside Mesh TensorFlow's.

    Raises:
      UserError: for an unknown mixture, a missing cache, a missing or damaged checkpoint, or a
        vocabulary that does not match the checkpoint.
    """
    _check_addresses(model_dir, jax=jax)
    mode = _bound("utils.run.mode", "train")
    split = _bound("utils.run.dataset_split", "train")
    if mode == "train":
        _check_data("mesh_train_dataset_fn", split)
    elif mode in ("eval", "score_eval", "perplexity_eval", "score_from_dataset"):
        _check_data("mesh_eval_dataset_fn", split)
    checkpoints = []
    if mode in _EVALUATION_MODES:
        checkpoints = checkpoints_to_evaluate(
            model_dir, _bound("utils.run.eval_checkpoint_step", None), jax=jax
        )
    elif mode == "train":
        checkpoints = _checkpoints_to_start_from(model_dir, jax=jax)
    for checkpoint in checkpoints:
        check_checkpoint(checkpoint)
        check_vocabulary(
            checkpoint,
            _bound("utils.run.vocabulary", None),
            _bound("Unitransformer.vocab_divisor", 128),
        )


def _check_addresses(model_dir: str, *, jax: bool) -> None:
    """Refuses gs:// addresses that cannot be reached, before TensorFlow tries to for minutes."""
    cloud.check_address(model_dir, "--model_dir")
    cloud.check_address(_bound("utils.run.init_checkpoint", None), "run.init_checkpoint")
    if jax and model_dir.startswith("gs://"):
        raise UserError(
            f"The JAX stack keeps its checkpoints in a local directory, not in {model_dir}.",
            where="--model_dir",
            fix="Give a local --model_dir; run.init_checkpoint may be an address.",
        )


def _bound(binding: str, default: Any) -> Any:
    """The value that gin would pass for an argument: macros resolved, references evaluated."""
    import gin

    try:
        return copy.deepcopy(gin.query_parameter(binding))
    except ValueError:
        return default


# ---- Data ---------------------------------------------------------------------------------------


def _check_data(dataset_fn: str, split: str) -> None:
    name = _bound(f"{dataset_fn}.mixture_or_task_name", None)
    if name is not None:  # else a function of another name provides the data
        check_mixture(name)
        if _bound(f"{dataset_fn}.use_cached", False):
            check_cached(name, split)
        else:
            check_rows(name, split)


def check_mixture(name: str) -> None:
    """Raises UserError unless a task or mixture of this name is registered."""
    import seqio

    if name not in seqio.MixtureRegistry.names() and name not in seqio.TaskRegistry.names():
        raise _unknown_mixture(name)


def _unknown_mixture(name: str) -> UserError:
    import seqio

    known = sorted({*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()})
    return UserError(
        f"There is no task or mixture {name!r}; most like it: {nearest_names(name, known)}.",
        where=f"{len(known)} tasks and mixtures are registered by the imported modules",
        fix="Correct MIXTURE_NAME, or name the module that registers it with --module_import.",
    )


def check_cached(name: str, split: str) -> None:
    """Raises UserError if a task of the mixture that has the split is in no cache directory."""
    import seqio

    mixture = seqio.get_mixture_or_task(name)
    tasks = [task for task in seqio.get_subtasks(mixture) if split in task.splits]
    missing = [task.name for task in tasks if not task.cache_dir]
    if not missing:
        return
    searched = list(seqio.get_global_cache_dirs())
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    target = searched[0] if searched else "CACHE_DIR"
    raise UserError(
        f"use_cached = True, but {len(missing)} of {len(tasks)} tasks of {name!r} are not cached: "
        f"{shown}.",
        where="searched " + (", ".join(searched) or "nowhere: no --additional_task_cache_dirs"),
        fix=f"seqio_cache_tasks --tasks='{','.join(missing[:5])}' --output_cache_dir={target} "
        "--module_import=MODULE (scripts/cache.sh caches a whole mixture).",
    )


def check_rows(name: str, split: str) -> None:
    """Raises UserError if the rows behind a prompted task of the mixture are missing."""
    import seqio

    from t0repro.tasks.seqio_tasks import PromptedSource

    for task in seqio.get_subtasks(seqio.get_mixture_or_task(name)):
        if split in task.splits and isinstance(task.source, PromptedSource):
            task.source.reader(split)


# ---- Checkpoints --------------------------------------------------------------------------------


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


def _checkpoints_to_start_from(model_dir: str, *, jax: bool) -> list[str]:
    """The checkpoints that training reads: the latest of model_dir, and init_checkpoint."""
    import tensorflow as tf

    chosen = []
    latest = tf.train.latest_checkpoint(model_dir)
    if latest:
        chosen.append(latest)
    initial = _bound("utils.run.init_checkpoint", None)
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
