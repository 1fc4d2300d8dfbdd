"""T5X's rule of early stopping to the letter, and stopping at values that are not finite."""

import math

import pytest

from t0repro.config.training_plan import EarlyStoppingConfig, TerminateOnNanConfig
from t0repro.training.stopping import make_actions


def stops_at(values, mode="min", patience=3, atol=0.0, rtol=0.0):
    """The index of the value at which it stops; None if it never does."""
    config = EarlyStoppingConfig("task", "loss", mode, patience, atol, rtol)
    run = make_actions([config], lambda line: None)
    stopped = (index for index, value in enumerate(values) if run({"task": {"loss": value}}))
    return next(stopped, None)


@pytest.mark.parametrize(
    "values, options, expected",
    [
        ([1, 0.8, 0.6], {"rtol": 0.3}, 2),
        ([1, 0.8, 0.7, 0.6], {"atol": 0.15}, 3),
        ([1, 0.8, 0.6, 0.4], {}, None),
        ([1, 1, 1], {}, 2),
        ([1, 2, 3], {}, 2),
        ([1, 2, 1.9, 2.5, 3], {}, 4),
        ([5], {"patience": 1}, 0),
        ([1, 1], {"patience": 2}, 1),
        ([1, 2, 3], {"mode": "max"}, None),
        ([3, 2, 1], {"mode": "max"}, 2),
        ([1, 1.1, 1.2], {"mode": "max", "atol": 0.2}, 2),
        ([1, math.nan, math.nan, math.nan], {}, None),
        ([1, 1 - 1e-9, 1 - 2e-9], {}, 2),  # float32 cannot tell these apart
        ([3, 3, 3], {}, 2),  # whole numbers count
    ],
)
def test_sequences(values, options, expected):
    assert stops_at(values, **options) == expected


@pytest.mark.parametrize("value, stops", [(1.0, False), (math.nan, True), (-math.inf, True)])
def test_terminate_on_nan(value, stops):
    run = make_actions([TerminateOnNanConfig("train", "loss")], lambda line: None)
    assert run({"train": {"loss": value}}) is stops


def test_a_task_or_metric_that_is_not_there_is_told_and_does_not_stop():
    told = []
    run = make_actions([TerminateOnNanConfig("train", "loss")], told.append)
    assert not run({"other": {"loss": math.nan}}) and not run({"train": {"accuracy": math.nan}})
    assert "no results of train; there are other" in told[0] and "no metric loss" in told[1]


def test_all_actions_run_whatever_the_first_one_says():
    early = EarlyStoppingConfig("task", "loss", "min", 2, 0.0, 0.0)
    run = make_actions([TerminateOnNanConfig("task", "loss"), early], lambda line: None)
    assert run({"task": {"loss": math.inf}}) and run({"task": {"loss": 1.0}}) is False
    assert run({"task": {"loss": 1.0}})


def test_no_actions_are_nothing_to_run():
    assert make_actions([], print) is None
