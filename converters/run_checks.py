"""Checks the checkpoints that a run reads before building a graph or writing a file.

Every failure is a UserError that says what to do.
"""

from __future__ import annotations

import os
from typing import Any

from t0repro.config.configuration import RunInputs
from t0repro.converters import mtf, sources, storage
from t0repro.converters.tensor_bundle import BundleReader
from t0repro.converters.tensors import CheckpointRef
from t0repro.errors import UserError
from t0repro.parameters import naming

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
      inputs: The run's inputs.
      jax: True for the JAX backend, which reads every format; False for Mesh TensorFlow.

    Raises:
      UserError: If a checkpoint is missing or damaged, its vocabulary does not match, or Mesh
        TensorFlow could not restore it.
    """
    checkpoints = []
    if inputs.mode in _EVALUATION_MODES:
        steps = inputs.eval_checkpoint_step
        steps = list(steps) if isinstance(steps, tuple) else steps
        found = sources.list_checkpoints(inputs.model_dir)
        if not jax and found and all(ref.format != "mtf" for ref in found):
            raise _of_another_stack(found[-1], "The latest of model_dir", inputs.master_dtype)
        checkpoints = checkpoints_to_evaluate(inputs.model_dir, steps, jax=jax)
    elif inputs.mode == "train":
        checkpoints = _checkpoints_to_start_from(inputs, jax=jax)
    for checkpoint in checkpoints:
        bundle = check_checkpoint(checkpoint)
        check_vocabulary(checkpoint, inputs.vocabularies, inputs.vocab_divisor)
        if not jax:
            check_types(checkpoint, bundle, inputs)


def checkpoints_to_evaluate(model_dir: str, steps: Any, *, jax: bool) -> list[str]:
    """Returns the Mesh TensorFlow prefixes in model_dir that eval_checkpoint_step selects.

    Empty if JAX will read checkpoints of another format instead, or if `steps` is None: evaluation
    then waits for new checkpoints.

    Raises:
      UserError: If model_dir has no checkpoint, or its latest is unknown.
    """
    if not mtf.mtf_steps(model_dir):
        if jax and any(ref.format != "mtf" for ref in sources.list_checkpoints(model_dir)):
            return []
        if steps is None and os.path.isdir(model_dir):
            return []
        raise UserError(
            f"No checkpoint to evaluate in {model_dir}.",
            where="looked for model.ckpt-<step>.index" + (" and checkpoint_<step>/" if jax else ""),
            fix="Train first, or correct --model_dir.",
        )
    if not jax:
        mtf.check_state_file(model_dir)
    if steps is None:
        return []
    # None if the state file names no latest checkpoint.
    chosen = [path for path in _chosen(model_dir, steps, jax) if path]
    if not chosen:
        raise UserError(
            f"The latest checkpoint of {model_dir} is not known.",
            where=f"{os.path.join(model_dir, 'checkpoint')}, the file that names it",
            fix='Give the step: --gin_param="eval_checkpoint_step = STEP".',
        )
    return chosen


def _chosen(model_dir: str, steps: Any, jax: bool) -> list[str | None]:
    """The prefixes that mesh_tensorflow.transformer.utils.get_checkpoint_iterator yields."""
    if steps == -1:
        named = storage.is_file(storage.join(model_dir, mtf.STATE_FILE))
        return [mtf.latest_mtf_prefix(model_dir)] if named or jax else []
    saved = set(mtf.mtf_steps(model_dir))
    if steps != "all":
        asked = [steps] if isinstance(steps, int) else steps
        # A step that is missing stands for the nearest one.
        saved = {min(saved, key=lambda each, step=step: abs(each - step)) for step in asked}
    return [storage.join(model_dir, f"model.ckpt-{step}") for step in sorted(saved)]


def _checkpoints_to_start_from(inputs: RunInputs, *, jax: bool) -> list[str]:
    """The checkpoints that training reads: the latest of model_dir, and init_checkpoint."""
    found = sources.list_checkpoints(inputs.model_dir)
    chosen = [mtf.latest_mtf_prefix(inputs.model_dir)]
    if not jax:
        mtf.check_state_file(inputs.model_dir)
    if not jax and found and found[-1].format != "mtf":
        raise _of_another_stack(found[-1], "The latest of model_dir", inputs.master_dtype)
    if inputs.init_checkpoint:
        chosen.append(_initial(inputs.init_checkpoint, inputs, jax))
    return [prefix for prefix in chosen if prefix]


def _initial(path: str, inputs: RunInputs, jax: bool) -> str | None:
    """Returns init_checkpoint's Mesh TensorFlow prefix; None if JAX reads it in another format."""
    # A prefix, or a path to nothing: the next check then names what is missing.
    if storage.is_file(f"{path}.index") or not storage.is_directory(path):
        return path
    if jax:
        return None
    # For a directory, Mesh TensorFlow's tf.train.list_variables takes the latest checkpoint.
    if prefix := mtf.latest_mtf_prefix(path):
        mtf.check_state_file(path)
        return prefix
    raise _of_another_stack(sources.find_checkpoint(path), "init_checkpoint", inputs.master_dtype)


def _of_another_stack(ref: CheckpointRef, what: str, master_dtype: str) -> UserError:
    """Returns the error for a checkpoint that Mesh TensorFlow would ignore or fail to read."""
    then = "with init_checkpoint = 'OUT'" if what == "init_checkpoint" else "with --model_dir=OUT"
    return UserError(
        f"{what} is a checkpoint of the format {ref.format}; Mesh TensorFlow reads only its own.",
        where=ref.path,
        fix=f"t0repro convert {ref.path} OUT --to mtf --master_dtype {master_dtype}, then run"
        f" {then}; or --backend=jax.",
    )


def check_checkpoint(prefix: str) -> BundleReader:
    """Opens a Mesh TensorFlow checkpoint and checks that its files exist and are not truncated.

    Raises:
      UserError: Naming the index or data file that is missing, damaged or truncated.
    """
    if not storage.is_file(f"{prefix}.index"):
        raise UserError(
            sources.absence(prefix),
            where=prefix,
            fix="Give a path without '.index', e.g. DIR/model.ckpt-1000; with --backend=jax also a"
            " folder that holds a checkpoint of any format.",
        )
    return BundleReader(prefix)


def check_types(prefix: str, bundle: BundleReader, inputs: RunInputs) -> None:
    """Raises UserError unless the checkpoint's parameters have the run's master dtype.

    Mesh TensorFlow restores into variables of that dtype, and TensorFlow does not cast.
    """
    masters = {
        entry.dtype.name
        for name, entry in bundle.entries.items()
        # Slots are float32 whatever the master dtype, and the step is an integer.
        if naming.split_mtf_slot(name)[1] is None
        and entry.dtype is not None
        and name != naming.MTF_STEP
    }
    if masters <= {inputs.master_dtype}:
        return
    stored = ", ".join(sorted(masters))
    raise UserError(
        f"The checkpoint's parameters are {stored}; this run has masters in {inputs.master_dtype}.",
        where=f"{prefix}; master_dtype: {inputs.provenance.get('master_dtype', 'a default')}",
        fix=f"Add --gin_param=\"utils.get_variable_dtype.master_dtype = '{sorted(masters)[-1]}'\","
        f" or t0repro convert {prefix} OUT --to mtf --master_dtype {inputs.master_dtype}.",
    )


def check_vocabulary(prefix: str, vocabulary: Any, divisor: int) -> None:
    """Raises UserError unless the embedding has as many rows as the padded vocabulary.

    Args:
      prefix: A Mesh TensorFlow checkpoint.
      vocabulary: A SeqIO vocabulary, or a pair of them for inputs and targets.
      divisor: Mesh TensorFlow pads the vocabulary to a multiple of this (vocab_divisor).
    """
    if vocabulary is None:
        return
    inputs, targets = vocabulary if isinstance(vocabulary, tuple) else (vocabulary, vocabulary)
    entries = BundleReader(prefix).entries
    for name in _EMBEDDINGS:
        if name not in entries:
            continue
        used = targets if name.startswith("decoder") else inputs
        # Rounded up to a multiple of vocab_divisor, as Mesh TensorFlow pads it; a stack's axis of
        # layers may precede the rows.
        rows, padded = entries[name].shape[-2], -(-used.vocab_size // divisor) * divisor
        if rows != padded:
            raise UserError(
                f"The vocabulary does not match the checkpoint: {name} has {rows} rows, and "
                f"{used.vocab_size} pieces are padded to {padded}.",
                where=f"{prefix}; {getattr(used, 'sentencepiece_model_file', used)}",
                fix="Use the vocabulary that the checkpoint was trained with (--vocab or "
                "T0REPRO_VOCAB), or a mixture of its features.",
            )
