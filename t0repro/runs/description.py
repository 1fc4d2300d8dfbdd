"""config.gin and model-info.txt, the files in which a T5X run describes itself."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import numpy as np

from t0repro.config.run import InferenceRun
from t0repro.converters.finding import list_checkpoints
from t0repro.model.t5 import T5, parameter_shapes
from t0repro.parameters import naming
from t0repro.partitioning.devices import Partitioning, choose
from t0repro.progress import say
from t0repro.storage import is_file, join, make_folder, write_atomically
from t0repro.training.run_state import RUN_STATE_FILE
from t0repro.training.train_state import TrainState

# The sizes in the table of parameters, as T5X's network names its logical axes.
_LOGICAL_AXES = {
    "d_model": "embed",
    "d_ff": "mlp",
    "joined_kv": "joined_kv",
    "num_heads": "heads",
    "vocab_size": "vocab",
    "relative_attention_num_buckets": "relpos_buckets",
}


def describe_training(
    model_dir: str, gin_text: str, state: TrainState, partitioning: Partitioning
) -> None:
    """Writes both files into model_dir; model-info.txt lists the optimizer's slots too.

    Args:
      model_dir: The run's folder.
      gin_text: The configuration.
      state: Shapes are enough.
      partitioning: The run's devices.
    """
    _write(model_dir, gin_text, model_info(state, partitioning))


def is_of_a_run(folder: str) -> bool:
    """Whether a training run has the folder, whose files say how its checkpoints compute."""
    found = is_file(join(folder, RUN_STATE_FILE)) or bool(list_checkpoints(folder))
    if found:
        say(f"note: {folder} is a training run's; its config.gin and model-info.txt stay")
    return found


def describe_inference(plan: InferenceRun, gin_text: str) -> None:
    """Writes both files into the output folder of an evaluation or inference.

    Raises:
      UserError: If the available devices cannot be arranged as the run's layout asks.
    """
    model = T5(plan.model, plan.dtypes)
    parameters = parameter_shapes(model)
    step = jax.ShapeDtypeStruct((), np.int32)
    partitioning = choose(plan.layout, plan.model, where="partitioning.PjitPartitioner")
    state = TrainState(step=step, params=parameters, slots={})  # pyright: ignore[reportArgumentType]
    _write(plan.output_dir, gin_text, model_info(state, partitioning))


def _write(folder: str, gin_text: str, info: str) -> None:
    make_folder(folder)
    write_atomically(os.path.join(folder, "config.gin"), gin_text)
    write_atomically(os.path.join(folder, "model-info.txt"), info)


def model_info(state: TrainState, partitioning: Partitioning) -> str:
    """A line per array: its name, size, shape by logical axes, and the mesh axis that shards each.

    Parameters come first, then their total number, an empty line, and the rest of the state.

    Args:
      state: Shapes are enough.
      partitioning: The devices of the run.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    shapes = [tuple(leaf.shape) for _, leaf in flat]
    specs = [sharding.spec for sharding in jax.tree.leaves(partitioning.shardings(state))]
    rows = sorted(zip(names, shapes, specs, strict=True))
    parameters, others = [], []
    for name, shape, spec in rows:
        if name.startswith("params/"):
            parameters.append(_line(name.removeprefix("params/"), shape, spec))
        else:
            # T5X's name of the optimizer's state.
            others.append(_line(name.replace("slots/", "param_states/", 1), shape, spec))
    total = sum(math.prod(shape) for name, shape, _ in rows if name.startswith("params/"))
    lines = [*parameters, f"Total number of parameters: {total}", "", *others]
    return "\n".join(lines) + "\n"


def _line(name: str, shape: tuple[int, ...], spec: Any) -> str:
    row = naming.find_row(name, "t5x") or naming.find_row(name, "t5x", decoder_only=True)
    # A slot has no row: T5X names no logical axes for factored slots either.
    axes = [_LOGICAL_AXES[size] for size in row[0].axes] if row else []
    named = [f"{axis}={size}" for axis, size in zip(axes, shape, strict=True)] if axes else []
    described = f"({', '.join(named)})" if named else str(shape)
    divided = (*spec, *[None] * (len(shape) - len(spec)))  # a short spec leaves later axes whole
    return (
        f"Variable    {name:<80} size {math.prod(shape):<12} shape {described:<40}"
        f" partition spec {divided}"
    )
