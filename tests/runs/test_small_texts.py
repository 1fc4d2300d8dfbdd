"""The chain on real texts, from gin files alone: pretrain, adapt, fine-tune, rank, read back."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from t0repro.converters.sources import load_any

from ..converters.checkpoint_files import assert_same_bits

FILES = "t5x/examples/t5/t5_1_1/examples/small_texts"
SCRIPT = Path(__file__).parents[2] / "scripts" / "small_vocabulary.py"

pytestmark = pytest.mark.slow


def python(folder, data, *arguments):
    """Runs a command in the chain's folder, whose own vocabulary it reads."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "T0REPRO_DATA_DIR": str(data.resolve()),
            "T0REPRO_VOCAB": str(folder / "vocabulary.model"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def scalars(folder):
    """tag -> step -> value of a folder of TensorBoard's files."""
    found = {}
    for path in folder.glob("events.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(make_ndarray(value.tensor))
                    found.setdefault(value.tag, {})[event.step] = number
    return found


@pytest.fixture(scope="module")
def chain(tmp_path_factory, shared_data):
    """The folder in which a few steps of each training run ran, and what fine-tuning said."""
    folder = tmp_path_factory.mktemp("chain")

    def run(mode, stage, *arguments):
        files = (f"--gin_file={FILES}_{stage}.gin", *arguments)
        return python(folder, shared_data, "-m", "t0repro.cli", mode, *files)

    python(folder, shared_data, str(SCRIPT), "vocabulary.model")
    run("train", "pretrain", "--gin.TRAIN_STEPS=4")
    # The state that a training run starts from is kept, too.
    both = "--gin_bindings=utils.SaveCheckpointConfig.keep = 2"
    adapted = run("train", "adapt", "--gin.PRETRAINED_STEPS=4", "--gin.TRAIN_STEPS=6", both)
    ranked = "infer_eval/utils.DatasetConfig"
    finetuned = run(
        "train",
        "finetune",
        "--gin.PRETRAINED_STEPS=6",
        "--gin.TRAIN_STEPS=8",
        # Also ranked as it trains, by the same tasks as small_texts_eval ranks.
        "--gin.EVAL_PERIOD=150",
        f"--gin_bindings=train_script.train.infer_eval_dataset_cfg = @{ranked}()",
        f"--gin_bindings={ranked}.mixture_or_task_name = 'learning_eval_score_eval'",
        f"--gin_bindings={ranked}.task_feature_lengths = {{'inputs': 256, 'targets': 32}}",
        "--gin.EVALUATOR_NUM_EXAMPLES=12",
    )
    run("eval", "eval", "--gin_bindings=seqio.Evaluator.num_examples = 12")
    return folder / "runs" / "small_texts", adapted, finetuned


def test_each_training_starts_where_the_one_before_ended(chain):
    folder, adapted, finetuned = chain
    assert "steps 4 to 6" in adapted and "steps 6 to 8" in finetuned
    for before, after, step in (("pretrained", "adapted", 4), ("adapted", "finetuned", 6)):
        ends, starts = (load_any(folder / each / f"checkpoint_{step}") for each in (before, after))
        assert_same_bits(ends, starts)  # parameters, slots and step


def test_tensorboard_has_the_losses_of_every_stage(chain):
    folder, _, _ = chain
    for stage, step in (("pretrained", 4), ("adapted", 6), ("finetuned", 8)):
        train = scalars(folder / stage / "train")
        assert step in train["loss"] and math.isfinite(train["loss"][step])
        assert {"accuracy", "learning_rate", "loss_per_nonpadding_target_token"} <= train.keys()
    evaluated = scalars(folder / "pretrained" / "training_eval" / "small_texts_span_corruption")
    assert 4 in evaluated["loss"]


def test_ranks_of_the_run_and_of_the_evaluation_after_it_are_the_same(chain):
    folder, _, _ = chain
    inside, after = folder / "finetuned" / "inference_eval", folder / "eval" / "inference_eval"
    tasks = sorted(path.name for path in after.glob("*-metrics.jsonl"))
    assert len(tasks) == 16
    for name in tasks:
        lines = (after / name).read_text().splitlines()
        # Every checkpoint: the one that the tuning started from, and the last.
        assert [json.loads(line)["step"] for line in lines] == [6, 8]
        assert lines[-1] == (inside / name).read_text().splitlines()[-1]
        row = json.loads(lines[-1])
        assert row["step"] == 8 and 0 <= row["accuracy"] <= 100
        shown = scalars(after / name.removesuffix("-metrics.jsonl"))
        assert shown["eval/accuracy"][8] == pytest.approx(row["accuracy"], rel=1e-5)
