"""A trainer's own `train` is called by the loop as T5X calls it, and nothing else changes."""

import dataclasses
import json
import math
import os
import signal

import jax
import numpy as np
import pytest

from t0repro.config.run import TerminateOnNanConfig, UserClass
from t0repro.errors import UserError
from t0repro.runs.train import train
from t0repro.training import trainer
from t0repro.training.checkpoints import list_checkpoints
from t0repro.training.hooks.evaluate import Evaluations
from t0repro.training.hooks.stop_on_signal import StoppedBySignal
from t0repro.training.loop import Hook

from ..helpers import tiny_models as tiny

CALLS = []


class Delegates(trainer.Trainer):
    """Notes each call, and does what Trainer does."""

    def train(self, batch_iter, num_steps, start_step=None):
        CALLS.append((start_step, num_steps))
        return super().train(batch_iter, num_steps, start_step)


class Loops(trainer.Trainer):
    """Loops over the train step itself, as T5X's trainer does."""

    def train(self, batch_iter, num_steps, start_step=None):
        CALLS.append((start_step, num_steps))
        step, metrics = self._compiled_train_step or self._partitioned_train_step, None
        with self._train_state_mutex:
            state = self.train_state
            self.train_metrics_manager.start_duration_timer(block_on=state)
            for _ in range(num_steps):
                batch = next(batch_iter)
                assert "decoder_target_tokens" in batch
                state, found = step(state, batch)
                metrics = found if metrics is None else trainer.merge_metrics(metrics, found)
            self.train_state = state
        manager = self.train_metrics_manager
        return manager.write_metrics_summary(metrics, start_step + num_steps, num_steps)


class Stops(Delegates):
    """Sets stop_training once it has trained for two calls."""

    def train(self, *args, **kwargs):
        summary = super().train(*args, **kwargs)
        self.stop_training = len(CALLS) == 2
        return summary


class StopsAtTheStart(trainer.Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stop_training = True


class StopsInEval(trainer.Trainer):
    def eval(self, batch_iters):
        self.stop_training = True
        return super().eval(batch_iters)


class DoesNothing(trainer.Trainer):
    def train(self, batch_iter, num_steps, start_step=None):
        return self.train_metrics_manager.write_summary(start_step)


class ReturnsNothing(trainer.Trainer):
    def train(self, *args, **kwargs):
        super().train(*args, **kwargs)


def run(folder, cls=None, steps=8, batches=None, hooks=(), **plan):
    """Trains with a class for the trainer; the lines of training."""
    CALLS.clear()
    classes = {"trainer": UserClass(__name__, cls.__name__, {})} if cls else {}
    save = dataclasses.replace(tiny.PLAN.save, period=4, steps=(3,), from_first_step=True)
    settings = {"eval_period": 4, "stats_period": 2, "save": save, "user_classes": classes}
    made = dataclasses.replace(tiny.PLAN, **settings | plan)
    config = tiny.run_config(folder, steps, plan=made, num_microbatches=2)
    train(
        config,
        tiny.batches(steps) if batches is None else batches,
        evaluations=Evaluations(train_eval={"a_task": tiny.batches(2)}),
        hooks=hooks,
    )
    return rows(folder)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(lines, split="train"):
    return {row["step"]: row["loss"] for row in lines if row["split"] == split}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual")
    return run(folder), list_checkpoints(folder)


@pytest.mark.parametrize("cls", [Delegates, Loops])
def test_it_is_called_up_to_each_step_with_work_and_trains_the_same(tmp_path, usual, cls):
    lines, (expected, checkpoints) = run(tmp_path, cls), usual
    # A summary every 2 steps, checkpoints at 3 and every 4, and evaluations every 4.
    assert CALLS == [(0, 2), (2, 1), (3, 1), (4, 2), (6, 2)]
    assert list_checkpoints(tmp_path) == checkpoints == [0, 3, 4, 8]
    evaluated = losses(lines, "training_eval/a_task")
    assert evaluated == pytest.approx(losses(expected, "training_eval/a_task"), rel=1e-5)
    assert set(evaluated) == {4, 8}
    # Each call writes a summary, so the one of steps 3 and 4 comes in two parts.
    found, before = losses(lines), losses(expected)
    assert list(found) == [2, 3, 4, 6, 8] and list(before) == [2, 4, 6, 8]
    found[4] = (found.pop(3) + found[4]) / 2
    assert found == pytest.approx(before, rel=1e-5)
    state = json.loads((tmp_path / "run_state.json").read_text())
    assert (state["state"], state["step"]) == ("finished", 8)


def test_stop_training_is_honored_wherever_it_is_set(tmp_path, capsys):
    run(tmp_path / "calls", Stops)
    assert CALLS == [(0, 2), (2, 1)] and list_checkpoints(tmp_path / "calls") == [0, 3]
    run(tmp_path / "start", StopsAtTheStart)
    assert list_checkpoints(tmp_path / "start") == [0]
    run(tmp_path / "eval", StopsInEval)
    assert list_checkpoints(tmp_path / "eval") == [0, 3, 4]
    assert capsys.readouterr().err.count("the trainer's stop_training was set after") == 3


@pytest.mark.parametrize("cls, what", [(DoesNothing, "did no update"), (ReturnsNothing, "None")])
def test_one_that_does_not_train_is_refused_by_name(tmp_path, cls, what):
    with pytest.raises(UserError, match=rf"test_own_train.{cls.__name__}.train .*{what}"):
        run(tmp_path, cls)


def test_an_update_that_is_nan_is_held_and_reported_within_a_call(tmp_path):
    """Step 6 of a call for all 8 steps: the state, the report and the stop are those of a step."""
    bad = [dict(batch) for batch in tiny.batches(8)]
    state = {}

    class Spoils(Hook):
        def after_step(self, loop):
            if loop.step == 5 and not state:
                state["params"] = True
                spoiled = jax.tree.map(lambda x: x * np.nan, loop.stacked_state.params)
                loop.trainer.train_state = loop.stacked_state.replace(params=spoiled)

    plan = {"actions": {"TRAIN": (TerminateOnNanConfig("train", "loss"),)}, "eval_period": 0}
    plan |= {"stats_period": 8, "save": dataclasses.replace(tiny.PLAN.save, period=8)}
    run(tmp_path, Delegates, batches=bad, hooks=[Spoils()], **plan)
    assert CALLS == [(0, 8)] and (tmp_path / "bad_update_6").is_dir()
    assert list_checkpoints(tmp_path) == [0, 5]


def test_a_signal_ends_a_call_after_the_current_update(tmp_path):
    class Kills(Hook):
        def after_step(self, loop):
            if loop.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    plan = {"stats_period": 8, "eval_period": 0}
    plan["save"] = dataclasses.replace(tiny.PLAN.save, period=8)
    with pytest.raises(StoppedBySignal):
        run(tmp_path, Delegates, hooks=[Kills()], **plan)
    assert CALLS == [(0, 8)] and list_checkpoints(tmp_path) == [0, 3]
    resumed = run(tmp_path, Delegates, batches=tiny.batches(8)[3:], **plan)
    assert CALLS == [(3, 5)] and list_checkpoints(tmp_path) == [0, 3, 8]
    assert all(math.isfinite(loss) for loss in losses(resumed).values())


@pytest.mark.parametrize("cls", [Delegates, Loops])
def test_training_ends_where_the_batches_do(tmp_path, cls):
    plan = {"stats_period": 8, "eval_period": 0, "save": tiny.PLAN.save}
    if cls is Loops:
        with pytest.raises(UserError, match=r"Loops.train lost its updates when the batches ended"):
            run(tmp_path, cls, batches=tiny.batches(5), **plan)
        return
    lines = run(tmp_path, cls, batches=tiny.batches(5), **plan)
    assert list(losses(lines)) == [3, 5] and list_checkpoints(tmp_path) == [0, 3, 5]
