"""Which activations a training computes again where nobody says so: as few as its devices allow.

What is kept of the forward pass changes memory and time, and results by rounding alone. So T0's
command for 11B fits the v3-512 that it names, though its gin files ask for no recomputation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from t0repro.config.memory import assumed_length
from t0repro.config.run_config import Recompute, RunConfig
from t0repro.model.blocks import is_scanned
from t0repro.model.t5 import T5
from t0repro.parameters.layout import LAYERS, layer_name
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.processes import from_first
from t0repro.partitioning.topologies import GIB
from t0repro.runs.compile_ahead import train_shapes
from t0repro.runs.step_memory import bytes_per_device, kept_activations
from t0repro.training.held_state import held_shapes
from t0repro.training.optimizers import make_optimizer

# Compilers need up to a tenth more than what is counted (docs/scaling.md), and a step that
# recomputes a little needlessly costs less than one that does not fit.
_IN_ALL = 1.1


def decided(
    config: RunConfig, partitioning: Partitioning, memory: int | None
) -> tuple[RunConfig, str]:
    """The run with a policy of recomputation, and a line that says why; "" if there is no news.

    Args:
      config: a run; returned as it is unless it trains and `model.recompute` is None.
      partitioning: its devices.
      memory: bytes that programs may take on a device; None if that is not known.
    """
    if config.mode != "train" or config.model.recompute is not None:
        return config, ""

    def least() -> tuple[Recompute | None, str]:
        """The first policy with which a step fits, and why it is not `none`."""
        if memory is None:
            return None, ""
        everything = step_bytes(_recomputing(config, "none"), partitioning)
        if _IN_ALL * everything <= memory:
            return "none", ""
        minimal = step_bytes(_recomputing(config, "minimal"), partitioning)
        way: Recompute = "minimal" if _IN_ALL * minimal <= memory else "full"
        return way, (
            f"recompute: {way!r}, since a step that keeps all activations takes about"
            f" {everything / GIB:.2f} GiB of a device's {memory / GIB:.2f} GiB"
        )

    # All processes must run one program. Of another process's device the memory may not be known,
    # and limits may differ by some bytes.
    way, why = from_first(least)
    return _recomputing(config, way), why


def step_bytes(config: RunConfig, partitioning: Partitioning) -> int:
    """About how many bytes a train step needs on a device, counted on shapes.

    These are the parameters, the slots, the sums of gradients, what the forward pass keeps, and the
    copies of kernels that layers in a loop read. docs/scaling.md has how near compilers come.
    """
    assert config.optimizer is not None, "a training has an optimizer"
    model, optimizer = T5(config.model, config.dtypes), make_optimizer(config.optimizer)
    state = partitioning.divided(held_shapes(model, optimizer))
    shapes = train_shapes(config, lambda feature: assumed_length(config, feature))
    parts = [kept_activations(config, partitioning, shapes), bytes_per_device(state.params)]
    # With one microbatch, gradients take the place of activations that are not needed any more.
    meanwhile = sum(parts) if config.num_microbatches > 1 else max(parts)
    return bytes_per_device(state) + meanwhile + _copied(config, state.params)


def _copied(config: RunConfig, parameters: Any) -> int:
    """Bytes of the copies of kernels that layers in a loop read, see `blocks.Tower`."""
    model, dtype = config.model, jnp.dtype(config.dtypes.activation)
    towers = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    kernels: list[Any] = []
    for name, count in towers.items():
        if name not in parameters or not is_scanned(model, count):
            continue
        tower = parameters[name]
        if LAYERS not in tower:  # stacked in each step
            layers = [tower[layer_name(index)] for index in range(count)]
            kernels += [x for x in jax.tree.leaves(layers) if x.ndim > 1]
        elif dtype != jnp.float32:
            kernels += [x for x in jax.tree.leaves(tower[LAYERS]) if x.ndim > 2]
    return bytes_per_device(kernels) * dtype.itemsize // jnp.dtype(jnp.float32).itemsize


def _recomputing(config: RunConfig, way: Recompute | None) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, recompute=way))
