"""One training through both dialects' command lines, and through Mesh TensorFlow itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from t0repro.config.t5x.run import read_train_run
from t0repro.converters import convert

from ..runs.tiny_gin import MODEL, SIZES, parsed, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.mtf]

DEMO = "--module_import=t0repro.tasks.demo"
FILES = (MODEL, "t5x/configs/runs/pretrain.gin")


def macros(checkpoint):
    """A training run in which everything that the dialects compute in two ways is the same."""
    return (
        "DROPOUT_RATE = 0.0",
        "MIXTURE_OR_TASK_NAME = 'demo_train'",
        "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}",
        "TRAIN_STEPS = 4",
        "BATCH_SIZE = 8",
        "USE_CACHED_TASKS = False",
        "LOSS_NORMALIZING_FACTOR = 'NUM_TOTAL_TARGET_TOKENS'",
        "MODEL_DIR = 'unused'",
        "network.T5Config.float32_attention_logits = True",
        "train/utils.DatasetConfig.seed = 3",
        "train_script.train.train_eval_dataset_cfg = None",
        "train_script.train.stats_period = 1",
        # Mesh TensorFlow does not measure weights.
        "trainer.Trainer.weight_metrics_computer = None",
        "trainer.Trainer.num_microbatches = 2",
        "utils.create_learning_rate_scheduler.factors = 'constant'",
        "utils.create_learning_rate_scheduler.base_learning_rate = 0.001",
        f"utils.RestoreCheckpointConfig.path = '{checkpoint}'",
    )


def call(name, *arguments):
    command = [str(Path(sys.executable).parent / name), *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["split"] == "train"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A Mesh TensorFlow checkpoint, and the run's options in T5X's dialect."""
    folder = tmp_path_factory.mktemp("start")
    plain = read_train_run(parsed("train", "pretrain", *macros("x")[1:]))
    path = save_checkpoint(folder, plain, 0)
    convert.convert(path, folder / "mtf", "mtf")
    bindings = (*SIZES, *macros(folder / "mtf" / "model.ckpt-0"))
    return [*(f"--gin_file={name}" for name in FILES), *(f"--gin_bindings={b}" for b in bindings)]


def test_a_run_has_the_same_losses_in_either_dialect_bit_for_bit(start, tmp_path):
    folder = tmp_path / "t5x"
    call("t0repro", "train", *start, DEMO, f"--gin.MODEL_DIR='{folder}'")
    # The same in Mesh TensorFlow's words, by its own parser, on JAX.
    mesh_file = tmp_path / "mesh.gin"
    mesh_file.write_text(call("t0repro", "explain", "--run_mode=train", *start, "--as=mtf"))
    flags = [DEMO, f"--gin_file={mesh_file}"]
    on_jax = tmp_path / "on_jax"
    call("t5_mesh_transformer", *flags, f"--model_dir={on_jax}", "--backend=jax")
    assert len(losses(folder)) == 4 and losses(on_jax) == losses(folder)
    # And back in T5X's.
    t5x_file = tmp_path / "t5x.gin"
    t5x_file.write_text(call("t0repro", "explain", *flags, "--as=t5x"))
    again = tmp_path / "again"
    periods = "--gin_bindings=train_script.train.stats_period = 1"
    call("t0repro", "train", f"--gin_file={t5x_file}", DEMO, periods, f"--gin.MODEL_DIR='{again}'")
    assert losses(again) == losses(folder)
    # Mesh TensorFlow itself, within what parity.md says of a few steps.
    on_mesh = tmp_path / "on_mesh"
    call("t5_mesh_transformer", *flags, f"--model_dir={on_mesh}", "--backend=mtf")
    np.testing.assert_allclose(losses(on_mesh), losses(folder), rtol=5e-6)
