"""A full disk, no data and impatient users: one message, and nothing lost that was saved."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from t0repro.config.settings import check_settings
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.runs.train import train
from t0repro.training import checkpoints
from t0repro.training.model_dir import lock_for_training

from ..helpers import tiny_models as tiny

TESTS = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of its own at a folder; the value mounts it again with another size."""

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    folder.mkdir()
    if not mount(f"size={size}"):
        pytest.skip("this user may not mount a file system")
    try:
        yield lambda size: mount("remount", f"size={size}")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# The disk is full in the first save or in a later one, and each time at another of its files.
@pytest.mark.parametrize("size", ["60k", "204k", "300k"])
def test_a_full_disk_ends_training_with_its_file_and_the_run_goes_on_later(tmp_path, size):
    model_dir, batches = tmp_path / "disk", tiny.batches(4)

    def run():
        done = checkpoints.latest_step(model_dir) or 0
        config = tiny.run_config(model_dir, 4, plan=tiny.mesh_plan(save_checkpoints_steps=1))
        train(config, batches[done:])

    with small_disk(model_dir, size) as resize:
        with pytest.raises(UserError, match="The disk is full") as error:
            run()
        assert str(model_dir) in str(error.value.where)
        assert "start the same command again" in (error.value.fix or "")
        left = [path.name for path in model_dir.iterdir()]
        assert not [name for name in left if "tmp" in name], "nothing partial fills the disk"
        saved = checkpoints.latest_step(model_dir)
        if saved is not None:
            checkpoints.load_tree(checkpoints.checkpoint_path(model_dir, saved))
        assert resize("4m")
        run()
        assert checkpoints.list_checkpoints(model_dir) == [1, 2, 3, 4]
        lines = (model_dir / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_line_of_metrics_that_does_not_fit_leaves_no_part_of_itself(tmp_path):
    from t0repro.training.metrics import JsonLines

    folder = tmp_path / "disk"
    with small_disk(folder, "8k"):
        lines = JsonLines(folder / "metrics.jsonl")
        with pytest.raises(UserError, match="The disk is full"):
            for step in range(1000):
                lines.write({"split": "train", "step": step, "loss": 0.5})
        lines.close()
        text = (folder / "metrics.jsonl").read_text()
        assert text.endswith("}\n")
        assert [json.loads(line)["step"] for line in text.splitlines()] == list(
            range(text.count("\n"))
        )


def test_training_without_a_single_batch_is_an_error_that_names_no_checkpoint(tmp_path):
    said = []
    with pytest.raises(UserError, match="no batches to train on, and nothing was saved"):
        with heard_by(said.append):
            train(tiny.run_config(tmp_path, 2), [])
    assert not [line for line in said if line.startswith("checkpoint:")]
    assert checkpoints.list_checkpoints(tmp_path) == []


def test_what_training_without_a_batch_leaves_does_not_hinder_another_model(tmp_path):
    for model, batches in (
        (tiny.MODEL, []),
        (tiny.model_config(d_model=8, activations=("relu",)), tiny.batches(2)),
    ):
        config = tiny.run_config(tmp_path, 2, model=model)
        with lock_for_training(tmp_path, "jax", config):
            with contextlib.nullcontext() if batches else pytest.raises(UserError, match="batch"):
                train(config, batches)
    assert checkpoints.list_checkpoints(tmp_path) == [2]


def test_t5xs_training_without_a_batch_says_that_its_start_was_saved(tmp_path):
    """As T5X does it saves the state before the first step."""
    config = tiny.run_config(tmp_path, 2, plan=tiny.PLAN)
    with pytest.raises(UserError, match="no batches to train on") as caught:
        train(config, [])
    assert "nothing was saved" not in caught.value.what
    assert str(checkpoints.checkpoint_path(tmp_path, 0)) in caught.value.what
    assert checkpoints.list_checkpoints(tmp_path) == [0]
    state = train(config, tiny.batches(2))
    assert int(state.step) == 2


@pytest.mark.parametrize("keep", [0, None])
def test_no_checkpoint_is_removed_unless_a_number_of_them_is_kept(tmp_path, keep):
    plan = tiny.mesh_plan(save_checkpoints_steps=1, keep_checkpoint_max=keep)
    config = tiny.run_config(tmp_path, 3, plan=plan)
    train(config, tiny.batches(3))
    assert checkpoints.list_checkpoints(tmp_path) == [1, 2, 3]


def test_a_negative_number_of_checkpoints_to_keep_is_refused(tmp_path):
    # Mesh TensorFlow's Saver deletes each checkpoint right after saving it then.
    with pytest.raises(UserError, match="keep is -1"):
        check_settings(tiny.mesh_plan(save_checkpoints_steps=1, keep_checkpoint_max=-1), {})


SLOW = """
import sys, time
sys.path.insert(0, sys.argv[1])
import helpers.tiny_models as tiny
from t0repro.cli.gate import gate
from t0repro.runs.train import train

def batches():
    for number, batch in enumerate(tiny.batches(1000)):
        print("batch", number, flush=True)
        time.sleep(0.1 if number < 4 else 30)  # stuck in the data after the fourth
        yield batch

with gate("train"):
    train(tiny.run_config(sys.argv[2], 1000), batches())
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_saves_and_a_second_one_stops_at_once_without_a_traceback(tmp_path, signals):
    command = [sys.executable, "-P", "-c", SLOW, str(TESTS), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        # With one signal: while the data still come; with two: when they no longer do.
        last = {1: "batch 2", 2: "batch 4"}[signals]
        assert child.stdout is not None and child.stderr is not None
        while child.stdout.readline().strip() != last:
            assert child.poll() is None, child.stderr.read()
        errors = ""
        for _ in range(signals):
            child.send_signal(signal.SIGINT)
            while signals == 2 and "stopping" not in errors:
                errors += child.stderr.readline()
        errors += child.communicate(timeout=60)[1]
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    assert "the same command continues from" in errors
    saved = checkpoints.latest_step(tmp_path)
    assert saved is not None and f"checkpoint_{saved}" in errors
    assert np.isfinite(
        checkpoints.load_tree(checkpoints.checkpoint_path(tmp_path, saved))["state/step"]
    )
