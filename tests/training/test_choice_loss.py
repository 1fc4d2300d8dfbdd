"""T-Few's losses over answer choices: values, gradients, microbatches, devices, refusals."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from t0repro.adapters import ia3
from t0repro.config.choices import ChoiceLoss
from t0repro.config.combinations import check_combinations
from t0repro.config.data import SeqioDataConfig, TrainDataConfig
from t0repro.config.run import TrainRun
from t0repro.data.choice_batches import Choices, make_choice_batch
from t0repro.errors import UserError
from t0repro.model.t5 import T5, initial_parameters
from t0repro.runs.train import train
from t0repro.training.models import EncoderDecoderModel
from t0repro.training.rematerialization import batch_shapes
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import TrainState
from t0repro.training.train_step import accumulate_grads_microbatched

from ..helpers import tiny_models as tiny

CHOICES, LENGTHS = 3, {"inputs": 6, "targets": 4}
FEW = 8  # token ids below it
PLAIN = dataclasses.replace(tiny.MODEL, z_loss=0.0)


def with_loss(model=PLAIN, **changes):
    return dataclasses.replace(model, loss_denominator=None).with_choice_loss(
        ChoiceLoss(**{"choices": CHOICES, "unlikelihood": 0.7, "length_normalized": 1.3, **changes})
    )


def examples(count=8, seed=0):
    """Examples with two or three choices of one to four tokens."""
    random = np.random.default_rng(seed)

    def tokens(least, most):
        return random.integers(2, FEW, random.integers(least, most + 1))

    return [
        Choices(tokens(2, 6), [tokens(1, 4) for _ in range(2 + number % 2)])
        for number in range(count)
    ]


@jax.jit
def logits_of_pairs(params, batch):
    return T5(PLAIN, tiny.FLOAT32).apply({"params": params}, batch)


def independent(params, rows, unlikelihood=0.7, length_normalized=1.3):
    """The losses in float64, from the logits of (input, choice) pairs, each a row of a batch."""
    pairs = [(row.inputs, choice) for row in rows for choice in row.choices]
    batch = {
        name: np.array([np.pad(pair[at], (0, LENGTHS[name] - len(pair[at]))) for pair in pairs])
        for at, name in enumerate(LENGTHS)
    }
    logits = iter(np.asarray(logits_of_pairs(params, batch), np.float64))
    right, scores, wrong = [], [], []
    for row in rows:
        of_row = []
        for number, choice in enumerate(row.choices):
            own = next(logits)[: len(choice)]
            log_p = (own - np.log(np.exp(own).sum(-1, keepdims=True)))[
                np.arange(len(choice)), choice
            ]
            of_row.append(log_p.sum() / len(choice))
            (wrong if number else right).extend(log_p)
        scores.append(np.array(of_row))
    language_model = -np.mean(right)
    chosen = np.mean([np.log(np.exp(each).sum()) - each[0] for each in scores])
    not_wrong = -np.mean(np.log(1 - np.exp(wrong) + 1e-2))
    total = language_model + length_normalized * chosen + unlikelihood * not_wrong
    return {
        "loss": total,
        "cross_ent_loss": language_model,
        "length_normalized_loss": chosen,
        "unlikelihood_loss": not_wrong,
    }


@functools.partial(jax.jit, static_argnums=(0, 3))
def gradients_of(model, params, batch, microbatches=1):
    state = TrainState(step=jax.numpy.int32(0), params=params, slots=None)
    return accumulate_grads_microbatched(model, state, batch, None, microbatches)[:2]


@pytest.fixture(scope="module")
def params():
    drawn = initial_parameters(T5(PLAIN, tiny.FLOAT32), jax.random.key(0))
    # Wrong tokens must be likely: of a new model, their probability would add nothing to see.
    kernel = drawn["decoder"]["logits_dense"]["kernel"]
    drawn["decoder"]["logits_dense"]["kernel"] = (4 * kernel).at[:, FEW:].set(0.0)
    return drawn


@pytest.mark.always
@pytest.mark.parametrize(("microbatches", "measured"), [(1, True), (4, True), (2, False)])
def test_losses_are_those_of_an_independent_implementation(params, microbatches, measured):
    rows = examples()
    expected = independent(params, rows)
    model = T5Model(T5(with_loss(), tiny.FLOAT32), measured=measured)
    _, metrics = gradients_of(
        model, params, make_choice_batch(rows, LENGTHS, CHOICES), microbatches
    )
    for name in expected if measured else ["loss"]:
        assert float(metrics[name].total) == pytest.approx(expected[name], rel=2e-6), name
    parts = expected["length_normalized_loss"], expected["unlikelihood_loss"]
    assert min(parts) > 0.05  # each one counts in the sum


def test_a_loss_that_is_switched_off_adds_nothing(params):
    rows = examples()
    model = T5Model(T5(with_loss(unlikelihood=0.0, length_normalized=0.0), tiny.FLOAT32))
    _, metrics = gradients_of(model, params, make_choice_batch(rows, LENGTHS, CHOICES))
    assert float(metrics["loss"].total) == float(metrics["cross_ent_loss"].total)


def test_room_for_more_choices_and_rows_of_padding_change_nothing(params):
    rows = examples()
    expected = independent(params, rows)
    batch = make_choice_batch(rows, {"inputs": 9, "targets": 7}, 5)
    padded = {name: np.pad(x, ((0, 2), (0, 0))) for name, x in batch.items()}
    model = T5Model(T5(with_loss(choices=5), tiny.FLOAT32))
    gradients, metrics = gradients_of(model, params, padded)
    assert float(metrics["loss"].total) == pytest.approx(expected["loss"], rel=2e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("microbatches", "kind"), [(2, T5Model), (1, EncoderDecoderModel.from_config)]
)
def test_gradients_are_finite_differences_of_the_independent_loss(params, microbatches, kind):
    rows = examples()
    batch = make_choice_batch(rows, LENGTHS, CHOICES)
    model = kind(T5(with_loss(), tiny.FLOAT32), None)
    gradients, _ = gradients_of(model, params, batch, microbatches)
    square = sum(float((g**2).sum()) for g in jax.tree.leaves(gradients))

    def loss(step):
        moved = jax.tree.map(lambda x, g: x + step * g, params, gradients)
        return independent(moved, rows)["loss"]

    step = 1e-2 / square**0.5
    assert (loss(step) - loss(-step)) / (2 * step) == pytest.approx(square, rel=2e-3)


ON_FOUR = """
import sys
from pathlib import Path
from t0repro.config.model import Layout
from tests.training import test_choice_loss as t
for name, layout in (("four", Layout(data=2, model=2)), ("sharded", Layout(fully_sharded=True))):
    t.trained(Path(sys.argv[1]) / name, layout=layout)
"""


def trained(model_dir, **changes):
    """The losses of three steps on one batch, in which some examples have fewer choices."""
    changes = {"model": with_loss(), "num_microbatches": 2, "batch_size": 8, **changes}
    config = tiny.run_config(model_dir, 3, **changes)
    train(config, 3 * [make_choice_batch(examples(), LENGTHS, CHOICES)], seed=3)
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in lines if "loss" in row]


def test_microbatches_and_devices_train_alike(tmp_path):
    expected = trained(tmp_path / "one")
    assert len(expected) == 3 and expected[2] < expected[0]
    assert trained(tmp_path / "whole", num_microbatches=1) == pytest.approx(expected, rel=1e-5)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_FOUR, str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    for name in ("four", "sharded"):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found = [row["loss"] for row in lines if "loss" in row]
        assert found == pytest.approx(expected, rel=1e-5)


def test_scanned_layers_dropout_and_bfloat16_train(tmp_path):
    model = with_loss(
        dataclasses.replace(PLAIN, num_decoder_layers=3, dropout_rate=0.1, scan_layers=True)
    )
    assert all(np.isfinite(trained(tmp_path, model=model, dtypes=tiny.BFLOAT16)))


def test_the_compiled_step_has_the_shapes_of_the_batches():
    config = tiny.run_config("", 1, model=with_loss(), batch_size=8, sequence_length=LENGTHS)
    expected = {n: x.shape for n, x in make_choice_batch(examples(), LENGTHS, CHOICES).items()}
    assert batch_shapes(config) == expected


# ---- Refusals ------------------------------------------------------------------------------------


def test_a_divisor_of_the_users_is_refused():
    averaged = dataclasses.replace(PLAIN, loss_denominator="AVERAGE_PER_SEQUENCE")
    with pytest.raises(UserError, match="AVERAGE_PER_SEQUENCE") as refused:
        averaged.with_choice_loss(ChoiceLoss(), "here")
    assert refused.value.where == "here"
    assert with_loss().loss_denominator == "NUM_REAL_TARGET_TOKENS"


@pytest.mark.parametrize(
    "change", [{"pack": True}, {"use_cached": True}, {"num_shards": 2}], ids=lambda x: next(iter(x))
)
def test_data_that_has_no_choices_is_refused(change):
    data = TrainDataConfig("a", "train", False, False, True, 1, None, 0, False)
    config = tiny.run_config("", 1, model=with_loss())
    plan = dataclasses.replace(config.plan, train_data=data)
    check_combinations(dataclasses.replace(config, plan=plan))
    plan = dataclasses.replace(plan, train_data=dataclasses.replace(data, **change))
    with pytest.raises(UserError, match=next(iter(change))):
        check_combinations(dataclasses.replace(config, plan=plan))


def test_data_whose_features_are_passed_through_have_no_choices():
    data = SeqioDataConfig("a", LENGTHS, "train", batch_size=1, shuffle=True, seed=0)
    config = tiny.run_config("", 1, model=with_loss())
    plan = dataclasses.replace(config.plan, train_data=data)
    check_combinations(dataclasses.replace(config, plan=plan))
    passed = dataclasses.replace(data, converter="pass_through")
    plan = dataclasses.replace(plan, train_data=passed)
    with pytest.raises(UserError, match="feature_converter_cls"):
        check_combinations(dataclasses.replace(config, plan=plan))


def test_a_run_with_a_loss_over_choices_survives_json():
    config = tiny.run_config("", 1, model=with_loss().with_adapter(ia3()))
    assert TrainRun.from_json(config.to_json()) == config
