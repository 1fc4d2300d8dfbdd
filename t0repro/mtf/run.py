"""Runs gin's configuration on Mesh TensorFlow: the part of t5's main after gin's parsing.

`mesh_tensorflow.transformer.utils.run` chooses the mode by run.mode; with --use_model_api,
t0repro.mtf.run chooses it by --mode. No library code is copied: both are called as t5 calls them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import gin
from t0repro.config.configuration import Configuration, RunInputs
from t0repro.config.mtf.model_api import check_mode, checkpoint_steps
from t0repro.config.mtf.parser import list_deprecated_references
from t0repro.config.mtf.refusals import refusal_on_mesh_tensorflow
from t0repro.config.run import TrainRun
from t0repro.errors import UserError
from t0repro.mtf import hooks
from t0repro.mtf.metrics_file import is_on_this_disk
from t0repro.progress import working
from t0repro.words import remove_passwords

# t5's main binds these dtypes to float32 in every run without --tpu.
_FLOAT32_ON_CPU = ("slice", "activation")


def run(flags: Any, configuration: Configuration | None) -> None:
    """Runs t5's command on this machine's CPU.

    No TensorFlow version installable today supports Mesh TensorFlow on a TPU.

    Args:
      flags: absl's flags of t5_mesh_transformer. gin's configuration must be parsed and locked.
      configuration: gin's configuration; None with --use_model_api.

    Raises:
      UserError: If training cannot continue in model_dir, or only the JAX stack has what gin binds.
    """
    if refusal := refusal_on_mesh_tensorflow():
        raise refusal
    mode = flags.mode if configuration is None else configuration.inputs.mode
    with contextlib.ExitStack() as held:
        if mode in ("train", "finetune") and is_on_this_disk(flags.model_dir):
            # Imported here because it imports JAX, which no other mode needs.
            from t0repro.data.vocabulary_checks import vocabulary_of
            from t0repro.model.t5 import T5
            from t0repro.training.model_dir import lock_for_training
            from t0repro.training.optimizers import make_optimizer
            from t0repro.training.train_state import state_shapes

            found = None if configuration is None else configuration.run_or_refusal
            config = found if isinstance(found, TrainRun) else None
            check = held.enter_context(
                lock_for_training(
                    flags.model_dir,
                    "mtf",
                    config,
                    allow_changed=flags.allow_changed,
                    vocabulary=None if config is None else vocabulary_of(config),
                )
            )
            shapes = None
            if config is not None and config.optimizer is not None:
                network = T5(config.model, config.dtypes)
                shapes = state_shapes(network, make_optimizer(config.optimizer))
            # Now, because Mesh TensorFlow restores inside its Estimator, out of reach of a check.
            check(shapes)()
        _run(flags, None if configuration is None else configuration.inputs)


def _run(flags: Any, inputs: RunInputs | None) -> None:
    from mesh_tensorflow.transformer import utils

    # t5 would look for the TPU in --tpu, but this stack runs on the CPU only.
    flags.tpu = None
    record_command(flags.model_dir)
    hooks.install(flags.model_dir)
    if inputs is None:
        _run_model_api(flags)
        return
    # t5 sets these after it parsed gin, and gin is locked by then.
    with gin.unlock_config():
        for kind in _FLOAT32_ON_CPU:
            gin.bind_parameter(f"utils.get_variable_dtype.{kind}_dtype", "float32")
        if inputs.tpu_mesh:
            # Most sizes do not divide evenly on a TPU's mesh, so run on one device. The batch size
            # was computed with that mesh; bind it, so that it stays the same.
            gin.bind_parameter("run.mesh_shape", [])
            gin.bind_parameter("run.batch_size", inputs.batch_size)
    # Training shows its steps once the graph is built; Mesh TensorFlow's other modes show nothing.
    shown = working(f"Mesh TensorFlow runs {inputs.mode}")
    if inputs.mode == "train":
        print("building Mesh TensorFlow's graph ...", file=sys.stderr, flush=True)
        shown = contextlib.nullcontext()
    with shown:
        utils.run(
            tpu_job_name=None, tpu=None, gcp_project=None, tpu_zone=None, model_dir=flags.model_dir
        )


def record_command(model_dir: str) -> None:
    """Writes the command line to model_dir/commands/command[.N], local or remote."""
    folder = os.path.join(model_dir, "commands")
    try:
        tf.io.gfile.makedirs(folder)
        # Numbered as t5 does: command, command.1, command.2, ...
        count = len(tf.io.gfile.glob(os.path.join(folder, "command*")))
        name = f"command.{count}" if count else "command"
        with tf.io.gfile.GFile(os.path.join(folder, name), "w") as file:
            file.write(remove_passwords(" ".join(sys.argv)))
    except (tf.errors.PermissionDeniedError, tf.errors.InvalidArgumentError):
        pass  # as in t5: a read-only model_dir gets no record


def _run_model_api(flags: Any) -> None:
    """Runs the mode that --mode names.

    Raises:
      UserError: If the flags contradict each other.
    """
    from t5.models import mesh_transformer
    from t5.models.mtf_model import MtfModel

    # MtfModel skips no others where it reads an operative_config.gin.
    mesh_transformer.DEPRECATED_GIN_REFERENCES = list_deprecated_references()
    check_mode(flags)
    steps = checkpoint_steps(flags)
    model = MtfModel(
        tpu_job_name=flags.tpu_job_name,
        tpu=flags.tpu,
        gcp_project=flags.gcp_project,
        tpu_zone=flags.tpu_zone,
        tpu_topology=flags.tpu_topology,
        model_parallelism=flags.model_parallelism,
        model_dir=flags.model_dir,
        batch_size=flags.batch_size,
        sequence_length={
            "inputs": flags.input_sequence_length,
            "targets": flags.target_sequence_length,
        },
    )
    MODES[flags.mode](model, flags, steps)


def _train(model: Any, flags: Any, steps: Any) -> None:
    del steps
    model.train(mixture_or_task_name=flags.mixture_or_task, steps=flags.train_steps)


def _finetune(model: Any, flags: Any, steps: Any) -> None:
    model.finetune(
        mixture_or_task_name=flags.mixture_or_task,
        steps=flags.train_steps,
        pretrained_model_dir=flags.pretrained_model_dir,
        checkpoint_steps=_single(steps),
    )


def _evaluate(model: Any, flags: Any, steps: Any) -> None:
    model.eval(
        mixture_or_task_name=flags.mixture_or_task,
        checkpoint_steps=steps,
        summary_dir=flags.eval_summary_dir,
        split=flags.eval_split,
    )


def _predict(model: Any, flags: Any, steps: Any) -> None:
    model.predict(
        checkpoint_steps=steps,
        input_file=flags.input_file,
        output_file=flags.output_file,
        beam_size=flags.beam_size,
        temperature=flags.temperature,
        keep_top_k=flags.keep_top_k,
    )


def _score(model: Any, flags: Any, steps: Any) -> None:
    model.score(
        flags.input_file, flags.target_file, scores_file=flags.output_file, checkpoint_steps=steps
    )


def _export(model: Any, flags: Any, steps: Any) -> None:
    model.export(
        export_dir=flags.export_dir,
        checkpoint_step=_single(steps),
        beam_size=flags.beam_size,
        temperature=flags.temperature,
        keep_top_k=flags.keep_top_k,
        eval_with_score=flags.mode == "export_score",
    )


def _single(steps: int | str | list[int]) -> int:
    """The single step that fine-tuning or an export starts from; -1 means the latest.

    Raises:
      UserError: If the flags name all steps or several.
    """
    if steps == "all" or (isinstance(steps, list) and len(steps) != 1):
        raise UserError(
            "Fine-tuning and exports start from a single checkpoint.",
            where="--checkpoint_mode",
            fix="Give --checkpoint_mode=latest, or specific with one of --checkpoint_steps.",
        )
    return steps[0] if isinstance(steps, list) else int(steps)


MODES: dict[str, Callable[[Any, Any, Any], None]] = {
    "train": _train,
    "finetune": _finetune,
    "eval": _evaluate,
    "predict": _predict,
    "score": _score,
    "export_predict": _export,
    "export_score": _export,
}
