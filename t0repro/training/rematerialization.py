"""What a train step holds on a device, by its shapes, and what it rematerializes so that it fits.

Where nothing binds a policy, a step rematerializes as little as its devices' memory allows. The
policy changes memory and time, and results by rounding alone. So T0's command for 11B fits the
v3-512 that it names, though its gin files ask for no rematerialization.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.run_config import ModelConfig, Recompute, RunConfig
from t0repro.model.blocks import is_scanned
from t0repro.model.t5 import T5, parameter_shapes
from t0repro.parameters.naming import LAYERS, layer_name
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.memory import Memory, assumed_length
from t0repro.partitioning.processes import from_first, is_alone
from t0repro.partitioning.program_costs import bytes_per_device, residual_bytes
from t0repro.partitioning.topologies import GIB
from t0repro.training.models import T5Model
from t0repro.training.optimizers import make_optimizer
from t0repro.training.train_step import held_shapes
from t0repro.training.trainer import BaseTrainer

# Compilers need up to a tenth more than what is counted (docs/scaling.md), and a step that
# recomputes a little needlessly costs less than one that does not fit.
_IN_ALL = 1.1
_FROM_LEAST: tuple[Recompute, ...] = ("none", "minimal")


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
        needed: dict[Recompute, int] = {}
        way: Recompute = "full"
        for tried in _FROM_LEAST:
            needed[tried] = step_bytes(_recomputing(config, tried), partitioning)
            if _IN_ALL * needed[tried] <= memory:
                way = tried
                break
        return way, "" if way == "none" else (
            f"recompute: {way!r}, since a step that keeps all activations takes about"
            f" {needed['none'] / GIB:.2f} GiB of a device's {memory / GIB:.2f} GiB"
        )

    # All processes must run one program. Of another process's device the memory may not be known,
    # and limits may differ by some bytes.
    way, why = from_first(least)
    return _recomputing(config, way), why


def step_bytes(config: RunConfig, partitioning: Partitioning) -> int:
    """About how many bytes a train step needs on a device; docs/scaling.md compares compilers."""
    memory = step_memory(config, partitioning)
    if config.num_microbatches > 1:
        return memory.total
    # With one microbatch, gradients take the place of activations that are no longer needed.
    return memory.total - min(memory.gradients, memory.activations)


def step_memory(config: RunConfig, partitioning: Partitioning) -> Memory:
    """What a train step holds on a device, counted on shapes; nothing is compiled.

    Temporaries are the copies of kernels that scanned layers read.
    """
    assert config.optimizer is not None, "a training run has an optimizer"
    model, optimizer = T5(config.model, config.dtypes), make_optimizer(config.optimizer)
    state = partitioning.divided(held_shapes(model, optimizer))
    shapes = train_shapes(config, lambda feature: assumed_length(config, feature))
    activations = _kept_activations(config, partitioning, shapes)
    copied = _copied(config, state.params)
    parameters, slots = bytes_per_device(state.params), bytes_per_device(state.slots)
    return Memory(
        parameters=parameters,
        slots=slots,
        gradients=parameters,  # float32, like the parameters
        activations=activations,
        temporaries=copied,
        other=bytes_per_device(state) - parameters - slots,
    )


def _kept_activations(
    config: RunConfig, partitioning: Partitioning, features: Mapping[str, tuple[int, int]]
) -> int:
    """Bytes that one device keeps of a microbatch's forward pass.

    Traced for one device's rows and its share of the model, outside of any device mesh. So what the
    model decides by the size of a device's arrays (attention in blocks, logits in parts) is as in
    the step, whose arrays are larger by as much as the device mesh divides them.

    Args:
      config: A training run.
      partitioning: Its devices.
      features: Shapes [rows, length] of the features of a full batch.
    """
    model = T5(_share(config.model, partitioning.model), config.dtypes)
    parts = config.num_microbatches * partitioning.data
    batch = {
        name: jax.ShapeDtypeStruct((-(-rows // parts), length), jnp.int32)
        for name, (rows, length) in features.items()
    }

    def loss(parameters: Any, drawn: Any) -> Any:
        whole, of_batch = T5Model(model, measured=False).whole_batch(drawn[0])
        return of_batch(parameters, whole, drawn[1])

    # Dropout's masks are as large as the batch and belong to it, though only the key decides them.
    drawn = (batch, jax.eval_shape(lambda: jax.random.key(0)))
    return residual_bytes(loss, parameter_shapes(model), drawn)


def _share(model: ModelConfig, parts: int) -> ModelConfig:
    """The model with the heads, d_ff and vocabulary of which one device holds a shard.

    Each is divisible, or the devices would not have been arranged so (`devices.check_divides`).
    """
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // parts,
        d_ff=model.d_ff // parts,
        vocab_size=model.vocab_size // parts,
    )


def _copied(config: RunConfig, parameters: Any) -> int:
    """Bytes of the copies of kernels that scanned layers read, see `blocks.Tower`."""
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


# ---- Compiling while the first batch is made -----------------------------------------------------


def train_shapes(config: RunConfig, length: Callable[[str], int]) -> dict[str, tuple[int, int]]:
    """The shapes of what the model reads of a training batch, by feature.

    Args:
      config: a configuration of mode "train".
      length: gives the length of `inputs` and of `targets`.
    """
    data = config.plan.train_data
    names = ["targets"] if config.model.decoder_only else ["inputs", "targets"]
    if data is not None and data.pack:
        names += [f"{name}_segmentation" for name in names]
    return {name: (config.batch_size, length(name.split("_")[0])) for name in names}


@contextlib.contextmanager
def compiled_beside(trainer: BaseTrainer, config: RunConfig) -> Iterator[None]:
    """Compiles the train step in a thread, for the shapes that the configuration tells.

    Batches of other shapes have a step compiled for them when they come, as without this. Leaving
    the block waits for the compilation.
    """
    lengths = config.sequence_length or {}
    known = {"inputs", "targets"} <= lengths.keys() and not config.model.decoder_only
    # Several processes must do all that concerns them together in the same order.
    if not known or not is_alone():
        yield
        return
    shapes = train_shapes(config, lambda feature: lengths[feature])
    example = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}

    def compile_step() -> None:
        # An update with such a batch meets the error again, where it can be reported.
        with contextlib.suppress(Exception):
            trainer.prepare_train(example)

    thread = threading.Thread(target=compile_step, name="compile")
    thread.start()
    try:
        yield
    finally:
        thread.join()
