"""The chain on real texts, from gin files alone: pretrain, adapt, fine-tune, rank, read back."""

import json
import math
import os
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from t0repro.converters.sources import load_any

from ..converters.checkpoint_files import assert_same_bits

FILES = "t5x/examples/t5/t5_1_1/examples/small_texts"

pytestmark = pytest.mark.slow


def command(folder, data, vocabulary, mode, stage, *arguments):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "t0repro.cli", mode, f"--gin_file={FILES}_{stage}.gin",
         *arguments],
        cwd=folder,
        env={
            **os.environ,
            "T0REPRO_DATA_DIR": str(data.resolve()),
            "T0REPRO_VOCAB": str(vocabulary.resolve()),
        },
        capture_output=True,
        text=True,
    )  # fmt: skip
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
def chain(tmp_path_factory, shared_data, shared_vocab):
    """The folder in which a few steps of each training ran, and what fine-tuning said."""
    folder = tmp_path_factory.mktemp("chain")

    def train(stage, steps, *arguments):
        arguments = (f"--gin.TRAIN_STEPS={steps}", *arguments)
        return command(folder, shared_data, shared_vocab, "train", stage, *arguments)

    # The state that a training starts from is kept, too.
    both = "--gin_bindings=utils.SaveCheckpointConfig.keep = 2"
    train("pretrain", 4)
    adapted = train("adapt", 6, both)
    finetuned = train("finetune", 8, both, "--gin.EVALUATOR_NUM_EXAMPLES=12")
    few = "--gin_bindings=seqio.Evaluator.num_examples = 12"
    command(folder, shared_data, shared_vocab, "eval", "eval", few)
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
    assert len(tasks) == 10
    for name in tasks:
        (line,) = (after / name).read_text().splitlines()
        assert line == (inside / name).read_text().splitlines()[-1]
        row = json.loads(line)
        assert row["step"] == 8 and 0 <= row["accuracy"] <= 100
        shown = scalars(after / name.removesuffix("-metrics.jsonl"))
        assert shown["eval/accuracy"][8] == pytest.approx(row["accuracy"], rel=1e-5)
