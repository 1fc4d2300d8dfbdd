"""Saving while training goes on: what is saved, one at a time, and errors that are never lost."""

import errno
import os
import signal
import threading

import numpy as np
import pytest

from t0repro.config.checkpoints import SaveConfig
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.runs.train import train
from t0repro.training import checkpoint_commit, checkpoints
from t0repro.training.hooks import save, stop_on_signal
from t0repro.training.hooks.save import SaveCheckpoints
from t0repro.training.hooks.stop_on_signal import StoppedBySignal
from t0repro.training.loop import Hook
from t0repro.training.run_state import read_run_state
from t0repro.training.train_state import to_flat_tree

from ..helpers import tiny_models as tiny
from .test_trainer import make_loop


class Held:
    """Stands in the way of every save, in the thread that writes it, until `go` is set."""

    def __init__(self, monkeypatch):
        self.reached, self.go, self.most, self._now = threading.Event(), threading.Event(), 0, 0
        self._describe = checkpoint_commit.describe_files
        monkeypatch.setattr(checkpoint_commit, "describe_files", self)

    def __call__(self, folder):
        self._now += 1
        self.most = max(self.most, self._now)
        self.reached.set()
        assert self.go.wait(60)
        self._now -= 1
        return self._describe(folder)


class Trees(Hook):
    """Copies the state after each step."""

    def __init__(self):
        self.by_step = {}

    def after_step(self, loop):
        # A copy of its own: what a checkpoint is compared with must not be what it was made of.
        tree = to_flat_tree(loop.train_state)
        self.by_step[loop.step] = {name: np.array(value) for name, value in tree.items()}


def full(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "d"))


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    tmp_path, monkeypatch
):
    held, trees = Held(monkeypatch), Trees()

    def batches():
        for number, batch in enumerate(tiny.batches(5)):
            if number == 3:
                # Step 3 has begun, in the buffers of step 2.
                assert held.reached.wait(60)
                assert checkpoints.list_checkpoints(tmp_path) == [], "it is not whole yet"
                held.go.set()
            yield batch

    with make_loop(hooks=[SaveCheckpoints(tmp_path, SaveConfig(2)), trees]) as loop:
        assert loop.run(batches(), 5) == 5
    assert checkpoints.list_checkpoints(tmp_path) == [2, 4, 5]
    for step in (2, 4, 5):
        saved = checkpoints.load_tree(checkpoints.checkpoint_path(tmp_path, step))
        for name, value in trees.by_step[step].items():
            np.testing.assert_array_equal(saved[name], value)


def test_one_checkpoint_is_written_at_a_time(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    threading.Timer(0.3, held.go.set).start()
    with make_loop(hooks=[SaveCheckpoints(tmp_path, SaveConfig(1, keep=2))]) as loop:
        loop.run(tiny.batches(4), 4)
    assert held.most == 1 and checkpoints.list_checkpoints(tmp_path) == [3, 4]


@pytest.mark.parametrize("every", [2, 50])
def test_an_error_of_the_background_ends_training_in_its_own_words(tmp_path, monkeypatch, every):
    monkeypatch.setattr(checkpoint_commit, "describe_files", full)
    config = tiny.run_config(tmp_path, 50, plan=tiny.mesh_plan(save_checkpoints_steps=every))
    with pytest.raises(UserError, match="The disk is full") as error:
        train(config, tiny.batches(50))
    assert str(tmp_path) in str(error.value.where)
    run = read_run_state(tmp_path)
    # At the latest where the next save begins, and after the last step: not as a finished run.
    assert run.state == "failed" and "disk is full" in run.reason
    assert run.step <= 2 * every
    assert not list(tmp_path.glob("*checkpoint*"))


def test_an_error_of_training_is_not_hidden_by_one_of_its_save(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_commit, "describe_files", full)

    def broken():
        yield tiny.batches(1)[0]
        raise RuntimeError("no more data")

    with (
        pytest.raises(RuntimeError, match="no more data"),
        make_loop(hooks=[SaveCheckpoints(tmp_path, SaveConfig(1))]) as loop,
    ):
        loop.run(broken(), 5)
    assert "ended training, another: The disk is full" in caplog.text


def test_all_actions_are_ended_whatever_one_of_them_does():
    class Fails(Hook):
        def end(self, loop):
            raise RuntimeError("at the end")

    ended = []

    class Ends(Hook):
        def end(self, loop):
            ended.append(loop.step)

    with pytest.raises(RuntimeError), make_loop(hooks=[Fails(), Ends()]) as loop:
        loop.run(tiny.batches(1), 1)
    assert ended == [1]


@pytest.mark.parametrize("notice", [600.0, 0.0])
def test_a_save_that_a_preemption_would_outrun_is_told(tmp_path, monkeypatch, notice):
    for module in (save, stop_on_signal):
        monkeypatch.setattr(module, "NOTICE_SECONDS", notice)
    said = []

    def batches():
        for number, batch in enumerate(tiny.batches(9)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    config = tiny.run_config(tmp_path, 9, plan=tiny.mesh_plan(save_checkpoints_steps=2))
    with pytest.raises(StoppedBySignal):
        with heard_by(said.append):
            train(config, batches())
    told = [line for line in said if "a save takes" in line]
    (saved,) = [line for line in said if line.startswith("saved")]
    assert len(told) == ("more than" in saved) == (notice == 0.0), said
