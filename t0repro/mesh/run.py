"""Runs what gin configures on Mesh TensorFlow: the part of t5's main that follows gin's parsing.

`mesh_tensorflow.transformer.utils.run` chooses the mode by run.mode; with --use_model_api,
t0repro.mesh.model_api chooses it by --mode. No library code is copied: both are called as t5 calls
them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from t0repro.buckets import scheme_of
from t0repro.config.configuration import Configuration, RunInputs
from t0repro.config.mtf import jax_model
from t0repro.config.run_config import RunConfig
from t0repro.mesh import hooks, model_api
from t0repro.progress import working
from t0repro.redaction import without_passwords

# t5's main binds these types to float32 in every run without --tpu.
_FLOAT32_ON_CPU = ("slice", "activation")


def run(flags: Any, configuration: Configuration | None) -> None:
    """Runs t5's command on this machine's CPU.

    No TensorFlow that can be installed today supports Mesh TensorFlow on a TPU.

    Args:
      flags: absl's flags of t5_mesh_transformer. gin's configuration must be parsed and locked.
      configuration: What gin configures; None with --use_model_api.

    Raises:
      UserError: If training cannot continue in model_dir, or only the JAX stack has what gin binds.
    """
    jax_model.refuse_on_mesh_tensorflow()
    mode = flags.mode if configuration is None else configuration.inputs.mode
    with contextlib.ExitStack() as held:
        # Only local folders can be locked; an address such as gs:// is written by TensorFlow alone.
        if mode in ("train", "finetune") and scheme_of(flags.model_dir) is None:
            # Imported here because it imports JAX, which no other mode needs.
            from t0repro.model.t5 import T5
            from t0repro.training.model_dir import held_for_training
            from t0repro.training.optimizers import make_optimizer
            from t0repro.training.train_state import state_shapes

            found = None if configuration is None else configuration.run_or_refusal
            config = found if isinstance(found, RunConfig) else None
            check = held.enter_context(
                held_for_training(flags.model_dir, "mtf", config, allow_changed=flags.allow_changed)
            )
            shapes = None
            if config is not None and config.optimizer is not None:
                network = T5(config.model, config.dtypes)
                shapes = state_shapes(network, make_optimizer(config.optimizer))
            check(shapes)
        _run(flags, None if configuration is None else configuration.inputs)


def _run(flags: Any, inputs: RunInputs | None) -> None:
    from mesh_tensorflow.transformer import utils

    import gin

    # t5 would look for the TPU that --tpu names; this stack runs on the CPU alone.
    flags.tpu = None
    record_command(flags.model_dir)
    hooks.install(flags.model_dir)
    if inputs is None:
        model_api.run(flags)
        return
    # t5 sets these after it parsed gin, and gin is locked by then.
    with gin.unlock_config():
        for kind in _FLOAT32_ON_CPU:
            gin.bind_parameter(f"utils.get_variable_dtype.{kind}_dtype", "float32")
        if inputs.tpu_mesh:
            # Most sizes do not divide by a TPU mesh's dimensions, so run on one device. The batch
            # size was computed with that mesh, and is bound so that it stays the same.
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
    import tensorflow as tf

    folder = os.path.join(model_dir, "commands")
    try:
        tf.io.gfile.makedirs(folder)
        # Numbered as t5 does: command, command.1, command.2, ...
        count = len(tf.io.gfile.glob(os.path.join(folder, "command*")))
        name = f"command.{count}" if count else "command"
        with tf.io.gfile.GFile(os.path.join(folder, name), "w") as file:
            file.write(without_passwords(" ".join(sys.argv)))
    except (tf.errors.PermissionDeniedError, tf.errors.InvalidArgumentError):
        pass  # as in t5: a read-only model_dir gets no record
