"""The two stacks compute the same thing from the same gin parameters.

A T5 1.1 with d_model = heads * d_kv = 128 (every attention kernel square, every matrix factored
by Adafactor), packed batches in four microbatches; of the slow tests, a T5 1.0, tied, unpacked,
with the rsqrt schedule and label smoothing. The tolerances are the project's definition of
agreement.
"""

import re

import numpy as np
import pytest

from t0repro.converters.sources import load_any
from t0repro.reports.comparison import compare_runs
from t0repro.reports.run import Run

from .conftest import losses

pytestmark = [pytest.mark.mtf, pytest.mark.always]

FIRST_STEP, ALL_STEPS = 1e-5, 1e-4  # relative difference of losses
# A tensor's elements: within 1e-5 of its RMS, or of the element itself where that is larger. The
# second moment of a frequent token is 150 times the RMS of its slot, and float32 ends at 6e-8.
TENSOR = 1e-5
PER_TOKEN = 1e-4  # absolute difference of a log-likelihood, for each target token


def assert_losses_agree(mtf, jax):
    reference, ours = losses(mtf), losses(jax)
    assert reference.keys() == ours.keys() and len(ours) > 1
    relative = {step: abs(ours[step] - reference[step]) / abs(reference[step]) for step in ours}
    assert relative[min(ours)] <= FIRST_STEP
    assert max(relative.values()) <= ALL_STEPS, relative


def assert_trees_agree(mtf, jax, step):
    reference, ours = load_any(mtf, step), load_any(jax, step)
    assert reference.keys() == ours.keys()
    for name, expected in reference.items():
        expected = expected.astype(np.float64)
        rms = np.sqrt(np.mean(np.square(expected)))
        np.testing.assert_allclose(ours[name], expected, TENSOR, TENSOR * rms, err_msg=name)


def test_the_loss_of_the_first_step_agrees_to_1e_5(twenty_steps):
    mtf, jax = (losses(run)[1] for run in twenty_steps)
    assert abs(jax - mtf) / mtf <= FIRST_STEP


def test_every_parameter_and_slot_after_one_step_agrees_to_1e_5_of_its_rms(twenty_steps):
    assert_trees_agree(*twenty_steps, step=1)


def test_square_and_rectangular_kernels_have_live_factored_slots(twenty_steps):
    slots = load_any(twenty_steps[1], 1)
    for kernel in ("encoder/layers_0/attention/query", "encoder/layers_0/mlp/wi_0"):
        for slot in ("v_row", "v_col"):
            values = slots[f"state/param_states/{kernel}/kernel/{slot}"]
            assert values.ndim == 1 and values.size > 1 and np.all(values > 0)


def test_twenty_packed_steps_with_microbatches_agree_to_1e_4(twenty_steps):
    assert_losses_agree(*twenty_steps)


def test_more_steps_from_mesh_tensorflows_slots_at_step_10_agree(stacks, twenty_steps):
    start = f"run.init_checkpoint = '{twenty_steps[0]}/model.ckpt-10'"
    mtf = stacks.train("mtf", "mtf_from_10", 15, start)
    jax = stacks.train("jax", "jax_from_10", 15, start)
    assert sorted(losses(jax)) == list(range(11, 16))
    assert_losses_agree(mtf, jax)


@pytest.mark.slow  # a minute; tests/training/test_mesh_parity.py compares such a model
def test_t5_1_0_tied_unpacked_with_rsqrt_and_label_smoothing_agrees(stacks):
    settings = {
        "model": "models/t5.1.0.small.gin",
        "schedule": ("learning_rate_schedules/rsqrt_no_ramp_down.gin",),
    }
    # GELU for T5 1.0's ReLU: among the 10^7 pre-activations of 20 steps some lie within rounding of
    # zero, where ReLU's derivative jumps. Mesh TensorFlow's own runs then part by 6e-4.
    params = (
        "d_model = 128", "d_ff = 256", "num_layers = 2", "num_heads = 4", "d_kv = 32",
        "mesh_train_dataset_fn.pack = False", "decoder/Unitransformer.label_smoothing = 0.1",
        "DenseReluDense.activation = 'gelu'",
    )  # fmt: skip
    mtf = stacks.train("mtf", "mtf_1_0", 20, *params, **settings)
    start = f"run.init_checkpoint = '{mtf}/model.ckpt-0'"
    assert_losses_agree(mtf, stacks.train("jax", "jax_1_0", 20, *params, start, **settings))


def test_all_log_likelihoods_of_an_evaluation_agree_and_so_do_the_predictions(
    stacks, twenty_steps, tmp_path
):
    model_dir = twenty_steps[0]
    comparison = compare_runs(
        *(Run(stack, stacks.score(stack, model_dir, tmp_path / stack)) for stack in ("mtf", "jax")),
        same_pairs=True,
    )
    assert comparison.pairs >= 32
    assert comparison.worst.max_difference_per_token <= PER_TOKEN
    assert comparison.flipped == 0
    assert comparison.worst_metric[0] == 0


def last_loss_line(said):
    """Step and loss of the last line of progress."""
    line = re.findall(r"step (\d+) of 20, loss ([\d.]+) per target token, .*target tokens/s", said)
    return line[-1]


def test_both_stacks_print_the_loss_per_target_token_in_one_line_format(stacks, twenty_steps):
    lines = [last_loss_line(stacks.said[model_dir]) for model_dir in twenty_steps]
    (step, mtf), (our_step, jax) = ((int(step), float(loss)) for step, loss in lines)
    assert step == our_step == 20
    # As closely as the losses agree, and the last of the four digits that are printed.
    assert abs(jax - mtf) <= ALL_STEPS * mtf + 1e-4
    # Mesh TensorFlow's own loss is a mean over padding too.
    assert mtf > losses(twenty_steps[0])[20]
