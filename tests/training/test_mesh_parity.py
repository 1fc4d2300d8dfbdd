"""The JAX core against Mesh TensorFlow's own graphs, tensor by tensor, at PARITY's tolerances."""

import flax.traverse_util
import jax
import numpy as np
import pytest

from t0repro.model.layers import relative_position_bucket
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training.optimizers import make_optimizer
from t0repro.training.schedules import make_schedule
from t0repro.training.train_state import from_flat_tree, new_train_state, to_flat_tree
from t0repro.training.train_step import loss_and_gradients, make_train_step

from ..helpers.plain_scoring import row_scores
from ..helpers.tiny_models import FLOAT32
from . import mesh_reference as reference

pytestmark = [pytest.mark.mtf, pytest.mark.always]

OPTIMIZER = make_optimizer(reference.ADAFACTOR)


@pytest.fixture(scope="session")
def mesh_runs(once):
    """Everything that Mesh TensorFlow computes for this module, in one process of its own."""
    folder = once("mesh_parity", reference.run_cases, *reference.SOURCES)
    return reference.read_cases(folder)


@pytest.fixture(params=reference.CASES, ids=lambda case: case.name, scope="module")
def case(request):
    return request.param


@pytest.fixture(scope="module")
def run(case, mesh_runs):
    return mesh_runs[case.name]


@pytest.fixture(scope="module")
def start(case, run):
    """The state that Mesh TensorFlow started from."""
    model = T5(case.model, FLOAT32)
    fresh = jax.eval_shape(
        lambda: new_train_state(initial_parameters(model, jax.random.key(0)), OPTIMIZER)
    )
    tree = reference.flat_tree(run, "initial", case.start_step)
    return from_flat_tree(tree, fresh)


@pytest.fixture(scope="module")
def batches(case):
    """The case's batches without positions, which the model does not read."""
    return [
        {name: x for name, x in batch.items() if not name.endswith("_position")}
        for batch in case.batches()
    ]


@pytest.fixture(scope="module")
def steps(case, start, batches):
    """Losses, learning rates and the states after the first and the last step."""
    model = T5(case.model, FLOAT32)
    step = jax.jit(
        make_train_step(
            model,
            OPTIMIZER,
            make_schedule(case.schedule),
            num_microbatches=case.num_microbatches,
        )
    )
    state, first, values = start, None, []
    for batch in batches:
        state, metrics = step(state, batch)
        first = first or state
        values.append(jax.device_get(metrics))
    return {
        "losses": np.array([value["loss"] for value in values]),
        "learning_rates": np.array([value["learning_rate"] for value in values]),
        "first": to_flat_tree(first),
        "last": to_flat_tree(state),
    }


def test_first_loss_agrees_to_1e_5(run, steps):
    np.testing.assert_allclose(steps["losses"][0], run["losses"][0], rtol=1e-5)


def test_twenty_losses_agree_to_1e_4(run, steps):
    assert len(run["losses"]) == 20
    np.testing.assert_allclose(steps["losses"], run["losses"], rtol=1e-4)


def test_learning_rates_agree(run, steps):
    np.testing.assert_allclose(steps["learning_rates"], run["learning_rates"], rtol=1e-6)


def test_parameters_and_slots_after_one_step_agree_to_1e_5_of_their_rms(case, run, steps):
    expected = reference.flat_tree(run, "first", case.start_step + 1)
    ours = {
        name: x
        for name, x in steps["first"].items()
        if name in expected or x.shape != (1,)  # (1,) stands for a slot that is not used
    }
    assert sorted(ours) == sorted(expected)
    assert any(name.endswith("/v_row") for name in ours), "no slot of this model is factored"
    for name, x in ours.items():
        rms = root_mean_square(expected[name])
        difference = x.astype(np.float64) - expected[name]
        assert root_mean_square(difference) <= 1e-5 * rms, name
        if name.startswith("target/"):
            # Of slots, which hold squares, a few entries are many times their RMS, and float32's
            # rounding of those is all of the tolerance: theirs is the line above.
            assert np.max(np.abs(difference)) <= 1e-5 * rms, name


def root_mean_square(x):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))


def test_gradients_agree_to_1e_5_of_their_norm(case, run, start, batches):
    model = T5(case.model, FLOAT32)
    _, gradients = jax.jit(
        lambda params, batch: loss_and_gradients(
            model, params, batch, num_microbatches=case.num_microbatches
        )
    )(start.params, batches[0])
    expected = reference.flat_tree(run, "gradients", 0)
    for path, ours in flax.traverse_util.flatten_dict(gradients, sep="/").items():
        theirs = expected[f"target/{path}"]
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs), path


def test_scores_agree_to_1e_4_a_token(case, run, start, batches):
    # Some targets are negative here, which rank evaluation refuses; its engine is compared with
    # row_scores in tests/evaluation.
    scores = row_scores(start.params, T5(case.model, FLOAT32), batches[0])
    tokens = np.count_nonzero(batches[0]["targets"] > 0, axis=-1)
    assert np.all(np.abs(scores - run["scores"]) <= 1e-4 * tokens)


def test_score_logits_agree(case, run, start, batches):
    batch = {name: batches[0][name] for name in ("inputs", "targets")}
    logits = jax.jit(T5(case.model, FLOAT32).apply)({"params": start.params}, batch)
    np.testing.assert_allclose(logits, run["score_logits"], atol=1e-5)


@pytest.mark.parametrize("way", ["bidirectional", "causal"])
def test_relative_position_buckets_are_those_of_mesh_tensorflow_up_to_2048(mesh_runs, way):
    offsets = np.arange(-2048, 2049, dtype=np.int32)
    ours = relative_position_bucket(offsets, bidirectional=way == "bidirectional")
    np.testing.assert_array_equal(ours, mesh_runs["buckets"][way])
