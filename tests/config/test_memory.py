"""The memory estimate of a run: what it counts, and when a run is refused."""

import dataclasses

import pytest

from t0repro.config import memory
from t0repro.errors import UserError

from .test_mtf_gin import load

pytestmark = pytest.mark.mtf


@pytest.fixture(scope="module")
def run():
    return load()


def test_parameters_and_gradients_are_four_bytes_each_and_adafactors_slots_nothing(run):
    found = memory.estimate(run)
    assert found.parameters == found.training == 4 * run.model.shape.parameter_count()


def test_evaluation_keeps_neither_gradients_nor_all_layers(run):
    evaluation = memory.estimate(dataclasses.replace(run, mode="score_eval"))
    assert evaluation.training == 0
    assert evaluation.activations < memory.estimate(run).activations


def test_evaluation_holds_parameters_in_the_type_of_activations(run):
    evaluation = dataclasses.replace(run, mode="score_eval")
    dtypes = dataclasses.replace(run.dtypes, activation="bfloat16")
    half = memory.estimate(dataclasses.replace(evaluation, dtypes=dtypes))
    assert 2 * half.parameters == memory.estimate(evaluation).parameters


def test_momentum_and_adam_add_slots(run):
    adam = load("run.optimizer = @optimize.AdamWeightDecayOptimizer")
    momentum = load("AdafactorOptimizer.beta1 = 0.9")
    parameters = memory.estimate(run).parameters
    assert memory.estimate(adam).training == 3 * parameters
    assert memory.estimate(momentum).training == 2 * parameters


def test_microbatches_and_recomputation_need_less(run):
    more = dataclasses.replace(run, num_microbatches=4)
    model = dataclasses.replace(run.model, recompute="full")
    for smaller in (more, dataclasses.replace(run, model=model)):
        assert memory.estimate(smaller).activations < memory.estimate(run).activations


def test_attention_of_long_inputs_is_counted_in_blocks(run):
    def activations(length):
        lengths = {"inputs": length, "targets": 16}
        return memory.estimate(dataclasses.replace(run, sequence_length=lengths)).activations

    assert activations(1 << 15) < 2.1 * activations(1 << 14)


def test_what_fits_says_so_and_what_cannot_fit_is_refused(run):
    needed = memory.estimate(run)
    assert memory.check_fits(run, 10**12, 10**12).endswith("it fits.")
    assert "may not fit" in memory.check_fits(run, 10**12, needed.total - 1)
    with pytest.raises(UserError, match="does not fit into memory") as error:
        memory.check_fits(run, needed.certain - 1, needed.certain - 1)
    assert error.value.where and error.value.fix
