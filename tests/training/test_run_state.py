"""run_state.json tells whether a training runs, finished, stopped or failed, and why."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from t0repro.errors import UserError
from t0repro.runs.train import train
from t0repro.training.loop import Hook
from t0repro.training.run_state import RUN_STATE_FILE, read_run_state

from ..helpers import tiny_models as tiny


class Do(Hook):
    def __init__(self, do):
        self._do = do

    def after_step(self, trainer):
        self._do(trainer)


def run(folder, batches, do=lambda trainer: None):
    train(tiny.run_config(folder, 4), batches, hooks=[Do(do)])


def test_a_finished_training_says_how_far_and_how_fast_it_was(tmp_path):
    seen = []
    run(tmp_path, tiny.batches(4), lambda trainer: seen.append(read_run_state(tmp_path)))
    assert {state.state for state in seen} == {"running"} and seen[0].loss is None
    state = read_run_state(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (state.state, state.reason, state.step, state.last_step) == ("finished", None, 4, 4)
    assert state.loss == lines[-1]["loss"] and state.examples == 16
    assert state.target_tokens == sum(line["target_tokens"] for line in lines)
    seconds = sum(line["seconds"] for line in lines)
    assert state.steps_per_second == pytest.approx(4 / seconds) and state.seconds_left == 0
    assert state.process == os.getpid()


def test_a_resumed_training_counts_the_tokens_of_each_of_its_steps_once(tmp_path):
    config, batches = tiny.run_config(tmp_path, 6), tiny.batches(6)

    def fail(trainer):
        if trainer.step == 5:
            raise OSError("killed")

    # It loses what follows the checkpoint of step 3.
    with pytest.raises(OSError, match="killed"):
        train(config, batches, hooks=[Do(fail)])
    train(config, batches[3:])
    state = read_run_state(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert state.first_step == 3 and state.examples == 24
    assert state.target_tokens == sum(line["target_tokens"] for line in lines)


def test_a_stop_and_a_failure_say_why(tmp_path):
    run(tmp_path / "ended", tiny.batches(2))
    assert read_run_state(tmp_path / "ended").reason == "the batches ended"
    run(tmp_path / "stopped", tiny.batches(4), lambda trainer: trainer.stop("enough"))
    stopped = read_run_state(tmp_path / "stopped")
    assert (stopped.state, stopped.reason, stopped.step) == ("stopped", "enough", 1)

    def fail(trainer):
        raise OSError("the disk is gone\nand more")

    with pytest.raises(OSError, match="the disk is gone"):
        run(tmp_path / "failed", tiny.batches(4), fail)
    failed = read_run_state(tmp_path / "failed")
    assert (failed.state, failed.reason) == ("failed", "OSError: the disk is gone")


def test_a_killed_training_is_not_taken_for_a_running_one(tmp_path):
    run(tmp_path, tiny.batches(4))
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    state = dataclasses.replace(read_run_state(tmp_path), state="running", process=int(gone.stdout))
    (tmp_path / RUN_STATE_FILE).write_text(json.dumps(dataclasses.asdict(state)))
    assert read_run_state(tmp_path).state == "failed"
    elsewhere = dataclasses.replace(state, host="another machine")
    (tmp_path / RUN_STATE_FILE).write_text(json.dumps(dataclasses.asdict(elsewhere)))
    assert read_run_state(tmp_path).state == "running"


def test_without_a_file_there_is_no_state_and_another_file_is_refused(tmp_path):
    assert read_run_state(tmp_path) is None
    (tmp_path / RUN_STATE_FILE).write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        read_run_state(tmp_path)
