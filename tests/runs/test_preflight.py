"""The lists of checks before a run: their order, what they raise, and the table that shows them."""

import dataclasses
import re

import pytest

from t0repro.config.choices import ChoiceLoss
from t0repro.config.t5x.run import read_eval_run, read_infer_run, read_train_run
from t0repro.errors import UserError
from t0repro.runs import preflight
from t0repro.runs.checks import Check, Cost, run_checks

from .tiny_gin import parsed

DATA = (
    "MIXTURE_OR_TASK_NAME = 'demo_train'",
    "TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 8}",
    "USE_CACHED_TASKS = False",
)


def wrong(what):
    def check():
        raise UserError(what)

    return check


def said(*checks, **options):
    lines = []
    run_checks(checks, lambda name, line: lines.append(f"{name}: {line}"), **options)
    return lines


def test_all_that_is_wrong_is_raised_at_once_or_the_first_thing_ends_the_list():
    checks = [
        Check("machines", Cost.NAMES, lambda: ["one"]),
        Check("gin", Cost.FILES, wrong("a typo")),
        Check("data", Cost.TASKS, wrong("no rows")),
    ]
    with pytest.raises(UserError, match="a typo\nno rows"):
        said(*checks)
    with pytest.raises(UserError, match="a typo$"):
        said(*checks, all_at_once=False)
    assert said(*checks[:1]) == ["machines: one"]


def test_what_several_checks_find_is_said_once():
    checks = [Check(name, Cost.TASKS, wrong("no vocabulary")) for name in ("train", "infer_eval")]
    with pytest.raises(UserError, match="^no vocabulary$"):
        said(*checks)
    with pytest.raises(UserError, match="^no vocabulary\nno rows$"):
        said(*checks, Check("train_eval", Cost.TASKS, wrong("no rows")))


def test_a_dear_check_before_a_cheap_one_is_refused():
    compiles, reads = (Check(cost.name, cost, list) for cost in (Cost.COMPILE, Cost.FILES))
    assert said(reads, compiles) == []
    with pytest.raises(AssertionError):
        said(compiles, reads)


def table():
    """The table's rows: (check, cost)."""
    rows, names = [], []
    for line in preflight.__doc__.split("what is checked\n")[1].split("\n\n")[0].splitlines():
        name, _, rest = line[30:].partition(" ")
        names += [name.rstrip(",")] if name else []
        if cost := re.match(r"\s*([A-Z]+)\b", rest):
            current = Cost[cost[1]]
        if name:
            rows.append((name.rstrip(","), current))
    return rows


def listed(monkeypatch, check, *arguments):
    found = []
    monkeypatch.setattr(preflight, "run_checks", lambda checks, *_, **__: found.extend(checks))
    check(*arguments)
    return [(each.name, each.cost) for each in found]


def test_the_table_has_the_checks_of_each_list_in_their_order(monkeypatch):
    restored = ("utils.RestoreCheckpointConfig.path = 'a/checkpoint_1'",)
    run = parsed("train", "pretrain", "MODEL_DIR = 'm'", "TRAIN_STEPS = 2", *DATA, *restored)
    config = read_train_run(run)
    with_loss = dataclasses.replace(config.model, choice_loss=ChoiceLoss())
    config = dataclasses.replace(config, model=with_loss)
    training = listed(monkeypatch, preflight.check_training, config, (None, None))
    reads = (*DATA, "CHECKPOINT_PATH = 'a'")
    evaluation = read_eval_run(parsed("eval", "eval", "EVAL_OUTPUT_DIR = 'e'", *reads))
    inference = read_infer_run(parsed("infer", "infer", "INFER_OUTPUT_DIR = 'i'", *reads))
    rows = table()
    assert rows
    for found in (
        training,
        listed(monkeypatch, preflight.check_inference, evaluation),
        listed(monkeypatch, preflight.check_inference, inference),
    ):
        start = rows.index(found[0])
        assert [row for row in rows[start:] if row in found][: len(found)] == found
