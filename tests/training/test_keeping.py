"""Which checkpoints T5X's save rules remove."""

import json

import pytest

from t0repro.config.training_plan import BestCheckpoints, SaveConfig
from t0repro.training.keeping import metric_by_step, superfluous

STEPS = [10, 20, 30, 40, 50]


def kept(values=None, keep=2, steps=STEPS, **best):
    options = {"metric": "train/x", "mode": "max", "keep_without_metric": True}
    options |= {"force_keep_period": None, **best}
    rule = BestCheckpoints(**options) if values is not None else None
    save = SaveConfig(10, (), keep, None, False, None, rule)
    gone = superfluous(steps, save, values or {})
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
        ({"values": {10: 3, 20: 1, 30: 2, 40: 0}, "force_keep_period": 20}, [10, 20, 30, 40, 50]),
    ],
)
def test_rules(arguments, expected):
    assert kept(**arguments) == expected


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
