"""A run that was stopped and resumed gives what one gives that never was, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from t0repro.errors import UserError
from t0repro.training.checkpoints import checkpoint_path, data_folder, list_checkpoints
from t0repro.training.hooks.stop_on_signal import PREEMPTED, StoppedBySignal
from t0repro.words import counted

from ..tasks.prompt_caches import make
from . import resume_run
from .resume_run import LAST_STEP, Behind, losses, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The task's cache."""
    folder = tmp_path_factory.mktemp("cache")
    make(folder, resume_run.TASK, min_shards=2)
    resume_run.use_cache(folder)
    yield folder
    resume_run.use_cache("")


@pytest.fixture(scope="module")
def uncached(tmp_path_factory):
    """A run on data that are rendered as it goes, never stopped."""
    model_dir = tmp_path_factory.mktemp("uncached")
    return model_dir, run(model_dir, seed=3)[0]


@pytest.fixture(scope="module")
def cached(cache, tmp_path_factory):
    """The same on cached data."""
    model_dir = tmp_path_factory.mktemp("cached")
    return model_dir, run(model_dir, use_cached=True, seed=3)[0]


def assert_same(model_dir, tree, whole):
    assert losses(model_dir) == losses(whole[0]) and sorted(losses(model_dir)) == [*range(1, 8)]
    assert tree.keys() == whole[1].keys()
    for name, expected in whole[1].items():
        np.testing.assert_array_equal(tree[name], expected, err_msg=name)


@pytest.mark.parametrize("step", [4, 5])
def test_a_run_stopped_by_sigterm_is_saved_there_and_goes_on_bit_for_bit(uncached, tmp_path, step):
    terminate = Behind(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedBySignal) as stopped:
        run(tmp_path, terminate, seed=3)
    assert stopped.value.code == PREEMPTED
    assert list_checkpoints(tmp_path)[-1] == step
    tree, said = run(tmp_path, seed=3)
    passed_over = f"data: after {counted(step, 'batch', 'batches')}, which are rebuilt and skipped"
    assert passed_over in said and f"start: step {step}" in said[2]
    assert_same(tmp_path, tree, uncached)


def test_a_run_stopped_by_an_exception_goes_on_from_its_last_checkpoint(uncached, tmp_path):
    def fail():
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run(tmp_path, Behind(5, fail), seed=3)
    assert list_checkpoints(tmp_path) == [2, 4]
    assert_same(tmp_path, run(tmp_path, seed=3)[0], uncached)


def test_a_run_killed_on_cached_data_goes_on_from_its_last_checkpoint(cached, cache, tmp_path):
    script = str(Path(resume_run.__file__))
    done = subprocess.run(
        [sys.executable, "-P", script, str(tmp_path), str(LAST_STEP), "5", str(cache)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    # Step 4 is written while step 5 is computed: the kill may come before the checkpoint is whole.
    assert list_checkpoints(tmp_path) in ([2], [2, 4])
    assert_same(tmp_path, run(tmp_path, use_cached=True, seed=3)[0], cached)


def test_the_input_pipelines_state_goes_on_without_making_batches_again(cached, tmp_path):
    options = {"use_cached": True, "seed": 3, "checkpoint_input_pipeline": True}
    run(tmp_path, last_step=3, **options)
    tree, said = run(tmp_path, **options)
    assert "data: after 3 batches, by the input pipeline's state" in said
    assert_same(tmp_path, tree, cached)


def test_a_pipeline_of_python_functions_has_no_state_to_keep(tmp_path):
    with pytest.raises(UserError, match="it runs Python functions"):
        run(tmp_path, checkpoint_input_pipeline=True)
    assert list_checkpoints(tmp_path) == []


def test_a_run_without_a_seed_keeps_the_one_that_it_drew(tmp_path):
    _, said = run(tmp_path, last_step=2)
    drawn = position(tmp_path, 2)["seed"]
    told = f"data: the examples' order is from seed {drawn}, because mesh_train_dataset_fn.seed"
    assert any(line.startswith(told) for line in said)
    _, said = run(tmp_path, last_step=3)
    assert any(line.startswith(told) for line in said)
    assert position(tmp_path, 3) == {**position(tmp_path, 2), "batches": 3, "seed": drawn}


def test_the_data_start_over_where_skip_seen_data_is_false_as_in_mesh_tensorflow(
    uncached, tmp_path
):
    run(tmp_path, last_step=2, seed=3)
    _, said = run(tmp_path, last_step=3, seed=3, skip_seen_data=False)
    assert not [line for line in said if line.startswith("data:")]
    assert position(tmp_path, 3)["batches"] == 1
    assert losses(tmp_path)[3] != losses(uncached[0])[3]


def test_skip_seen_data_counts_from_seen_data_init_step_as_in_mesh_tensorflow(tmp_path):
    run(tmp_path, last_step=2, seed=3)
    options = {"skip_seen_data": True, "seen_data_init_step": 1}
    _, said = run(tmp_path, last_step=3, seed=3, **options)
    assert [line for line in said if line.startswith("data: after 1 batch,")]


def test_data_of_another_shape_start_over_and_say_why(tmp_path):
    run(tmp_path, last_step=2, seed=3)
    _, said = run(tmp_path, last_step=3, seed=4, pack=False)
    assert "data: from the beginning, since pack and seed changed" in said


def position(model_dir, step):
    return json.loads((data_folder(checkpoint_path(model_dir, step)) / "position.json").read_text())
