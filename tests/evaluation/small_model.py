"""A T5 of one layer, small enough to compile many shapes of it in a test."""

import dataclasses
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np

from t0repro.adapters import Adapter
from t0repro.converters.adapter_files import AdapterNote
from t0repro.evaluation.opened import open_checkpoint
from t0repro.model.t5 import T5, initial_parameters
from t0repro.parameters.shape import ModelShape
from t0repro.training.checkpoints import save_tree

from ..helpers.tiny_models import FLOAT32, model_config

VOCABULARY = 1408  # the demo's pieces, padded to a multiple of 128

CONFIG = model_config(
    d_model=8, d_ff=12, num_decoder_layers=2, dropout_rate=0.5, label_smoothing=0.1, z_loss=0.1
)
MODEL = T5(CONFIG, FLOAT32)


def small_parameters():
    return initial_parameters(MODEL, jax.random.key(0))


def save_model(folder, seed=0, step=7, vocabulary=VOCABULARY, spoil=None):
    """Writes a JAX checkpoint of random parameters; `spoil` may change its tensors."""
    config = dataclasses.replace(CONFIG, vocab_size=vocabulary)
    model = T5(config, FLOAT32)
    params = initial_parameters(model, jax.random.key(seed))
    tree = {
        f"target/{path}": np.array(value)
        for path, value in flax.traverse_util.flatten_dict(params, sep="/").items()
    }
    if spoil:
        spoil(tree)
    save_tree(folder / f"checkpoint_{step}", {**tree, "state/step": np.int32(step)})
    return folder


STEP = 4  # of an adapter


def save_adapter(folder: Path, adapter: Adapter, base: Path, shape: ModelShape) -> Path:
    """Writes an adapter far from a new one, as a run does; returns its checkpoint."""
    generator = np.random.default_rng(len(folder.name))
    path = folder / f"checkpoint_{STEP}"
    own = {
        f"target/{name}": (0.3 * generator.normal(size=size) + (len(size) == 1)).astype("f")
        for name, size in adapter.parameter_shapes(shape).items()
    }
    save_tree(path, {**own, "state/step": np.int32(STEP)})
    digest = open_checkpoint(str(base), None, "float32").digest
    AdapterNote(adapter, str(base), digest).write(path)
    return path
