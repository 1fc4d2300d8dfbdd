"""The memory estimate of a run: what it counts, and when a run is refused."""

import dataclasses

import jax
import pytest

from t0repro.errors import UserError
from t0repro.model.t5 import T5
from t0repro.partitioning import memory
from t0repro.training.optimizers import make_optimizer
from t0repro.training.train_state import state_shapes

from ..config.test_mtf_gin import load
from ..helpers.tiny_models import eval_run

pytestmark = pytest.mark.mtf


@pytest.fixture(scope="module")
def run():
    return load()


def test_parameters_and_gradients_are_four_bytes_each(run):
    found = memory.estimate(run)
    assert found.parameters == found.gradients == 4 * run.model.shape.parameter_count()


@pytest.mark.parametrize(
    "binding",
    [
        "",
        "AdafactorOptimizer.beta1 = 0.9",
        "AdafactorOptimizer.factored = False",
        "AdafactorOptimizer.min_dim_size_to_factor = 16",
        "run.optimizer = @optimize.AdamWeightDecayOptimizer",
        "run.optimizer = @optimize.MomentumOptimizer\nMomentumOptimizer.momentum = 0.9",
        "run.optimizer = @optimize.SgdOptimizer",
    ],
)
def test_slots_are_counted_as_the_optimizer_makes_them(binding):
    run = load(*binding.splitlines())
    made = state_shapes(T5(run.model, run.dtypes), make_optimizer(run.optimizer)).slots
    in_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    assert (
        memory.estimate(run).slots
        == memory.slot_bytes(run.model.shape.parameters(), run.optimizer)
        == in_bytes
    )


def test_evaluation_keeps_neither_gradients_nor_all_layers(run):
    evaluation = memory.estimate(eval_run(run))
    assert evaluation.gradients == evaluation.slots == 0
    assert evaluation.activations < memory.estimate(run).activations


def test_evaluation_holds_parameters_in_the_type_of_activations(run):
    evaluation = eval_run(run)
    dtypes = dataclasses.replace(run.dtypes, activation="bfloat16")
    half = memory.estimate(dataclasses.replace(evaluation, dtypes=dtypes))
    assert 2 * half.parameters == memory.estimate(evaluation).parameters


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


def test_an_estimate_beyond_the_compilers_figure_is_cut_to_it():
    by_shapes = memory.Memory(40, 8, gradients=30, activations=60)

    def parts(temporaries):
        found = by_shapes.compiled(temporaries, other=5)
        assert found.total == 40 + 8 + temporaries + 5
        return found.gradients, found.activations, found.temporaries

    assert parts(100) == (30, 60, 10)
    assert parts(80) == (30, 50, 0)
    assert parts(20) == (20, 0, 0)


def test_what_fits_says_so_and_what_cannot_fit_is_refused(run):
    needed = memory.estimate(run)
    assert memory.check_fits(run, 10**12, 10**12).endswith("it fits.")
    assert "may not fit" in memory.check_fits(run, 10**12, needed.total - 1)
    large = dataclasses.replace(run, batch_size=2**31 - 1)
    with pytest.raises(UserError, match="A batch of 2,147,483,647 rows"):
        memory.check_fits(large, 10**10, 10**10)
    with pytest.raises(UserError, match="does not fit into memory") as error:
        memory.check_fits(run, needed.certain - 1, needed.certain - 1)
    assert error.value.where and error.value.fix
