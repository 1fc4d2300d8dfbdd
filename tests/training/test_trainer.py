import io
import json

import jax
import numpy as np
import pytest

from t0repro.errors import UserError
from t0repro.training.actions import Action, SaveCheckpoints, ShowProgress
from t0repro.training.checkpoints import list_checkpoints
from t0repro.training.metrics import MetricsManager, StepMetrics
from t0repro.training.train_state import to_flat_tree
from t0repro.training.trainer import Trainer

from .. import tiny_models as tiny


def make_trainer(**options):
    return Trainer(
        options.pop("model", tiny.model()),
        options.pop("state", tiny.new_state()),
        optimizer=tiny.OPTIMIZER,
        schedule=options.pop("schedule", tiny.schedule()),
        **options,
    )


class Recorder(Action):
    def __init__(self):
        self.calls = []

    def start(self, trainer, last_step):
        self.calls.append(("start", last_step))

    def after_step(self, trainer):
        self.calls.append(("step", trainer.step))

    def on_metrics(self, metrics):
        self.calls.append(("metrics", metrics.step))

    def end(self, trainer):
        self.calls.append(("end", trainer.failed))


def rows(model_dir):
    return [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_have_a_line_for_every_step(tmp_path):
    batches = tiny.batches(3)
    with make_trainer(metrics=MetricsManager(tmp_path, 0)) as trainer:
        assert trainer.train(batches, 3) == 3
    lines = rows(tmp_path)
    assert [row["step"] for row in lines] == [1, 2, 3]
    assert list(lines[0]) == [
        "split",
        "step",
        "loss",
        "learning_rate",
        "target_tokens",
        "examples",
        "seconds",
    ]
    for row, batch in zip(lines, batches, strict=True):
        assert row["split"] == "train"
        assert row["target_tokens"] == np.count_nonzero(batch["targets"])
        assert row["examples"] == 4
        assert row["loss"] == float(np.float32(row["loss"])), "a float32 in full"
        assert row["learning_rate"] == pytest.approx(0.01)


def test_actions_see_each_step_at_once_and_its_metrics_a_step_late():
    recorder = Recorder()
    with make_trainer(actions=[recorder]) as trainer:
        trainer.train(tiny.batches(2), 2)
    assert recorder.calls == [
        ("start", 2),
        ("step", 1),
        ("metrics", 1),
        ("step", 2),
        ("metrics", 2),
        ("end", False),
    ]


def test_metrics_of_a_step_are_on_disk_before_its_checkpoint_is(tmp_path):
    class Check(Action):
        def after_step(self, trainer):
            steps = list_checkpoints(tmp_path)
            assert not steps or [row["step"] for row in rows(tmp_path)][-1] >= steps[-1]

    actions = [SaveCheckpoints(tmp_path, every=2), Check()]
    with make_trainer(metrics=MetricsManager(tmp_path, 0), actions=actions) as trainer:
        trainer.train(tiny.batches(5), 5)
    assert list_checkpoints(tmp_path) == [2, 4, 5]


def test_training_ends_where_the_batches_do_and_saves(tmp_path):
    with make_trainer(actions=[SaveCheckpoints(tmp_path, every=10)]) as trainer:
        assert trainer.train(tiny.batches(3), 5) == 3
    assert list_checkpoints(tmp_path) == [3]


def test_an_exception_ends_training_without_a_checkpoint(tmp_path):
    def broken():
        yield from tiny.batches(2)
        raise OSError("the disk is gone")

    recorder = Recorder()
    actions = [SaveCheckpoints(tmp_path, every=10), recorder]
    with pytest.raises(OSError, match="the disk is gone"), make_trainer(actions=actions) as trainer:
        trainer.train(broken(), 5)
    assert recorder.calls[-1] == ("end", True)
    assert list_checkpoints(tmp_path) == []


def test_a_loss_that_is_not_finite_stops_training():
    state = tiny.new_state()
    state = state.replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    with pytest.raises(UserError, match="step 1 is nan"), make_trainer(state=state) as trainer:
        trainer.train(tiny.batches(3), 3)


def test_compile_makes_the_step_that_training_uses():
    with make_trainer() as trainer:
        (batch,) = tiny.batches(1)
        trainer.compile(batch)
        compiled = dict(trainer._compiled)
        trainer.train([batch], 1)
        assert trainer._compiled == compiled


def test_a_batch_that_has_no_equal_microbatches_is_refused():
    with pytest.raises(UserError, match="4 rows has no 3"):
        make_trainer(num_microbatches=3).compile(tiny.batches(1)[0])


def test_a_batch_without_inputs_is_refused():
    with pytest.raises(UserError, match="no inputs; it has targets"):
        make_trainer().compile({"targets": np.ones((4, 5), np.int32)})


def test_evaluation_changes_nothing_and_writes_a_line(tmp_path):
    model = tiny.model(dropout_rate=0.5)
    with make_trainer(model=model, metrics=MetricsManager(tmp_path, 0)) as trainer:
        before = to_flat_tree(trainer.train_state)
        first = trainer.eval(tiny.batches(2), "validation")
        assert trainer.eval(tiny.batches(2), "validation") == first
        after = to_flat_tree(trainer.train_state)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert rows(tmp_path)[0] == {"split": "validation", "step": 0, **first}
    assert first["num_eval_tokens"] == sum(np.count_nonzero(b["targets"]) for b in tiny.batches(2))


def test_dropout_repeats_from_its_seed():
    def losses(seed):
        recorder = Losses()
        model = tiny.model(dropout_rate=0.5)
        with make_trainer(model=model, seed=seed, actions=[recorder]) as trainer:
            trainer.train(tiny.batches(1), 1)
        return recorder.losses

    assert losses(1) == losses(1) != losses(2)


class Losses(Action):
    def __init__(self):
        self.losses = []

    def on_metrics(self, metrics):
        self.losses.append(metrics.loss)


class Stopped:
    """What ShowProgress asks of a trainer."""

    step, failed = 10, False


def step_metrics(step):
    return StepMetrics(step, 1.25, 0.01, target_tokens=300, examples=20, seconds=0.5)


def test_progress_lines_say_step_loss_speed_and_time_left():
    stream = io.StringIO()
    progress = ShowProgress(interval=0.0, stream=stream)
    progress.start(Stopped(), 130)
    progress.on_metrics(step_metrics(11))
    progress.on_metrics(step_metrics(130))
    first, last = stream.getvalue().splitlines()
    assert first == (
        "step 11 of 130, loss 1.2500, 40.0 examples/s, 600 target tokens/s, 0:01:00 left"
    )
    assert last.startswith("step 130 of 130") and last.endswith("0:00:00 left")


def test_progress_lines_are_seconds_apart_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = ShowProgress(interval=3600.0, stream=stream)
    progress.start(Stopped(), 130)
    for step in range(11, 50):
        progress.on_metrics(step_metrics(step))
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_live_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = ShowProgress(stream=stream)
    progress.start(Stopped(), 130)
    progress.on_metrics(step_metrics(11))
    progress.end(Stopped())
    assert "step 11 of 130, loss 1.2500, 40.0 examples/s, 600 target tokens/s" in stream.getvalue()
