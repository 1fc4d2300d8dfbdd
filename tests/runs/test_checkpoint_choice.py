"""Which checkpoints an evaluation takes."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest

from t0repro.config.checkpoints import CheckpointChoice
from t0repro.errors import UserError
from t0repro.runs import checkpoint_choice

ALL = CheckpointChoice(0, None, True)


def save(folder, step):
    (folder / f"model.ckpt-{step}.data-00000-of-00001").write_bytes(b"")
    (folder / f"model.ckpt-{step}.index").write_bytes(b"")


@pytest.fixture
def model_dir(tmp_path):
    for step in (0, 10, 20, 30):
        save(tmp_path, step)
    return tmp_path


def config_of(model_dir, wanted, choice=ALL):
    return SimpleNamespace(
        model_dir=str(model_dir),
        eval_checkpoint_step=wanted,
        checkpoint_choice=choice,
        mode="eval",
        provenance={},
    )


def steps(model_dir, wanted, **choice):
    config = config_of(model_dir, wanted, dataclasses.replace(ALL, **choice))
    return [ref.step for ref in checkpoint_choice.choose_checkpoints(config)]


def test_all_are_those_beyond_skip_until_which_is_zero_unless_bound(model_dir):
    assert steps(model_dir, "all") == [10, 20, 30]
    assert steps(model_dir, "all", skip_until=10) == [20, 30]


def test_the_latest_a_step_and_several_steps_stand_for_the_nearest_there(model_dir, capsys):
    assert steps(model_dir, -1) == [30]
    assert steps(model_dir, 10) == [10] and capsys.readouterr().err == ""
    assert steps(model_dir, 22) == [20]
    said = "note: there is no checkpoint of step 22; 20 is the closest"
    assert capsys.readouterr().err.splitlines() == [said]
    assert steps(model_dir, (29, 31, 1)) == [0, 30]


def test_only_steps_that_are_there_count_when_the_nearest_does_not(model_dir):
    assert steps(model_dir, (29, 10), find_closest=False) == [10]
    with pytest.raises(UserError, match="0, 10, 20, 30"):
        steps(model_dir, 29, find_closest=False)


def test_waiting_takes_the_latest_then_each_that_comes_until_stop_after(
    model_dir, monkeypatch, capsys
):
    monkeypatch.setattr(checkpoint_choice, "SECONDS_BETWEEN_POLLS", 0.01)
    seen = []

    def train():
        for step in (40, 50):
            while len(seen) < step // 10 - 3:
                time.sleep(0.01)
            time.sleep(0.1)
            save(model_dir, step)

    thread = threading.Thread(target=train)
    thread.start()
    choice = dataclasses.replace(ALL, stop_after=50)
    for ref in checkpoint_choice.choose_checkpoints(config_of(model_dir, None, choice)):
        seen.append(ref.step)
    thread.join()
    assert seen == [30, 40, 50]
    assert capsys.readouterr().err.count("waiting for a new checkpoint") == 2


def test_a_mode_that_writes_one_file_takes_one_checkpoint(model_dir):
    assert checkpoint_choice.one_checkpoint(config_of(model_dir, 10)).step == 10
    for wanted in ("all", None, (0, 10)):
        with pytest.raises(UserError, match="one checkpoint"):
            checkpoint_choice.one_checkpoint(config_of(model_dir, wanted))
