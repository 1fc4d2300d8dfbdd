"""Which checkpoints T5X's save rules remove."""

import json

import pytest

from t0repro.config.checkpoints import BestCheckpoints, SaveConfig
from t0repro.training.checkpoint_retention import PINNED, list_superfluous, metric_by_step
from t0repro.training.checkpoints import list_checkpoints, load_tree
from t0repro.training.hooks.save import SaveCheckpoints
from t0repro.training.loop import Hook

from ..helpers import tiny_models as tiny
from .test_trainer import make_loop

STEPS = [10, 20, 30, 40, 50]


def kept(values=None, keep=2, steps=STEPS, period=None, **best):
    options = {"metric": "train/x", "mode": "max", "keep_without_metric": True}
    rule = BestCheckpoints(**{**options, **best}) if values is not None else None
    save = SaveConfig(10, keep=keep, best=rule, keep_period=period)
    gone = list_superfluous(steps, save, values or {})
    return [step for step in steps if step not in gone]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, [40, 50]),
        ({"keep": None}, STEPS),
        # The two best and the latest, which has no value yet.
        ({"values": {10: 0.5, 20: 0.9, 30: 0.1, 40: 0.7}}, [20, 40, 50]),
        ({"values": {10: 0.5, 20: 0.9, 30: 0.1, 40: 0.7}, "mode": "min"}, [10, 30, 50]),
        ({"values": {10: 0.5, 20: 0.5, 30: 0.5, 40: 0.1}}, [20, 30, 50]),
        ({"values": {20: 0.9, 30: 0.1, 40: 0.7}}, [10, 20, 40, 50]),
        ({"values": {20: 0.9, 30: 0.1, 40: 0.7}, "keep_without_metric": False}, [20, 40, 50]),
        ({"values": {10: 3, 20: 1, 30: 2, 40: 0}, "period": 20}, [10, 20, 30, 40, 50]),
        ({"period": 20}, [20, 40, 50]),
        ({"period": 30, "keep": 1}, [30, 50]),
        ({"period": 30, "keep": 0}, STEPS),
    ],
)
def test_rules(arguments, expected):
    assert kept(**arguments) == expected


def test_pinned_checkpoints_and_those_of_a_period_stay_beside_the_latest_and_can_be_read(tmp_path):
    class Pin(Hook):
        def after_step(self, loop):
            if loop.step == 2:
                loop.wait()  # until the checkpoint of step 1 is whole
                (tmp_path / "checkpoint_1" / PINNED).touch()

    hooks = [Pin(), SaveCheckpoints(tmp_path, SaveConfig(1, keep=1, keep_period=3))]
    with make_loop(hooks=hooks) as loop:
        loop.run(tiny.batches(5), 5)
    assert list_checkpoints(tmp_path) == [1, 3, 5]
    assert load_tree(tmp_path / "checkpoint_1")["state/step"] == 1


def test_a_metric_is_read_by_the_name_that_tensorboard_shows(tmp_path):
    rows = [
        {"split": "train", "step": 1, "loss": 3.0},
        {"split": "training_eval/task", "step": 1, "loss": 5.0},
        {"split": "train", "step": 2, "accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert metric_by_step(tmp_path, "train/loss") == {1: 3.0}
    assert metric_by_step(tmp_path, "training_eval/task/loss") == {1: 5.0}
    assert metric_by_step(tmp_path / "nowhere", "train/loss") == {}
