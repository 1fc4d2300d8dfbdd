"""If nothing is bound, a training run rematerializes as little as its devices allow."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from t0repro.model.t5 import T5
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.topologies import GIB, chip_of
from t0repro.progress import heard_by
from t0repro.runs import train as training
from t0repro.training import rematerialization
from t0repro.training.optimizers import make_optimizer
from t0repro.training.rematerialization import batch_shapes, choose_remat, step_bytes
from t0repro.training.train_state import stacked_shapes

from ..helpers.tiny_models import BFLOAT16, model_config, run_config

MODEL = model_config(num_encoder_layers=2, num_decoder_layers=2, d_ff=64)
RUN = run_config(
    "unused", 4, model=MODEL, batch_size=8, sequence_length={"inputs": 64, "targets": 32}
)
# T0's command: 1,024 rows on 512 devices, data 64 and model 8.
T0 = run_config(
    "unused",
    1_112_200,
    batch_size=1024,
    sequence_length={"inputs": 1024, "targets": 256},
    dtypes=BFLOAT16,
)
SIZES = {
    "3B": (8, dict(d_model=2048, d_ff=5120, num_heads=32)),
    "11B": (16, dict(d_model=4096, d_ff=10240, num_heads=64)),
}


def devices(data=1, model=1):
    """So many devices, none of which is there."""
    mesh = AbstractMesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return Partitioning(mesh, False, mesh.size)


def step_in(run, around):
    """What decides: the run's state as its trainer holds it, its batch, and the devices."""
    held = stacked_shapes(T5(run.model, run.dtypes), make_optimizer(run.optimizer))
    return held, batch_shapes(run), around


def bytes_of(run, around):
    held, features, _ = step_in(run, around)
    return step_bytes(run, around.shapes_with_shardings(held), features, around)


def recomputing(way, run=RUN):
    return dataclasses.replace(run, model=dataclasses.replace(run.model, recompute=way))


def test_the_first_policy_that_fits_is_taken():
    kinds = {way: bytes_of(recomputing(way), devices()) for way in ("none", "minimal", "full")}
    assert kinds["none"] > kinds["minimal"] > kinds["full"]
    roomy = int(1.12 * kinds["none"])
    assert choose_remat(RUN, *step_in(RUN, devices()), roomy) == (recomputing("none"), "")
    for memory, way in (
        # What is not counted needs room, too.
        (kinds["none"], "minimal"),
        (kinds["minimal"], "full"),
        # The compiler says of the smallest step there is whether it fits.
        (1, "full"),
    ):
        run, why = choose_remat(RUN, *step_in(RUN, devices()), memory)
        assert run == recomputing(way)
        assert why.startswith(f"recompute: {way!r}, since a step that keeps all activations")


def test_who_says_what_is_recomputed_gets_that_and_a_machine_of_unknown_memory_keeps_everything():
    for way in ("none", "minimal", "full", "offload"):
        assert choose_remat(recomputing(way), *step_in(RUN, devices()), 1) == (recomputing(way), "")
    assert choose_remat(RUN, *step_in(RUN, devices()), None) == (RUN, "")


def test_the_first_process_decides_for_all(monkeypatch):
    # What it decided is handed to one that knows nothing of its device, as JAX tells no process of
    # others' devices.
    monkeypatch.setattr(
        rematerialization, "broadcast_from_first", lambda value: ["minimal", "a line"]
    )
    assert choose_remat(RUN, *step_in(RUN, devices()), None) == (recomputing("minimal"), "a line")


@pytest.mark.parametrize(("size", "way"), [("3B", "none"), ("11B", "minimal")])
def test_t0s_commands_fit_the_slice_that_they_name(size, way):
    """What libtpu's compiler says of them is in docs/scaling.md: 5.28 and 13.93 GiB."""
    microbatches, shape = SIZES[size]
    model = model_config(
        num_encoder_layers=24, num_decoder_layers=24, d_kv=64, vocab_size=32128,
        dropout_rate=0.1, **shape,
    )  # fmt: skip
    run = dataclasses.replace(T0, model=model, num_microbatches=microbatches)
    memory = chip_of("v3-512").memory
    found, why = choose_remat(run, *step_in(run, devices(64, 8)), memory)
    assert found.model.recompute == way
    assert ("15.48 GiB" in why) == (way != "none")
    by_compiler = {"3B": 5.28, "11B": 13.93}[size] * GIB
    assert bytes_of(found, devices(64, 8)) == pytest.approx(by_compiler, rel=0.05)


def test_a_training_on_a_small_device_recomputes_says_so_and_has_the_same_losses(
    tmp_path, monkeypatch
):
    def trained(name, memory):
        monkeypatch.setattr(Partitioning, "memory", memory)
        run, lines = dataclasses.replace(RUN, model_dir=str(tmp_path / name)), []
        draw = np.random.default_rng(0)
        tokens = {
            feature: draw.integers(2, 100, (8, length), np.int32)
            for feature, length in RUN.sequence_length.items()
        }
        with heard_by(lines.append):
            state = training.train(run, [tokens] * 4)
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return lines, [json.loads(line)["loss"] for line in metrics if "loss" in line], state

    lines, losses, state = trained("small", 1)
    assert any(line.startswith("recompute: 'full'") for line in lines)
    without, expected, whole = trained("large", None)
    assert not any(line.startswith("recompute") for line in without)
    assert losses == pytest.approx(expected, rel=1e-6) and len(losses) == 4
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        state.params,
        whole.params,
    )
