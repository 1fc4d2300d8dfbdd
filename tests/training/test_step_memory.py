"""Gradients and activations of a step are counted on shapes, as the compiler comes to hold them."""

import dataclasses

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from t0repro.config.model import Layout
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import Partitioning, choose
from t0repro.runs.programs import train_programs
from t0repro.training.optimizers import make_optimizer
from t0repro.training.rematerialization import batch_shapes, step_memory
from t0repro.training.train_state import stacked_shapes

from ..helpers.tiny_models import BFLOAT16, model_config, run_config

MODEL = model_config(
    num_encoder_layers=4, num_decoder_layers=4, d_model=32, d_ff=64, num_heads=4, d_kv=8
)
TRAINING = run_config(
    "unused",
    10,
    model=MODEL,
    batch_size=32,
    num_microbatches=2,
    sequence_length={"inputs": 64, "targets": 32},
)


def training(**changes):
    """A training run with some changes to the model and to the run."""
    of_model = {name: changes.pop(name) for name in list(changes) if hasattr(MODEL, name)}
    model = dataclasses.replace(MODEL, **of_model)
    return dataclasses.replace(TRAINING, model=model, **changes)


def held(run, devices):
    """A run's state as its trainer holds it and its batch, by their shapes, and the devices."""
    shapes = stacked_shapes(T5(run.model, run.dtypes), make_optimizer(run.optimizer))
    return devices.shapes_with_shardings(shapes), batch_shapes(run), devices


def counted(data=1, shared_by=1, fully_sharded=False, **changes):
    """The memory of a training step on so many devices, none of which is there."""
    types = (AxisType.Auto,) * 2
    mesh = AbstractMesh((data, shared_by), ("data", "model"), axis_types=types)
    run, devices = training(**changes), Partitioning(mesh, fully_sharded, mesh.size)
    return step_memory(run, *held(run, devices))


@pytest.fixture(scope="module")
def looped():
    """Compiled steps whose layers are one body in a loop, by what is recomputed."""

    def compiled(way):
        run = training(recompute=way, scan_layers=True, num_microbatches=1)
        devices = choose(Layout(), run.model, devices=jax.devices()[:1])
        (program,) = train_programs(run, devices)
        return program

    return {way: compiled(way) for way in ("none", "full")}


def test_gradients_are_one_float32_array_for_each_parameter():
    assert counted(dtypes=BFLOAT16).gradients == 4 * MODEL.shape.parameter_count()


@pytest.mark.parametrize("scan_layers", [False, True])
def test_what_is_recomputed_is_not_kept(scan_layers):
    ways = ("none", "minimal", "full", "offload")
    kept = {way: counted(recompute=way, scan_layers=scan_layers).activations for way in ways}
    # In a loop, what is cheap is not kept in any way.
    assert kept["none"] > (1.5 if scan_layers else 2) * kept["minimal"] > 2 * kept["full"]
    assert kept["offload"] == kept["full"], "what is kept in the host's memory takes none here"


def test_the_compilers_figure_falls_by_what_is_not_kept(looped):
    none, full = looped["none"], looped["full"]
    saved = none.by_shapes.activations - full.by_shapes.activations
    assert none.memory.total - full.memory.total == pytest.approx(saved, rel=0.2)


def test_half_a_microbatch_keeps_half_the_activations():
    whole, half = counted(num_microbatches=2), counted(num_microbatches=4)
    # Half, except for what does not grow with the rows.
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.01)
    assert half.gradients == whole.gradients


def test_devices_that_divide_a_batch_keep_their_rows():
    alone, four = counted(), counted(data=4)
    assert four.activations == pytest.approx(alone.activations / 4, rel=0.01)
    assert four.gradients == alone.gradients
    sharded = counted(data=4, fully_sharded=True)
    assert sharded.activations == four.activations
    assert sharded.gradients < four.gradients / 3


def test_devices_that_share_a_model_keep_their_heads_and_d_ff():
    alone, two = counted(), counted(shared_by=2)
    # The residual stream is whole on both.
    assert alone.activations / 2 < two.activations < alone.activations
    assert two.gradients < 0.6 * alone.gradients


def test_kernels_that_a_loop_over_layers_stacks_are_no_activations():
    wide = dict(d_ff=4096, num_microbatches=32, recompute="full", scan_layers=True)
    assert counted(**wide).activations < counted(**wide).gradients / 8


def test_the_parts_of_a_step_add_up_to_its_total(looped):
    for program in looped.values():
        assert sum(program.parts.values()) == program.memory.total
        assert min(program.parts.values()) >= 0
        assert program.parts["gradients"] == program.by_shapes.gradients
