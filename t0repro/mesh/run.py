"""Runs what gin configures on Mesh TensorFlow: the part of t5's main that comes after gin's parser.

`mesh_tensorflow.transformer.utils.run` picks the mode itself, by run.mode; with --use_model_api
t0repro.mesh.model_api does, by --mode. Neither library is copied: both are called as t5 calls them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from t0repro.mesh import hooks, model_api

# t5's main forces these types on every run without --tpu.
_FLOAT32_ON_CPU = ("slice", "activation")


def run(flags: Any) -> None:
    """Runs t5's command for parsed flags.

    Args:
      flags: absl's, of t5_mesh_transformer. gin's configuration is parsed and locked.
    """
    from mesh_tensorflow.transformer import utils

    import gin

    record_command(flags.model_dir)
    if not flags.tpu:
        hooks.install(flags.model_dir)
    if flags.use_model_api:
        model_api.run(flags)
        return
    if not flags.tpu:
        with gin.unlock_config():
            for kind in _FLOAT32_ON_CPU:
                gin.bind_parameter(f"utils.get_variable_dtype.{kind}_dtype", "float32")
    utils.run(
        tpu_job_name=flags.tpu_job_name,
        tpu=flags.tpu,
        gcp_project=flags.gcp_project,
        tpu_zone=flags.tpu_zone,
        model_dir=flags.model_dir,
    )


def record_command(model_dir: str) -> None:
    """Writes model_dir/commands/command[.N], at any address that TensorFlow writes to."""
    import tensorflow as tf

    folder = os.path.join(model_dir, "commands")
    try:
        tf.io.gfile.makedirs(folder)
        count = len(tf.io.gfile.glob(os.path.join(folder, "command*")))
        name = f"command.{count}" if count else "command"
        with tf.io.gfile.GFile(os.path.join(folder, name), "w") as file:
            file.write(" ".join(sys.argv))
    except (tf.errors.PermissionDeniedError, tf.errors.InvalidArgumentError):
        pass  # as in t5: a model_dir that is only read needs no record
