"""The example of T5X's page on auxiliary jobs, on the demo: every checkpoint evaluated by SeqIO."""

import json
import shutil
import subprocess
import sys

import pytest

from t0repro.config.t5x.run import read_eval_run
from t0repro.jobs.commands import JobSettings
from t0repro.jobs.controller import Controller, Policy
from t0repro.jobs.journal import read_status
from t0repro.jobs.local_launcher import LocalLauncher
from t0repro.training.checkpoints import list_checkpoints

from ..runs.tiny_gin import MODEL, SIZES, parsed, save_checkpoint
from .trainings import curve

TASK = "demo_synthetic_glue_mrpc_want_to_know_score_eval"
EVAL = f"""
from __gin__ import dynamic_registration
import seqio
import t0repro.tasks.demo
from t5x import utils
from t5x.examples.t5 import network
include '{MODEL}'
include 't5x/configs/runs/eval.gin'
CHECKPOINT_PATH = %INITIAL_CHECKPOINT_PATH
MIXTURE_OR_TASK_SPLIT = 'validation'
DROPOUT_RATE = 0.0
seqio.Evaluator.num_examples = 12
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training run's folder with one checkpoint, and the gin file of its evaluation."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "my_eval.gin").write_text(EVAL + "\n".join(SIZES) + "\n")
    bindings = ("MIXTURE_OR_TASK_NAME = 'a'", "CHECKPOINT_PATH = 'b'", "EVAL_OUTPUT_DIR = 'c'")
    save_checkpoint(folder / "model", read_eval_run(parsed("eval", "eval", *bindings)), 3)
    return folder / "model", str(folder / "my_eval.gin")


def test_its_metrics_stand_in_the_trainings_tensorboard(trained):
    model_dir, gin_file = trained
    settings = JobSettings(
        mixtures=(TASK,), gin_file=gin_file, replace_gin_file=True, build_target="//t5x:eval"
    )
    policy = Policy(poll_seconds=0.1, max_failures=1)
    controller = Controller(model_dir, settings, LocalLauncher(), policy)
    assert controller.run(lambda: False)
    (progress,) = read_status(model_dir).values()
    assert progress.metric is not None
    tag, value = progress.metric
    assert tag.endswith("accuracy") and 0 <= value <= 100
    assert curve(model_dir / "inference_eval" / TASK, tag) == [(3, round(value, 4))]


TRAIN = f"""
from __gin__ import dynamic_registration
import __main__ as train_script
import seqio
import t0repro.tasks.demo
from t5x import utils
from t5x.examples.t5 import network
include '{MODEL}'
include 't5x/configs/runs/pretrain.gin'
MIXTURE_OR_TASK_NAME = 'demo_train'
TASK_FEATURE_LENGTHS = {{'inputs': 64, 'targets': 16}}
USE_CACHED_TASKS = False
DROPOUT_RATE = 0.1
BATCH_SIZE = 8
TRAIN_STEPS = 4
RANDOM_SEED = 42
train_script.train.train_eval_dataset_cfg = None
train_script.train.eval_period = 2
utils.SaveCheckpointConfig.period = 2
"""


@pytest.mark.slow
def test_the_pages_sample_command_trains_and_evaluates_as_it_goes_on(trained, tmp_path):
    """Its flags as the page has them; the labels of machines mean this one."""
    (tmp_path / "my_train.gin").write_text(TRAIN + "\n".join(SIZES) + "\n")
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "t0repro.cli", "train"),
            *("--cell=iz", "--platform=jf_2x2", "--name=continuous_eval_test"),
            *("--final_auxiliary_job_steps=0", "--replace_gin_file=True"),
            f"--auxiliary_job_mixtures={TASK}",
            f"--auxiliary_job_gin_file={trained[1]}",
            *("--auxiliary_job_cell=iz", "--auxiliary_job_platform=jf_2x2"),
            "--auxiliary_job_build_target_path=//t5x:eval",
            f"--gin_file={tmp_path / 'my_train.gin'}",
            "--poll_seconds=0.5",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model_dir = tmp_path / "runs" / "continuous_eval_test"
    points = curve(model_dir / "inference_eval" / TASK, "eval/accuracy")
    assert [step for step, _ in points] == [0, 2, 4]


MOVED = f"""
import seqio
import t0repro.tasks.demo

def tokens(output, example=None, is_target=False):
    return len(example["targets"]) if is_target else output

def loss(targets, scores):
    return {{"loss_per_nonpadding_target_token": -sum(scores) / sum(targets)}}

task = seqio.TaskRegistry.get("{TASK.removesuffix("_score_eval")}")
seqio.TaskRegistry.add(
    "with_loss", task.source, preprocessors=task.preprocessors,
    output_features=task.output_features, postprocess_fn=tokens, metric_fns=[loss],
)
"""
LOSS = "loss_per_nonpadding_target_token"


@pytest.mark.slow
def test_a_train_eval_that_is_too_slow_moves_into_the_job(tmp_path, monkeypatch):
    """As the page suggests: the task's metric functions compute its metrics, with equal values."""
    (tmp_path / "moved.py").write_text(MOVED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sizes = "\n".join([*SIZES, "Z_LOSS = 0.0", "import moved"]) + "\n"
    inside = [
        "train_script.train.train_eval_dataset_cfg = @train_eval/utils.DatasetConfig()",
        "train_script.train.eval_steps = 2",
        "train_script.train.run_eval_before_training = True",
        "train_eval/utils.DatasetConfig.mixture_or_task_name = 'with_loss'",
        "train_eval/utils.DatasetConfig.pack = False",
    ]
    (tmp_path / "inside.gin").write_text(TRAIN + sizes + "\n".join(inside) + "\n")
    (tmp_path / "beside.gin").write_text(TRAIN + sizes)
    (tmp_path / "job.gin").write_text(
        EVAL + sizes + "seqio.Evaluator.num_examples = 16\n"  # two batches of eight
        "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 16}\n"
    )
    jobs = (
        *("--auxiliary_job_mixtures=with_loss", f"--auxiliary_job_gin_file={tmp_path}/job.gin"),
        *("--replace_gin_file", "--poll_seconds=0.5", f"--main_metric=eval/{LOSS}"),
    )
    for name, flags in (("inside", ()), ("beside", jobs)):
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "t0repro.cli", "train", f"--name={name}"),
                *(f"--gin_file={tmp_path}/{name}.gin", "--gin.TRAIN_STEPS=2", *flags),
                "--gin_bindings=train/utils.DatasetConfig.seed = 1",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    trained = dict(curve(tmp_path / "runs" / "inside" / "training_eval" / "with_loss", LOSS))
    beside = tmp_path / "runs" / "beside"
    assert not (beside / "training_eval").exists()
    moved = dict(curve(beside / "inference_eval" / "with_loss", f"eval/{LOSS}"))
    assert set(trained) == set(moved) == {0, 2} and trained[0] != trained[2]
    for step, value in trained.items():
        assert moved[step] == pytest.approx(value, rel=1e-4)


FINETUNE = f"""
from __gin__ import dynamic_registration
import __main__ as train_script
import seqio
import t0repro.tasks.demo
from t5x import utils
from t5x.examples.t5 import network
include '{MODEL}'
include 't5x/configs/runs/finetune.gin'
TASK_FEATURE_LENGTHS = {{'inputs': 64, 'targets': 16}}
USE_CACHED_TASKS = False
BATCH_SIZE = 8
RANDOM_SEED = 42
train_script.train.train_eval_dataset_cfg = None
train_script.train.infer_eval_dataset_cfg = None
train_script.train.eval_period = 2
utils.SaveCheckpointConfig.period = 2
"""


@pytest.mark.slow
def test_each_checkpoint_is_fine_tuned_in_a_folder_of_its_own(trained, tmp_path):
    """T5X's second example: so many steps more from each checkpoint."""
    model_dir = tmp_path / "model"
    shutil.copytree(trained[0] / "checkpoint_3", model_dir / "checkpoint_3")
    (tmp_path / "my_finetune.gin").write_text(FINETUNE + "\n".join(SIZES) + "\n")
    settings = JobSettings(
        mixtures=("demo_train",),
        gin_file=str(tmp_path / "my_finetune.gin"),
        replace_gin_file=True,
        build_target="train",
        final_steps=2,
    )
    policy = Policy(poll_seconds=0.1, max_failures=1)
    assert Controller(model_dir, settings, LocalLauncher(), policy).run(lambda: False)
    tuned = model_dir / "auxiliary" / "demo_train" / "step_3" / "output"
    assert list_checkpoints(tuned) == [3, 5]
    rows = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["split"] == "train"] == [5]
    assert list_checkpoints(model_dir) == [3] and not (model_dir / "train").exists()
