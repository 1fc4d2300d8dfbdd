"""A training run in T5X's gin files, as several tests configure it."""

from __future__ import annotations

from t0repro.config.run import TrainRun
from t0repro.config.t5x import gin_files, training

MODEL = "t5x/examples/t5/t5_1_1/small.gin"
PRETRAIN, FINETUNE = "t5x/configs/runs/pretrain.gin", "t5x/configs/runs/finetune.gin"
REQUIRED = (
    "DROPOUT_RATE = 0.1",
    "MIXTURE_OR_TASK_NAME = 'a_task'",
    "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 6}",
    "TRAIN_STEPS = 10",
    "MODEL_DIR = 'runs/a'",
)


def config(*bindings: str, files=(MODEL, PRETRAIN)) -> TrainRun:
    """The TrainRun of these files, with these bindings after the required ones."""
    inputs = gin_files.T5xInputs("train", tuple(files), (*REQUIRED, *bindings))
    return training.read_train_run(gin_files.parse(inputs))
