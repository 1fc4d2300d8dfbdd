"""Each documented method of the trainer, the model and an action is called by the commands.

The class of a gin file overrides all of them and leaves a line for each call.
"""

from pathlib import Path

import pytest

from ..helpers import commands
from ..runs.tiny_gin import MODEL, SIZES

CHOICES = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
TEXTS = "demo_synthetic_glue_mrpc_want_to_know"
RECORDERS = '''
import functools
import inspect

from t0repro.training import models, trainer


def noting(base, name):
    """A member of a class that leaves a line and then does what it did."""
    member, line = inspect.getattr_static(base, name), f"{base.__name__}.{name}\\n"
    own = getattr(member, "func", None) or getattr(member, "fget", None) or member

    @functools.wraps(own)
    def noted(self, *args, **kwargs):
        with open("calls.txt", "a") as file:
            file.write(line)
        return own(self, *args, **kwargs)

    if isinstance(member, functools.cached_property):
        return functools.cached_property(noted)
    return property(noted, member.fset) if isinstance(member, property) else noted


def recorder(name, base, members):
    return type(name, (base,), {m: noting(base, m) for m in members} | {"__module__": __name__})


TRAINER = (
    "train eval compile_train compile_eval close train_state"
    " _partitioned_train_step _partitioned_eval_step _get_step_rng"
).split()
MODEL = (
    "loss_fn eval_fn predict_batch predict_batch_with_aux score_batch get_initial_variables"
    " output_vocabulary _compute_logits _compute_metrics"
).split()

MyTrainer = recorder("MyTrainer", trainer.Trainer, TRAINER)
MyModel = recorder("MyModel", models.EncoderDecoderModel, MODEL)
MyComputer = recorder("MyComputer", trainer.WeightMetricsComputer, ["compute_metrics"])


class Goes(trainer.BaseAction):
    def run(self, train_state, metrics_by_task):
        return False


MyAction = recorder("MyAction", Goes, ["run"])
'''
IMPORTS = """from __gin__ import dynamic_registration
import __main__ as script
from t5x import trainer
from t5x import utils
from t5x.examples.t5 import network
import my_recorders
import seqio
import t0repro.tasks.demo
"""
MODEL_BOUND = """
MODEL = @my_recorders.MyModel()
my_recorders.MyModel:
  module = @network.Transformer()
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = %OPTIMIZER
TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 8}
DROPOUT_RATE = 0.0
"""
TRAIN = f"""
MIXTURE_OR_TASK_NAME = 'demo_synthetic_glue_mrpc_paraphrase'
USE_CACHED_TASKS = False
TRAIN_STEPS = 2
BATCH_SIZE = 8
RANDOM_SEED = 1
script.train:
  trainer_cls = @my_recorders.MyTrainer
  eval_period = 2
  eval_steps = 1
  infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()
  inference_evaluator_cls = @seqio.Evaluator
  actions = {{'TRAIN': [@my_recorders.MyAction()]}}
train_eval/utils.DatasetConfig:
  mixture_or_task_name = '{TEXTS}'
  batch_size = 8
infer_eval/utils.DatasetConfig:
  mixture_or_task_name = '{TEXTS}'
  split = 'validation'
  task_feature_lengths = %TASK_FEATURE_LENGTHS
  batch_size = 8
  shuffle = False
  seed = 1
seqio.Evaluator.num_examples = 8
my_recorders.MyTrainer:
  learning_rate_fn = @utils.create_learning_rate_scheduler()
  num_microbatches = 2
  weight_metrics_computer = @my_recorders.MyComputer()
"""


def run(folder: Path, mode: str, file: str, *bindings: str) -> set[str]:
    """What a command called of the recorders."""
    (folder / "my_recorders.py").write_text(RECORDERS)
    (folder / "calls.txt").write_text("")
    lines = [IMPORTS, f"include '{MODEL}'", f"include 't5x/configs/runs/{file}.gin'"]
    (folder / "my.gin").write_text("\n".join([*lines, MODEL_BOUND, *SIZES, *bindings, ""]))
    done = commands.run("t0repro", mode, "--gin_file=my.gin", cwd=folder)
    assert done.returncode == 0, done.stderr
    return set((folder / "calls.txt").read_text().split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a short run, and what it called."""
    folder = tmp_path_factory.mktemp("extension_points")
    return folder, run(folder, "train", "pretrain", "MODEL_DIR = 'run'", TRAIN)


def test_train_calls_every_method_of_a_trainer_a_model_and_an_action(trained):
    _, called = trained
    of_trainer = (
        "train eval compile_train compile_eval close train_state"
        " _partitioned_train_step _partitioned_eval_step _get_step_rng"
    )
    of_model = (
        "loss_fn eval_fn predict_batch predict_batch_with_aux get_initial_variables"
        " output_vocabulary _compute_logits _compute_metrics"
    )
    expected = {f"Trainer.{name}" for name in of_trainer.split()}
    expected |= {f"EncoderDecoderModel.{name}" for name in of_model.split()}
    assert called == expected | {"WeightMetricsComputer.compute_metrics", "Goes.run"}


@pytest.mark.parametrize(
    "mode, called",
    [
        ("predict", "predict_batch predict_batch_with_aux output_vocabulary"),
        ("predict_with_aux", "predict_batch_with_aux output_vocabulary"),
        ("score", "score_batch _compute_logits"),
    ],
)
def test_infer_calls_a_models_methods(trained, mode, called):
    folder, _ = trained
    bindings = (
        f"MIXTURE_OR_TASK_NAME = '{TEXTS}'",
        "CHECKPOINT_PATH = 'run/checkpoint_2'",
        f"INFER_OUTPUT_DIR = 'infer_{mode}'",
        f"script.infer.mode = '{mode}'",
        "utils.DatasetConfig.split = 'validation'",
    )
    expected = {f"EncoderDecoderModel.{name}" for name in called.split()}
    assert run(folder, "infer", "infer", *bindings) == expected


@pytest.mark.parametrize(
    "task, called",
    [
        (TEXTS, "predict_batch predict_batch_with_aux output_vocabulary"),
        (CHOICES, "score_batch _compute_logits"),
    ],
)
def test_eval_calls_a_models_methods(trained, task, called):
    folder, _ = trained
    bindings = (
        f"MIXTURE_OR_TASK_NAME = '{task}'",
        "CHECKPOINT_PATH = 'run/checkpoint_2'",
        f"EVAL_OUTPUT_DIR = 'eval_{task}'",
        "utils.DatasetConfig.split = 'validation'",
        "seqio.Evaluator.num_examples = 8",
    )
    expected = {f"EncoderDecoderModel.{name}" for name in called.split()}
    assert run(folder, "eval", "eval", *bindings) == expected
