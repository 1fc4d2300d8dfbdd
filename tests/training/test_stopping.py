"""T5X's rule of early stopping to the letter, and stopping at values that are NaN or Inf."""

import itertools
import json
import math
import re
import types
from pathlib import Path

import clu.values
import numpy as np
import pytest

from t0repro.config.run import EarlyStoppingConfig, TerminateOnNanConfig
from t0repro.progress import heard_by
from t0repro.training.metric_classes import Scalar, Sum, compute_values
from t0repro.training.stopping import (
    BaseAction,
    EarlyStoppingAction,
    RunActions,
    TerminateOnNanAction,
    make_actions,
)

ROOT = Path(__file__).resolve().parents[2]


def stops_at(values, mode="min", patience=3, atol=0.0, rtol=0.0, reference="previous"):
    """The index of the value at which it stops; None if it never does."""
    config = EarlyStoppingConfig("task", "loss", mode, patience, atol, rtol, reference)
    run = make_actions([config])
    stopped = (index for index, value in enumerate(values) if run(None, {"task": {"loss": value}}))
    return next(stopped, None)


def rows_of_the_docs():
    """(values, options, where T5X's rule stops, where ours does) of docs/t5x_names.md's table."""
    lines = (ROOT / "docs/t5x_names.md").read_text().splitlines()
    header = next(n for n, line in enumerate(lines) if line.startswith("| values | mode |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[header + 2 :])
    for row in rows:
        values, mode, patience, *rest = (cell.strip() for cell in row.strip("|").split("|"))
        atol, rtol, previous, best = rest
        options = {"mode": mode, "patience": int(patience), "atol": float(atol)}
        stops = [None if cell == "–" else int(cell) - 1 for cell in (previous, best)]
        numbers = [int(x) if x.strip().isdigit() else float(x) for x in values.split(",")]
        yield pytest.param(numbers, options | {"rtol": float(rtol)}, *stops, id=row)


@pytest.mark.parametrize("values, options, previous, best", [*rows_of_the_docs()])
def test_both_rules_stop_where_the_docs_say(values, options, previous, best):
    assert stops_at(values, **options, reference="previous") == previous
    assert stops_at(values, **options, reference="best") == best


def test_t5xs_rule_goes_on_by_itself_after_a_lucky_dip_and_ours_does_not():
    zigzag = [1.0] + [2.0, 1.9] * 20
    assert stops_at(zigzag, reference="previous") is None
    assert stops_at(zigzag, reference="best") == 3


@pytest.mark.parametrize("reference", ["previous", "best"])
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_an_action_that_goes_on_from_its_saved_state_stops_at_the_same_value(reference, cut):
    values = [1, 2, 1.9, 2.5, 3]
    whole = EarlyStoppingAction(("task", "loss"), "min", reference=reference)
    first = EarlyStoppingAction(("task", "loss"), "min", reference=reference)
    second = EarlyStoppingAction(("task", "loss"), "min", reference=reference)
    expected = [whole.run(None, {"task": {"loss": value}}) for value in values]
    found = [first.run(None, {"task": {"loss": value}}) for value in values[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [second.run(None, {"task": {"loss": x}}) for x in values[cut:]] == expected


@pytest.mark.parametrize(
    "options", [{"mode": "less"}, {"patience": -1}, {"atol": -1.0}, {"reference": "first"}]
)
def test_options_that_make_no_rule_are_refused(options):
    with pytest.raises(ValueError):
        EarlyStoppingAction(("task", "loss"), **{"mode": "min", **options})


class Value:
    """A metric's value as clu returns it."""

    value = math.nan


def test_a_value_may_be_a_number_or_have_one():
    action = TerminateOnNanAction("train")
    assert action.run(None, {"train": {"loss": Value()}})
    assert action.run(None, {"train": {"loss": Scalar(math.inf)}})


@pytest.mark.parametrize("value, stops", [(1.0, False), (math.nan, True), (-math.inf, True)])
def test_terminate_on_nan(value, stops):
    run = make_actions([TerminateOnNanConfig("train", "loss")])
    assert run(None, {"train": {"loss": value}}) is stops


def test_a_task_or_metric_that_is_not_there_is_told_and_does_not_stop():
    told = []
    run = make_actions([TerminateOnNanConfig("train", "loss")])
    with heard_by(told.append):
        assert not run(None, {"other": {"loss": math.nan}})
        assert not run(None, {"train": {"accuracy": math.nan}})
    assert "no results of train; there are other" in told[0] and "no metric loss" in told[1]


@pytest.mark.parametrize("reference", ["previous", "best"])
def test_a_patience_of_0_stops_at_once(reference):
    assert stops_at([1.0, 0.5], patience=0, reference=reference) == 0


@pytest.mark.parametrize(
    "action",
    [EarlyStoppingAction(("train", "loss"), "min", 1), TerminateOnNanAction("train")],
)
@pytest.mark.parametrize(
    "value, kind",
    [
        (clu.values.Text("nan"), "Text"),
        (clu.values.Histogram(np.ones(4, int), 4), "Histogram"),
        (np.full(3, math.nan), r"array \[3\]"),
    ],
)
def test_a_value_that_is_no_number_is_told_and_does_not_stop(action, value, kind):
    told = []
    with heard_by(told.append):
        assert action.run(None, {"train": {"loss": value}}) is False
    assert re.search(rf"loss of train is not a number but {kind}", told[0])


class HaltsOnClus(BaseAction):
    """T5X's own idiom: a value that is not a clu.values.Scalar is ignored."""

    def run(self, train_state, metrics_by_task):
        metric = metrics_by_task["task"]["loss"]
        return isinstance(metric, clu.values.Scalar) and bool(np.isnan(metric.value))


@pytest.mark.parametrize(
    "value", [math.nan, Sum(np.float32("nan")).compute_value(), clu.values.Scalar(math.nan)]
)
def test_an_action_that_asks_for_clus_scalars_acts_on_every_number(value):
    state = types.SimpleNamespace(params={}, frozen=None)
    assert RunActions([HaltsOnClus()])(state, {"task": {"loss": value}})
    assert isinstance(compute_values({"x": Sum(np.float32(1))})["x"], clu.values.Value)


def test_all_actions_run_whatever_the_first_one_says():
    early = EarlyStoppingConfig("task", "loss", "min", 2, 0.0, 0.0, "previous")
    run = make_actions([TerminateOnNanConfig("task", "loss"), early])
    assert run(None, {"task": {"loss": math.inf}}) and run(None, {"task": {"loss": 1.0}}) is False
    assert run(None, {"task": {"loss": 1.0}})


def test_no_actions_never_stop():
    assert not make_actions([])(None, {"task": {"loss": math.nan}})
