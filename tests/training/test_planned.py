"""Training by a plan: the same numbers as Mesh TensorFlow's kind, and T5X's periods and stops."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

import tests.helpers.tiny_models as tiny
from t0repro.cli import t5_mesh_transformer
from t0repro.config.model import Arithmetic
from t0repro.config.optimizer import ScheduleConfig
from t0repro.config.run import EarlyStoppingConfig, TerminateOnNanConfig
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.runs import start
from t0repro.runs.train import train
from t0repro.training.checkpoints import list_checkpoints, load_tree
from t0repro.training.hooks.evaluate import Evaluations
from t0repro.training.hooks.stop_on_signal import PREEMPTED, StoppedBySignal
from t0repro.training.loop import Hook
from t0repro.training.run_state import read_run_state
from t0repro.training.train_state import to_flat_tree

PLAN = tiny.PLAN
T5X = Arithmetic(True, *[True] * 8)
BATCHES = tiny.batches(8)


def planned(folder, steps, batches=BATCHES, inputs=None, model=None, restore_from=None, **changes):
    """Trains by PLAN with changes; the batches before the step that it resumes at are skipped."""
    plan = dataclasses.replace(PLAN, **changes)
    config = tiny.run_config(folder, steps, plan=plan)
    config = dataclasses.replace(config, model=model or config.model, weight_metrics_every=1)
    done = max(list_checkpoints(folder), default=0) if folder.exists() else 0
    return train(config, batches[done:], evaluations=inputs, restore_from=restore_from)


def lines(folder, split="train"):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"] == split]


def assert_same_bits(one, other):
    one, other = to_flat_tree(one), to_flat_tree(other)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_t5xs_kind_of_run_equals_mesh_tensorflows_bit_for_bit(tmp_path):
    """With a denominator of all targets and float32; what T5X computes otherwise is inert then."""
    start = to_flat_tree(tiny.new_state())
    mesh = tiny.run_config(tmp_path / "mesh", 6)
    factors = {"factors": "constant", "base_learning_rate": 0.01}
    schedule = ScheduleConfig("create_learning_rate_scheduler", factors, 6)
    expected = train(mesh, BATCHES, restore_from=start)
    config = tiny.run_config(tmp_path / "t5x", 6, plan=PLAN)
    model = dataclasses.replace(config.model, loss_denominator=20.0, arithmetic=T5X)
    config = dataclasses.replace(config, model=model, schedule=schedule)
    ours = train(config, BATCHES, restore_from=start)
    assert_same_bits(ours, expected)
    losses = [row["loss"] for row in lines(tmp_path / "t5x")]
    assert losses == [row["loss"] for row in lines(tmp_path / "mesh")]


def test_a_run_that_is_stopped_and_goes_on_equals_the_undisturbed_one_bit_for_bit(tmp_path):
    model = tiny.model_config(d_model=8, d_ff=12, dropout_rate=0.3, arithmetic=T5X)
    undisturbed = planned(tmp_path / "a", 7, model=model)
    planned(tmp_path / "b", 2, model=model)
    resumed = planned(tmp_path / "b", 7, model=model)
    assert_same_bits(undisturbed, resumed)
    states = [read_run_state(tmp_path / name) for name in "ab"]
    assert [state.first_step for state in states] == [0, 2]
    assert states[0].target_tokens == states[1].target_tokens
    assert states[0].examples == states[1].examples == 28


def test_it_saves_before_the_first_step_each_period_at_chosen_steps_and_at_the_end(tmp_path):
    planned(tmp_path, 8, save=dataclasses.replace(PLAN.save, steps=(4,)))
    assert list_checkpoints(tmp_path) == [0, 3, 4, 6, 8]


def test_without_save_rules_nothing_is_saved(tmp_path):
    planned(tmp_path, 2, save=None)
    assert list_checkpoints(tmp_path) == []


def test_parameters_are_saved_in_the_rules_type_and_slots_in_float32(tmp_path):
    planned(tmp_path, 1, save=dataclasses.replace(PLAN.save, dtype="bfloat16", keep=1))
    tree = load_tree(tmp_path / "checkpoint_1")
    types = {name.partition("/")[0]: value.dtype.name for name, value in tree.items()}
    assert types["target"] == "bfloat16" and "bfloat16" not in {
        value.dtype.name for name, value in tree.items() if name.startswith("state")
    }
    assert list_checkpoints(tmp_path) == [1]


def test_summaries_are_means_over_their_steps_and_named_as_in_t5x(tmp_path):
    planned(tmp_path / "each", 7)
    planned(tmp_path / "threes", 7, stats_period=None)
    each, threes = lines(tmp_path / "each"), lines(tmp_path / "threes")
    assert [row["step"] for row in threes] == [3, 6, 7]
    for name in ("loss", "learning_rate", "weight_gradient_norm", "z_loss"):
        expected = np.mean([row[name] for row in each[:3]])
        assert threes[0][name] == pytest.approx(expected, rel=1e-6)
    expected = {
        "accuracy",
        "learning_rate/current",
        "loss_per_nonpadding_target_token",
        "non_padding_fraction/overall",
        "timing/seqs_per_second",
        "weight_rms/decoder/decoder_norm/scale",
        "weight_update_rms/encoder/layers_0/mlp/wo/kernel",
    }
    assert expected <= threes[0].keys()


def test_the_seed_decides_initial_parameters_as_t5x_splits_it(tmp_path):
    planned(tmp_path, 1)
    initial, _ = jax.random.split(jax.random.PRNGKey(3))
    expected = tiny.initial_parameters(tiny.model(), initial)["encoder"]["encoder_norm"]["scale"]
    tree = load_tree(tmp_path / "checkpoint_0")
    np.testing.assert_array_equal(tree["target/encoder/encoder_norm/scale"], expected)


# ---- Evaluations --------------------------------------------------------------------------------


def test_it_evaluates_each_period_and_at_the_end_and_before_if_asked(tmp_path, capsys):
    asked = []

    def infer_eval(trainer):
        asked.append(trainer.step)
        return {"a_task": {"rouge": 1.5}}

    inputs = Evaluations(train_eval={"a_task": BATCHES[:2]}, infer_eval=infer_eval)
    planned(
        tmp_path, 7, inputs=inputs, train_eval_data=PLAN.train_data, run_eval_before_training=True
    )
    assert asked == [0, 3, 6, 7]
    rows = lines(tmp_path, "training_eval/a_task")
    assert [row["step"] for row in rows] == [0, 3, 6, 7] and "accuracy" in rows[0]
    assert lines(tmp_path, "inference_eval/a_task")[-1]["rouge"] == 1.5
    said, last = capsys.readouterr().err.splitlines(), rows[-1]
    assert said[said.index("evaluating step 7") + 1 :][:2] == [
        f"  a_task  loss per target token {last['loss_per_target_token']:.4g}"
        f"  token accuracy {last['accuracy']:.4g}",
        "  a_task  rouge 1.5",
    ]


def test_at_total_steps_it_evaluates_only(tmp_path):
    planned(tmp_path, 3)
    inputs = Evaluations(train_eval={"a_task": BATCHES[:1]})
    state = planned(
        tmp_path, 3, inputs=inputs, train_eval_data=PLAN.train_data, run_eval_before_training=True
    )
    assert int(state.step) == 3
    assert [row["step"] for row in lines(tmp_path, "training_eval/a_task")] == [3]


def test_relative_steps_count_from_where_the_run_starts(tmp_path):
    planned(tmp_path, 3)
    assert int(planned(tmp_path, 3, relative_steps=2).step) == 5


def test_a_checkpoint_past_total_steps_is_an_error(tmp_path):
    planned(tmp_path, 3)
    with pytest.raises(UserError, match="total_steps is 2, but the checkpoint is of step 3"):
        planned(tmp_path, 2)


def test_early_stopping_ends_the_run_and_keeps_its_last_state(tmp_path):
    stopping = EarlyStoppingConfig("a_task", "rouge", "max", 2, 0.0, 0.0, "previous")
    inputs = Evaluations(infer_eval=lambda trainer: {"a_task": {"rouge": 1.0}})
    state = planned(tmp_path, 8, inputs=inputs, eval_period=2, actions={"INFER_EVAL": (stopping,)})
    assert int(state.step) == 4 and list_checkpoints(tmp_path)[-1] == 4


def test_terminate_on_nan_keeps_the_last_good_checkpoint(tmp_path):
    start = to_flat_tree(tiny.new_state())
    planned(tmp_path, 3, restore_from=start)
    path = tmp_path / "checkpoint_3"
    tree = {name: np.array(value) for name, value in load_tree(path).items()}
    tree["target/decoder/decoder_norm/scale"][0] = np.nan
    stop = TerminateOnNanConfig("train", "loss")
    state = planned(
        tmp_path / "bad", 7, restore_from=tree, actions={"TRAIN": (stop,)}, batches=BATCHES[3:]
    )
    assert int(state.step) < 7 and list_checkpoints(tmp_path / "bad") == [3]


@pytest.mark.parametrize("saves", [True, False])
def test_a_training_that_saves_nothing_does_not_say_that_it_was_saved(tmp_path, saves):
    def batches():
        for number, batch in enumerate(BATCHES):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    plan = PLAN if saves else dataclasses.replace(PLAN, save=None)
    said = []
    with pytest.raises(StoppedBySignal) as stopped:
        with heard_by(said.append):
            train(tiny.run_config(tmp_path, 8, plan=plan), batches())
    assert stopped.value.code == (PREEMPTED if saves else 128 + signal.SIGTERM)
    assert bool(list_checkpoints(tmp_path)) == saves
    assert any("and saved first" in line for line in said) == saves
    if not saves:
        assert "no checkpoint will be saved: utils.CheckpointConfig.save is None" in said
        end = "stopped by a signal, without saving: the same command continues from the start"
        assert said[-1] == end


def test_a_second_ctrl_c_leaves_the_message_to_the_command(tmp_path, request):
    # Python has none in the background of a script: its shell ignores SIGINT there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    class PressesCtrlC(Hook):
        """In the main thread between steps: in a callback of JAX's, Python drops what is raised."""

        def after_step(self, loop):
            if loop.step == 2:
                signal.raise_signal(signal.SIGINT)

    said = []

    def hear(line):
        said.append(line)
        if line.startswith("stopping: "):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), heard_by(hear):
        train(tiny.run_config(tmp_path, 8, plan=PLAN), iter(BATCHES), hooks=[PressesCtrlC()])
    assert said[-1].startswith("stopping: ")


def test_sigterm_before_the_first_step_ends_with_the_code_that_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(
        start, "lock_for_training", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, heard_by([].append):
        start.start_training(tiny.run_config(tmp_path, 8, plan=PLAN), describe=None)
    assert ended.value.code == PREEMPTED and signal.getsignal(signal.SIGTERM) == before


def test_sigterm_while_t5s_command_imports_and_checks_ends_with_the_code_that_resumes(monkeypatch):
    monkeypatch.setattr(
        t5_mesh_transformer, "_group_of", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as ended, heard_by([].append):
        t5_mesh_transformer._run_jax(None)
    assert ended.value.code == PREEMPTED
