"""Trains tiny T5s with Mesh TensorFlow's own `utils.run`, so that tests read what it really writes.

A script for a process of its own, since Mesh TensorFlow wants graph mode and global gin state:

    python train_mesh_tensorflow.py JOBS.json

The file lists jobs {"model_dir": ..., "model": "t5.1.1.small", "train_steps": 2, "bindings": ""}.
Each trains up to global step `train_steps`, from model_dir's latest checkpoint if it has one, and
writes the losses to model_dir/losses.json. `bindings` is gin text for the configuration's end.
"""

from __future__ import annotations

import json
import os
import sys

BINDINGS = """
include 'defaults.gin'
include 'models/{model}.gin'
utils.run.mesh_shape = []
utils.run.layout_rules = []
utils.get_variable_dtype.master_dtype = 'float32'
utils.get_variable_dtype.slice_dtype = 'float32'
utils.get_variable_dtype.activation_dtype = 'float32'
utils.run.sequence_length = {{'inputs': 8, 'targets': 8}}
utils.run.batch_size = 4
utils.run.train_steps = {train_steps}
utils.run.total_run_steps = 100
utils.run.save_checkpoints_steps = 1000
utils.run.learning_rate_schedule = @learning_rate_schedules.constant_learning_rate
constant_learning_rate.learning_rate = 0.001
utils.run.optimizer = @optimize.AdafactorOptimizer
dropout_rate = 0.0
num_layers = 2
num_heads = 2
d_kv = 64
d_model = 128
d_ff = 256
{bindings}
"""


class _Vocabulary:
    """What Mesh TensorFlow asks of a vocabulary while it trains: its size."""

    vocab_size = 250


def random_tokens(sequence_length, vocabulary, dataset_split):
    """Sixteen examples of random tokens over and over, the same in every process."""
    import numpy as np
    import tensorflow as tf

    del vocabulary, dataset_split
    generator = np.random.default_rng(0)
    columns = {
        name: generator.integers(2, 250, (16, length)).astype(np.int32)
        for name, length in sequence_length.items()
    }
    return tf.data.Dataset.from_tensor_slices(columns).repeat()


def main() -> None:
    from t0repro import compat

    compat.install()
    import t5.models
    import tensorflow.compat.v1 as tf
    from mesh_tensorflow.transformer import utils

    import gin

    tf.disable_v2_behavior()
    for module in (t5.models, utils):
        gin.add_config_file_search_path(os.path.join(os.path.dirname(module.__file__), "gin"))
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    for job in jobs:
        gin.clear_config()
        gin.parse_config(BINDINGS.format(**{"bindings": "", **job}))
        gin.bind_parameter("utils.run.vocabulary", _Vocabulary())
        gin.bind_parameter("utils.run.train_dataset_fn", random_tokens)
        tf.reset_default_graph()
        tf.set_random_seed(0)
        losses = record_losses(tf)
        utils.run(
            tpu_job_name=None, tpu=None, gcp_project=None, tpu_zone=None, model_dir=job["model_dir"]
        )
        with open(os.path.join(job["model_dir"], "losses.json"), "w") as file:
            json.dump(losses, file)


def record_losses(tf) -> list[float]:
    """Makes every estimator append each training step's loss to the list that is returned."""
    from tensorflow_estimator.python.estimator import estimator

    losses: list[float] = []

    class LossRecorder(tf.train.SessionRunHook):
        def before_run(self, run_context):
            (loss,) = run_context.session.graph.get_collection(tf.GraphKeys.LOSSES)
            return tf.train.SessionRunArgs(loss)

        def after_run(self, run_context, run_values):
            losses.append(float(run_values.results))

    library_train = getattr(estimator.Estimator.train, "library_train", estimator.Estimator.train)

    def train(self, input_fn, hooks=None, **kwargs):
        return library_train(self, input_fn, hooks=[*(hooks or []), LossRecorder()], **kwargs)

    train.library_train = library_train
    estimator.Estimator.train = train
    return losses


if __name__ == "__main__":
    main()
