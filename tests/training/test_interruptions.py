"""A planned training that dies at any kind of moment ends as one that never did, bit for bit."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from t0repro.training.checkpoints import list_checkpoints
from t0repro.training.hooks.stop_on_signal import PREEMPTED, StoppedBySignal
from t0repro.training.train_state import to_flat_tree
from t0repro.training.trainer import PreemptionError

from . import planned_run
from .planned_run import MOMENTS, run


def lines(folder):
    """Every line of metrics.jsonl without the times, in order."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("timing/")} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never disturbed, and that early stopping ended."""
    folder = tmp_path_factory.mktemp("whole")
    state = run(folder)
    assert int(state.step) == 18 and list_checkpoints(folder)[-1] == 18
    return folder, to_flat_tree(state)


def assert_same(folder, state, whole):
    assert lines(folder) == lines(whole[0])
    assert list_checkpoints(folder) == list_checkpoints(whole[0])
    tree = to_flat_tree(state)
    assert all(np.array_equal(tree[name], x) for name, x in whole[1].items())


class Died(BaseException):
    """Stands for a death of the process."""


@pytest.mark.parametrize("moment, step", [(MOMENTS[2], 6), (MOMENTS[3], 15)])
def test_an_evaluation_that_was_interrupted_is_done_when_training_goes_on(
    whole, tmp_path, moment, step
):
    def die():
        raise Died

    with pytest.raises(Died):
        run(tmp_path, moment, step, die)
    assert_same(tmp_path, run(tmp_path), whole)


@pytest.mark.parametrize("last_step", [6, 8])  # by the period, and off it
def test_an_interrupted_evaluation_of_the_last_step_is_done_by_the_same_command(
    tmp_path, last_step
):
    def die():
        raise Died

    whole = run(tmp_path / "whole", last_step=last_step)
    with pytest.raises(Died):
        run(tmp_path / "run", MOMENTS[3], last_step, die, last_step=last_step)
    state = run(tmp_path / "run", last_step=last_step)
    assert_same_training(state, whole, tmp_path)
    before = lines(tmp_path / "run")
    assert before[-1]["split"] == "inference_eval/a_task" and before[-1]["step"] == last_step
    run(tmp_path / "run", last_step=last_step)  # once
    assert lines(tmp_path / "run") == before


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 9, 18])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_kind_of_moment_it_ends_as_if_it_had_never_died(
    whole, tmp_path, moment, step
):
    command = [sys.executable, "-P", planned_run.__file__, str(tmp_path), moment, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert_same(tmp_path, run(tmp_path), whole)


def test_a_run_that_an_action_stopped_stays_stopped(whole):
    before = lines(whole[0])
    assert int(run(whole[0]).step) == 18 and lines(whole[0]) == before


def test_a_preemption_error_saves_and_ends_with_its_own_exit_code(tmp_path):
    def preempted():
        raise PreemptionError("the machine is going away")

    with pytest.raises(StoppedBySignal) as stopped:
        run(tmp_path, MOMENTS[0], 2, preempted)
    assert stopped.value.code == PREEMPTED == 75
    assert list_checkpoints(tmp_path) == [0, 2]


@pytest.mark.slow
def test_twenty_four_preemptions_in_one_training_change_nothing(tmp_path):
    whole = run(tmp_path / "whole", patience=99)
    preempted = 0
    for step in range(1, 30):
        if step % 5 == 0:
            continue  # some starts get further than one step
        with pytest.raises(StoppedBySignal):
            run(
                tmp_path / "run",
                MOMENTS[0],
                step,
                lambda: os.kill(os.getpid(), signal.SIGTERM),
                patience=99,
            )
        preempted += 1
    assert preempted == 24
    assert_same_training(run(tmp_path / "run", patience=99), whole, tmp_path)


def assert_same_training(state, whole, folder):
    tree, expected = to_flat_tree(state), to_flat_tree(whole)
    assert all(np.array_equal(tree[name], x) for name, x in expected.items())
    assert lines(folder / "run") == lines(folder / "whole")
