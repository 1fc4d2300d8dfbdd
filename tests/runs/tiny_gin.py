"""A tiny T5 1.1 in T5X's gin files, on the demo's vocabulary and tasks, and its checkpoints."""

from __future__ import annotations

import jax

from t0repro.config.t5x.gin_files import T5xInputs, parse
from t0repro.model.t5 import T5, initial_parameters
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.training.checkpoints import save_tree

MODEL = "t5x/examples/t5/t5_1_1/tiny.gin"
SIZES = (
    "network.T5Config.vocab_size = 1408",
    "network.T5Config.dtype = 'float32'",
    "seqio.SentencePieceVocabulary.extra_ids = 100",
    f"seqio.SentencePieceVocabulary.sentencepiece_model_file = '{VOCABULARY}'",
)


def parsed(run_mode, run_file, *bindings, files=()):
    """The program that a run file, the tiny model, further files and bindings configure."""
    files = (MODEL, f"t5x/configs/runs/{run_file}.gin", *files)
    return parse(T5xInputs(run_mode, files, (*SIZES, "DROPOUT_RATE = 0.0", *bindings)))


def save_checkpoint(folder, plan, step, seed=0):
    """A checkpoint of random parameters for a plan's model."""
    import flax.traverse_util
    import numpy as np

    params = initial_parameters(T5(plan.model, plan.dtypes), jax.random.key(seed))
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    tree = {f"target/{name}": np.asarray(value) for name, value in flat.items()}
    save_tree(folder / f"checkpoint_{step}", {**tree, "state/step": np.int32(step)})
    return folder / f"checkpoint_{step}"
