"""Training continues behind a conversion, on either stack, as if there had been none.

Mesh TensorFlow trains to step 2; JAX continues to step 5 from that checkpoint in every format, and
Mesh TensorFlow from its own; then Mesh TensorFlow goes on to step 8 from what JAX trained, in every
format, and JAX from its own. Each continuation sees the same three batches.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.sources import load_any
from t0repro.parameters import naming

from .checkpoint_files import assert_same_bits, read_variables
from .conftest import DECODER_ONLY_BINDINGS

pytestmark = pytest.mark.mtf

STEPS = 3
FORMATS = {
    "mtf": {"to": "mtf"},
    "jax": {"to": "jax"},
    "t5x": {"to": "t5x"},
    "t5x, scanned": {"to": "t5x", "scan": True},
    "t5x, as its importer": {"to": "t5x", "t5x_importer_slots": True},
    "hf": {"to": "hf"},
}


def through(source: Path, form: str, directory: Path, to: str) -> Path:
    """The checkpoint converted to a form and from there to a format, all slots included."""
    choices = FORMATS[form]
    flags = {"t5x_importer_slots": True} if "t5x_importer_slots" in choices else {}
    convert(source, directory / form, **choices)
    convert(directory / form, directory / f"{form} to {to}", to, **flags)
    return directory / f"{form} to {to}"


class JaxStack:
    """Three steps of the JAX stack on the batches that train_mesh_tensorflow.py takes."""

    def __init__(self):
        import jax

        from t0repro.config.optimizer import AdafactorConfig, ScheduleConfig
        from t0repro.model.t5 import T5, initial_parameters
        from t0repro.training.optimizers import make_optimizer
        from t0repro.training.schedules import make_schedule
        from t0repro.training.train_state import new_train_state
        from t0repro.training.train_step import make_train_step

        from ..helpers.tiny_models import FLOAT32, model_config

        optimizer = make_optimizer(AdafactorConfig())
        config = model_config(
            num_encoder_layers=2,
            num_decoder_layers=2,
            d_model=128,
            d_ff=256,
            d_kv=64,
            vocab_size=256,
            relative_attention_num_buckets=32,
            z_loss=1e-4,
        )
        model = T5(config, FLOAT32)
        schedule = ScheduleConfig("constant_learning_rate", {"learning_rate": 0.001}, 100)
        self.step = jax.jit(make_train_step(model, optimizer, make_schedule(schedule)))
        self.fresh = jax.eval_shape(
            lambda: new_train_state(initial_parameters(model, jax.random.key(0)), optimizer)
        )

    def how_to_continue(self, tree) -> tuple[list[float], dict[str, np.ndarray]]:
        """Losses of three steps from a flat tree, and the tree after them."""
        from t0repro.training.train_state import from_flat_tree, to_flat_tree

        generator = np.random.default_rng(0)  # as `random_tokens` of train_mesh_tensorflow.py
        tokens = {
            name: generator.integers(2, 250, (16, 8)).astype(np.int32)
            for name in ("inputs", "targets")
        }
        state, losses = from_flat_tree(tree, self.fresh), []
        for n in range(STEPS):
            batch = {name: x[4 * n : 4 * n + 4] for name, x in tokens.items()}
            state, metrics = self.step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, dict(to_flat_tree(state))


@pytest.fixture(scope="module")
def runs(mesh_checkpoints, train_mesh_tensorflow, tmp_path_factory):
    """Losses and final checkpoints of all continuations, by where they started from."""
    from t0repro.training.checkpoints import save_tree

    root = tmp_path_factory.mktemp("continuation")
    source, jax_stack = mesh_checkpoints["t5_1_1"], JaxStack()
    jax_runs = {
        form: jax_stack.how_to_continue(load_any(through(source, form, root / "from_mtf", "jax")))
        for form in FORMATS
    }
    save_tree(root / "jax_trained" / "checkpoint_5", jax_runs["mtf"][1])
    jax_continues = jax_stack.how_to_continue(jax_runs["mtf"][1])
    shutil.copytree(source, root / "own")
    t5 = {"model": "t5.1.1.small"}
    jobs = {
        "own": {"model_dir": root / "own", "train_steps": 5, **t5},
        "own, converted": {
            "model_dir": through(source, "t5x, scanned", root / "own_converted", "mtf"),
            "train_steps": 5,
            **t5,
        },
    }
    for form in ("jax", "hf"):
        path = through(root / "jax_trained", form, root / "from_jax", "mtf")
        jobs[form] = {"model_dir": path, "train_steps": 8, **t5}
    shutil.copytree(mesh_checkpoints["lm_v1"], root / "lm")
    lm = {"model": "lm_v1", "bindings": DECODER_ONLY_BINDINGS, "train_steps": 4}
    jobs["lm"] = {"model_dir": root / "lm", **lm}
    path = through(root / "lm", "t5x, scanned", root / "lm_converted", "mtf")
    jobs["lm, converted"] = {"model_dir": path, **lm}
    train_mesh_tensorflow(list(jobs.values()))
    mesh = {
        name: (json.loads((job["model_dir"] / "losses.json").read_text()), job["model_dir"])
        for name, job in jobs.items()
    }
    return SimpleNamespace(
        jax=jax_runs, jax_continues=jax_continues, mesh=mesh, jax_stack=jax_stack
    )


def assert_losses_agree(ours, theirs):
    assert len(ours) == len(theirs) == STEPS
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def assert_trees_agree(ours, theirs, tolerance=1e-4):
    """Every parameter and slot: differences' RMS against the tensor's."""
    for key, array in theirs.items():
        if array.shape == (1,) and key.startswith(naming.SLOTS):
            continue  # a dummy
        rms = np.sqrt(np.mean(np.square(array, dtype=np.float64)))
        difference = np.sqrt(np.mean(np.square(ours[key].astype(np.float64) - array)))
        assert difference <= tolerance * rms, key


@pytest.mark.parametrize("form", FORMATS)
def test_jax_goes_on_from_what_mesh_tensorflow_trained_as_mesh_tensorflow_does(runs, form):
    losses, tree = runs.jax[form]
    own, directory = runs.mesh["own"]
    assert_losses_agree(losses, own)
    assert_trees_agree(tree, load_any(directory))
    # Nothing was lost on the way: not a bit differs from the shortest one.
    assert losses == runs.jax["mtf"][0]


@pytest.mark.parametrize("form", ["jax", "hf"])
def test_mesh_tensorflow_goes_on_from_what_jax_trained_as_jax_does(runs, form):
    losses, directory = runs.mesh[form]
    assert_losses_agree(losses, runs.jax_continues[0])
    assert_trees_agree(load_any(directory), runs.jax_continues[1])
    assert losses == runs.mesh["jax"][0]
    assert_same_bits(read_variables(directory), read_variables(runs.mesh["jax"][1]))


def test_without_the_slots_a_continuation_is_told_apart(runs, mesh_checkpoints):
    """The slots are alive: zeros in their place change what three steps make of the parameters."""
    tree = load_any(mesh_checkpoints["t5_1_1"])
    emptied = {
        key: np.zeros_like(x) if key.startswith(naming.SLOTS) else x for key, x in tree.items()
    }
    _, after = runs.jax_stack.how_to_continue(emptied)
    with pytest.raises(AssertionError):
        assert_trees_agree(after, runs.jax["mtf"][1])


@pytest.mark.parametrize(("model", "steps"), [("own", 3), ("lm", 2)])
def test_mesh_tensorflow_goes_on_from_a_converted_checkpoint_bit_for_bit_as_from_its_own(
    runs, model, steps
):
    (losses, directory), (converted, other) = runs.mesh[model], runs.mesh[f"{model}, converted"]
    assert len(losses) == steps
    assert losses == converted
    assert_same_bits(read_variables(directory), read_variables(other))
    assert read_variables(directory)["global_step"] == 2 + steps
