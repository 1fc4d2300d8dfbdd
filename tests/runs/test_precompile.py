"""What a run's steps need is said before anything is allocated, by the compiler of the devices."""

import dataclasses

import jax
import pytest

from t0repro.config.model import Layout
from t0repro.partitioning.collectives import counts
from t0repro.partitioning.devices import choose
from t0repro.partitioning.memory import Memory
from t0repro.partitioning.topologies import devices_of
from t0repro.runs.fitting import adjust_run, remedies
from t0repro.runs.precompile import describe_program, precompile
from t0repro.runs.programs import Program, evaluation_programs, train_programs

from ..helpers.tiny_models import BFLOAT16, eval_run, model_config, run_config

MODEL = model_config(d_model=128, d_ff=256, num_heads=4, d_kv=32, vocab_size=1024)
TRAINING = run_config(
    "unused",
    10,
    model=MODEL,
    batch_size=32,
    num_microbatches=4,
    sequence_length={"inputs": 64, "targets": 32},
)


def test_the_bytes_of_a_training_on_one_device_are_those_of_its_arrays(tmp_path):
    devices = jax.devices()[:1]
    (program,) = train_programs(TRAINING, choose(Layout(), MODEL, devices=devices))
    shapes = MODEL.shape.parameters()
    assert program.memory.parameters == 4 * MODEL.shape.parameter_count()
    factored = [shape for shape in shapes.values() if len(shape) > 1 and min(shape) >= 8]
    whole = MODEL.shape.parameter_count() - sum(a * b for a, b in factored)
    assert program.memory.slots >= 4 * sum(a + b for a, b in factored)
    assert program.memory.slots <= 4 * (sum(a + b for a, b in factored) + whole)
    assert program.memory.gradients > 0 and not program.communication and program.sent == 0


def test_a_run_is_described_and_its_programs_saved(tmp_path):
    lines = list(precompile(TRAINING, jax.devices()[:1], None, tmp_path))
    assert lines[0] == "devices: 1 x cpu"
    (memory,) = [line for line in lines if "memory of a device" in line]
    # Each figure by itself, in the order in which they are held.
    names = ("parameters", "slots", "gradients", "activations", "temporaries", "other")
    places = [memory.index(name) for name in names]
    assert places == sorted(places)
    assert any("operations" in line for line in lines)
    assert "ENTRY" in (tmp_path / "train.hlo.txt").read_text()


@pytest.mark.parametrize(("temporaries", "said"), [(100, False), (80, True)])
def test_an_account_beyond_the_compilers_figure_is_said_beside_it(temporaries, said):
    by_shapes = Memory(40, 8, gradients=30, activations=60)
    memory = by_shapes.compiled(temporaries, other=0)
    program = Program("train", memory, by_shapes, "", 8, communication=(), seconds=0.0, hlo="")
    devices = choose(Layout(), MODEL, devices=jax.devices()[:1])
    lines = list(describe_program(program, TRAINING, devices, None))
    of_both = "gradients are 30 bytes and activations 60 bytes"
    assert any(of_both in line for line in lines) == said


def test_scoring_and_generation_are_compiled_too():
    evaluation = eval_run(TRAINING)
    programs = evaluation_programs(evaluation, choose(Layout(), MODEL, devices=jax.devices()[:1]))
    assert {program.name: program.memory.slots for program in programs} == {
        "encode": 0,
        "decode": 0,
        "generate": 0,
    }


def test_what_would_make_it_fit_is_what_has_not_been_done():
    partitioning = choose(Layout(), MODEL, devices=jax.devices()[:1])
    text = "; ".join(remedies(TRAINING, partitioning))
    assert "recompute" in text and "more microbatches than 4" in text
    recomputing = dataclasses.replace(MODEL, recompute="full")
    done = dataclasses.replace(TRAINING, model=recomputing, num_microbatches=32)
    assert remedies(done, partitioning) == ["use devices with more memory"]


def test_an_adjusted_layout_follows_the_devices():
    run = dataclasses.replace(TRAINING, layout=Layout(64, 8, topology="v3-512"))
    assert adjust_run(run, 2, True).layout == Layout(None, 2, fully_sharded=True)
    assert adjust_run(run, num_microbatches=8).num_microbatches == 8
    assert adjust_run(run) == run


# ---- With libtpu's compiler ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def v3():
    return devices_of("v3-8")


@pytest.mark.tpu
def test_a_training_compiles_for_a_tpu_slice(v3):
    devices, chip = v3
    run = dataclasses.replace(TRAINING, dtypes=BFLOAT16, layout=Layout(4, 2))
    partitioning = choose(run.layout, MODEL, rows=8, devices=devices)
    (program,) = train_programs(run, partitioning)
    # Every parameter but norms and position bias is halved.
    assert 0.5 <= program.memory.parameters / (4 * MODEL.shape.parameter_count()) < 0.51
    assert 0 < program.memory.total < chip.memory
    found = counts(program.communication)
    # No parameter is gathered, and no gradient is added up before the last microbatch is done:
    # all that is exchanged in the loop stays among the two devices that share a model.
    assert set(found) == {"all-reduce", "all-reduce in loop"}
    assert {item.group for item in program.communication if item.in_loop} == {2}
    assert {item.times for item in program.communication if item.in_loop} == {4}


@pytest.mark.tpu
def test_a_batch_too_large_for_the_slice_says_by_how_much_and_what_helps(v3):
    devices, chip = v3
    run = dataclasses.replace(
        TRAINING,
        batch_size=65536,
        num_microbatches=1,
        sequence_length={"inputs": 512, "targets": 64},
    )
    lines = list(precompile(dataclasses.replace(run, layout=Layout(model=2)), devices, chip))
    (fit,) = [line for line in lines if "fit" in line]
    assert "does not fit" in fit and "GiB too much" in fit
    assert "more microbatches than 1" in fit and "model parallelism 4 instead of 2" in fit
    assert not [line for line in lines if "sends" in line], "there is no program to read that from"
