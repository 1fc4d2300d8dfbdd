"""The JAX core runs on a machine that has jax, flax, optax and orbax and nothing of the rest."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest

from t0repro.config.model import Layout
from t0repro.evaluation import engine
from t0repro.model.t5 import T5, initial_parameters
from t0repro.training import token_losses as losses

from .helpers import tiny_models as tiny

TESTS = Path(__file__).resolve().parent

WITHOUT_THEM = '''
import sys

ABSENT = {
    "tensorflow", "seqio", "gin", "mesh_tensorflow", "t5", "clu", "jaxtyping", "promptsource",
    "datasets", "torch", "dacite",
}

class WithoutThem:
    """A finder that finds no package of ABSENT, as on a machine that lacks them."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ABSENT:
            return self.finder.find_spec(name, path, target)

sys.meta_path = [WithoutThem(finder) for finder in sys.meta_path]
sys.path.insert(0, sys.argv.pop(1))
'''

# Trains, saves, continues from the checkpoint and scores, by the modules that commands run through.
CORE = """
import helpers.tiny_models as tiny
from t0repro.evaluation.engine import score_examples
from t0repro.runs.train import train

model_dir = sys.argv[1]
for last_step in (1, 2):
    state = train(tiny.run_config(model_dir, last_step), tiny.batches(1))
examples = [{"inputs": [5, 6, 1], "targets": [7, 1]}, {"inputs": [5, 6, 1], "targets": [8, 1]}]
scores = score_examples(state.params, tiny.model(), examples, None)
assert int(state.step) == 2 and scores.shape == (2,) and (scores < 0).all(), (state.step, scores)
"""


def test_the_core_trains_resumes_and_scores_without_tensorflow_seqio_gin_and_clu(tmp_path):
    command = [sys.executable, "-P", "-c", WITHOUT_THEM + CORE, str(TESTS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def entry(folder, script, *arguments):
    """What a script of scripts/bench prints where only jax, flax, optax and orbax are."""
    path = str(TESTS.parent / "scripts" / "bench" / script)
    run = f"import runpy; runpy.run_path({path!r}, run_name='__main__')"
    command = [sys.executable, "-P", "-c", WITHOUT_THEM + run, str(TESTS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_entry_for_accelerators_times_steps_without_them(tmp_path):
    """From a TrainRun's JSON and batches in an .npz; dacite, which reads such JSON, is absent."""
    (tmp_path / "run.json").write_text(tiny.run_config(tmp_path, 3).to_json())
    batches = tiny.batches(3)
    arrays = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    np.savez(tmp_path / "batches.npz", **arrays)
    found = entry(tmp_path, "train_step.py", "run.json", "batches.npz", "--steps=2")
    assert np.isfinite(found["loss"]) and found["rate"] == found["flops"] / found["step"] > 0


def test_the_entry_for_accelerators_times_scoring_without_them(tmp_path):
    """From a TrainRun's JSON and the lengths of an evaluation's texts in an .npz."""
    config = tiny.run_config(tmp_path, 3, layout=Layout(model=2))
    (tmp_path / "run.json").write_text(config.to_json())
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "suite.npz",
        inputs=generator.integers(1, 60, 40).astype(np.uint16),
        targets=generator.integers(1, 6, 100).astype(np.uint16),
        input_of=np.sort(generator.integers(0, 40, 100)).astype(np.uint32),
    )
    found = entry(tmp_path, "score_step.py", "run.json", "suite.npz", "--tokens_per_batch=256")
    assert found["pairs"] == found["of"] == 100
    assert found["suite"] == pytest.approx(found["seconds"])
    assert found["compiled_later"] == 0 < found["programs"]
    assert found["rate"] == 100 / found["seconds"]
    # With no time for a second batch, the rest is extrapolated.
    part = entry(
        *(tmp_path, "score_step.py", "run.json", "suite.npz"),
        *("--tokens_per_batch=256", "--seconds=0"),
    )
    assert part["pairs"] < 100 and part["suite"] > part["seconds"]


MODEL = tiny.model()
TOKENS = np.ones((2, 3), np.int32)
ROW = np.ones(3, np.int32)
WRONG_SHAPES = {
    "engine": lambda params: engine.read_texts(MODEL, params, ROW, TOKENS, TOKENS),
    "loss": lambda _: losses.cross_entropy(np.zeros((2, 3, 4), np.float32), ROW),
    "model": lambda params: MODEL.apply({"params": params}, ROW, TOKENS, method=T5.encode),
}


@pytest.mark.parametrize("module", WRONG_SHAPES)
def test_shapes_are_checked_in_the_modules_that_products_run_through(module):
    params = initial_parameters(MODEL, jax.random.key(0))
    with pytest.raises(jaxtyping.TypeCheckError):
        WRONG_SHAPES[module](params)
