"""The trainer and the loop around it: steps, metrics, actions, evaluations."""

import io
import json
import threading

import jax
import numpy as np
import pytest

from t0repro.config.checkpoints import SaveConfig
from t0repro.errors import UserError
from t0repro.training.checkpoints import list_checkpoints
from t0repro.training.hooks.save import SaveCheckpoints
from t0repro.training.hooks.show_progress import ShowProgress
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.metrics import MetricLog, StepMetrics
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import to_flat_tree
from t0repro.training.trainer import Trainer

from ..helpers import tiny_models as tiny


def make_trainer(*, model=None, state=None, microbatches=1, seed=0, eval_names=(), **options):
    return Trainer(
        model=T5Model(model or tiny.model(), tiny.OPTIMIZER),
        train_state=state or tiny.new_state(),
        partitioner=None,
        eval_names=eval_names,
        summary_dir=options.pop("summary_dir", None),
        train_state_axes=None,
        rng=jax.random.key(seed),
        learning_rate_fn=tiny.schedule(),
        num_microbatches=microbatches,
        **options,
    )


def make_loop(*, log=None, hooks=(), **options):
    return TrainingLoop(make_trainer(**options), log=log, hooks=hooks)


class Recorder(Hook):
    def __init__(self):
        self.calls = []

    def start(self, loop, last_step):
        self.calls.append(("start", last_step))

    def after_step(self, loop):
        self.calls.append(("step", loop.step))

    def on_metrics(self, metrics):
        self.calls.append(("metrics", metrics.step))

    def end(self, loop):
        self.calls.append(("end", loop.has_failed))


def rows(model_dir):
    return [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]


# ---- The loop -----------------------------------------------------------------------------------


def test_metrics_have_a_line_for_every_step(tmp_path):
    batches = tiny.batches(3)
    with make_loop(log=MetricLog(tmp_path, 0)) as loop:
        assert loop.run(batches, 3) == 3
    lines = rows(tmp_path)
    assert [row["step"] for row in lines] == [1, 2, 3]
    assert list(lines[0])[:9] == [
        "split",
        "step",
        "loss",
        "learning_rate",
        "target_tokens",
        "examples",
        "seconds",
        "input_tokens",
        "input_wait_seconds",
    ]
    for row, batch in zip(lines, batches, strict=True):
        assert row["split"] == "train"
        assert row["target_tokens"] == np.count_nonzero(batch["targets"])
        assert row["input_tokens"] == np.count_nonzero(batch["inputs"])
        assert row["examples"] == 4
        assert row["loss"] == float(np.float32(row["loss"])), "a float32 in full"
        assert row["learning_rate"] == pytest.approx(0.01)
        # The same metrics as in a summary, of this one step.
        real = row["target_tokens"] / batch["targets"].size
        assert row["non_padding_fraction/loss_weights"] == pytest.approx(real)
        assert 0 <= row["accuracy"] <= 1 and row["z_loss"] > 0
        # float32 on the device; the step's seconds are rounded.
        speed = row["input_tokens"] / max(row["seconds"], 1e-9)
        assert row["timing/real_input_tokens_per_second"] == pytest.approx(speed, rel=1e-3)
        assert 0 <= row["timing/input_wait_fraction"] < 1
        assert row["timing/flops_per_second"] > 0


def test_actions_see_each_step_at_once_and_its_metrics_a_step_late():
    recorder = Recorder()
    with make_loop(hooks=[recorder]) as loop:
        loop.run(tiny.batches(2), 2)
    assert recorder.calls == [
        ("start", 2),
        ("step", 1),
        ("metrics", 1),
        ("step", 2),
        ("metrics", 2),
        ("end", False),
    ]


def test_metrics_of_a_step_are_on_disk_before_its_checkpoint_is(tmp_path):
    class Check(Hook):
        def after_step(self, loop):
            steps = list_checkpoints(tmp_path)
            assert not steps or [row["step"] for row in rows(tmp_path)][-1] >= steps[-1]

    hooks = [SaveCheckpoints(tmp_path, SaveConfig(2)), Check()]
    with make_loop(log=MetricLog(tmp_path, 0), hooks=hooks) as loop:
        loop.run(tiny.batches(5), 5)
    assert list_checkpoints(tmp_path) == [2, 4, 5]


def test_training_ends_where_the_batches_do_and_saves(tmp_path):
    with make_loop(hooks=[SaveCheckpoints(tmp_path, SaveConfig(10))]) as loop:
        assert loop.run(tiny.batches(3), 5) == 3
    assert list_checkpoints(tmp_path) == [3]


def test_an_exception_ends_training_without_a_checkpoint(tmp_path):
    def broken():
        yield from tiny.batches(2)
        raise OSError("the disk is gone")

    recorder = Recorder()
    hooks = [SaveCheckpoints(tmp_path, SaveConfig(10)), recorder]
    with pytest.raises(OSError, match="the disk is gone"), make_loop(hooks=hooks) as loop:
        loop.run(broken(), 5)
    assert recorder.calls[-1] == ("end", True)
    assert list_checkpoints(tmp_path) == []


def test_a_stop_by_one_action_stays_a_stop_whatever_another_does():
    class Stop(Hook):
        def after_step(self, loop):
            if loop.step == 2:
                loop.stop("enough")
                loop.stop("of this")

    with make_loop(hooks=[Stop(), Recorder()]) as loop:
        assert loop.run(tiny.batches(5), 5) == 2
    assert loop.stop_reason == "enough" and loop.trainer.stop_training


@pytest.mark.always
def test_a_loss_that_is_not_finite_stops_training():
    state = tiny.new_state()
    state = state.replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    with pytest.raises(UserError, match="step 1 is nan"), make_loop(state=state) as loop:
        loop.run(tiny.batches(3), 3)


def test_a_step_knows_how_long_it_waited_for_its_batch(tmp_path):
    def slow():
        for batch in tiny.batches(2):
            threading.Event().wait(0.5)
            yield batch

    with make_loop(log=MetricLog(tmp_path, 0)) as loop:
        loop.run(slow(), 2)
    second = rows(tmp_path)[1]
    # While it waited, the device did the step before, which takes no half second.
    assert 0 < second["input_wait_seconds"] <= min(second["seconds"], 0.6)


def test_dropout_repeats_from_its_seed():
    def losses(seed):
        recorder = Losses()
        model = tiny.model(dropout_rate=0.5)
        with make_loop(model=model, seed=seed, hooks=[recorder]) as loop:
            loop.run(tiny.batches(1), 1)
        return recorder.losses

    assert losses(1) == losses(1) != losses(2)


class Losses(Hook):
    def __init__(self):
        self.losses = []

    def on_metrics(self, metrics):
        self.losses.append(metrics.loss)


# ---- The trainer --------------------------------------------------------------------------------


def test_train_returns_a_future_of_the_means_and_writes_them(tmp_path):
    recorder = Losses()
    with make_loop(hooks=[recorder]) as loop:
        loop.run(tiny.batches(3), 3)
    with make_trainer(summary_dir=str(tmp_path)) as trainer:
        values = trainer.train(iter(tiny.batches(3)), 3).result()
        assert int(trainer.train_state.step) == 3
        assert trainer.train(iter(()), 0).result() == {}
    assert values["loss"].value == pytest.approx(np.mean(recorder.losses), rel=1e-6)
    assert values["timing/seqs"] == 12 and values["timing/steps_per_second"] > 0
    assert values["timing/flops_per_second"] > 0
    assert "timing/mfu" not in values, "this device's peak is not known"
    (row,) = rows(tmp_path)
    assert row == {"split": "train", "step": 3, **values}


def test_the_step_that_compile_train_makes_is_the_one_that_training_uses(tmp_path):
    with make_trainer(summary_dir=str(tmp_path)) as trainer:
        (batch,) = tiny.batches(1)
        trainer.compile_train(batch)
        compiled = dict(trainer._compiled_train_steps)
        trainer.train(iter([batch]), 1).result()
        assert trainer._compiled_train_steps == compiled
    assert rows(tmp_path)[0]["timing/compilation_seconds"] > 0


def test_evaluations_of_equal_shapes_share_a_compiled_step():
    with make_trainer(eval_names=["a", "b", "c"]) as trainer:
        wider = {name: np.pad(x, ((0, 0), (0, 1))) for name, x in tiny.batches(1)[0].items()}
        trainer.compile_eval({"a": tiny.batches(1)[0], "b": tiny.batches(2)[1], "c": wider})
        assert len(trainer._compiled_eval_steps) == 2


def test_a_batch_that_has_no_equal_microbatches_is_refused():
    with pytest.raises(UserError, match="4 rows has no 3"), make_trainer(microbatches=3) as trainer:
        trainer.compile_train(tiny.batches(1)[0])


def test_a_batch_without_inputs_is_refused():
    with pytest.raises(UserError, match="no inputs; it has targets"), make_trainer() as trainer:
        trainer.compile_train({"targets": np.ones((4, 5), np.int32)})


def test_evaluation_changes_nothing_and_writes_a_line(tmp_path):
    model = tiny.model(dropout_rate=0.5)
    with make_trainer(model=model, eval_names=["a"], summary_dir=str(tmp_path)) as trainer:
        before = to_flat_tree(trainer.train_state)
        first = trainer.eval({"a": tiny.batches(2)})["a"]
        again = trainer.eval({"a": tiny.batches(2)})["a"]
        assert trainer.eval({"a": ()}) == {"a": {}}
        after = to_flat_tree(trainer.train_state)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert rows(tmp_path)[0] == {"split": "training_eval/a", "step": 0, **first}
    same = {name for name in first if not name.startswith("timing/")}
    assert {name: first[name] for name in same} == {name: again[name] for name in same}
    assert first["timing/seqs"] == 8


def test_the_state_can_be_read_while_training_goes_on():
    """Its lock is held for the whole of `train`, so that no donated buffer is handed out."""
    steps, started = [], threading.Event()

    def batches():
        for batch in tiny.batches(3):
            yield batch
            if not started.is_set():
                reader.start()
                started.set()

    with make_trainer() as trainer:
        reader = threading.Thread(target=lambda: steps.append(int(trainer.train_state.step)))
        trainer.train(batches(), 3).result()
        reader.join(30)
    assert steps == [3]


# ---- Progress -----------------------------------------------------------------------------------


class Stopped:
    """What ShowProgress asks of a trainer."""

    step, failed = 10, False


def step_metrics(step):
    return StepMetrics(
        step,
        375.0,
        0.01,
        target_tokens=300,
        examples=20,
        seconds=0.5,
        loss_per_target_token=1.25,
    )


def test_progress_lines_say_step_loss_speed_and_time_left():
    stream = io.StringIO()
    progress = ShowProgress(interval=0.0, stream=stream)
    progress.start(Stopped(), 130)
    progress.on_metrics(step_metrics(11))
    progress.on_metrics(step_metrics(130))
    first, last = stream.getvalue().splitlines()
    assert first == (
        "step 11 of 130, loss 1.2500 per target token, 40.0 examples/s, 600 target tokens/s,"
        " 0:01:00 left"
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
    line = "step 11 of 130, loss 1.2500 per target token, 40.0 examples/s, 600 target tokens/s"
    assert line in stream.getvalue()
