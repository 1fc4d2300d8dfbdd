"""A train step's memory per device, from its shapes, and the rematerialization that makes it fit.

If nothing binds a policy, a step rematerializes as little as its devices' memory allows. The policy
changes memory and time, and results by rounding alone. This makes T0's command for 11B fit the
v3-512 that it names, although its gin files set no rematerialization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t0repro.config.model import ModelConfig, Recompute
from t0repro.config.run import TrainRun
from t0repro.model.t5 import T5, adapter_shapes, frozen_shapes, parameter_shapes
from t0repro.model.towers import is_scanned
from t0repro.parameters.naming import LAYERS, layer_name
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.memory import ASSUMED_LENGTH, Memory
from t0repro.partitioning.processes import broadcast_from_first
from t0repro.partitioning.topologies import GIB
from t0repro.training.residuals import bytes_per_device, residual_bytes
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import TrainState

# Compilers need up to a tenth more than this estimate (docs/scaling.md), and recomputing a little
# needlessly costs less than a step that does not fit.
IN_ALL = 1.1
_FROM_LEAST: tuple[Recompute, ...] = ("none", "minimal")


def choose_remat(
    config: TrainRun,
    stacked: TrainState,
    features: Mapping[str, tuple[int, int]],
    partitioning: Partitioning,
    memory: int | None,
) -> tuple[TrainRun, str]:
    """The run with a rematerialization policy, and a line that says why; "" if nothing was chosen.

    Args:
      config: a training run; returned as it is unless `model.recompute` is None.
      stacked: shapes of the state as its trainer holds it (`stack_state`).
      features: shapes of a batch (`batch_shapes`).
      partitioning: its devices.
      memory: bytes that programs may take on a device; None if that is not known.
    """
    if config.model.recompute is not None:
        return config, ""

    def least() -> tuple[Recompute | None, str]:
        """The first policy with which a step fits, and why it is not `none`."""
        if memory is None:
            return None, ""
        state, needed = partitioning.shapes_with_shardings(stacked), dict[Recompute, int]()
        # Nothing keeps less, so it is chosen without asking whether the step fits.
        way: Recompute = "full"
        for tried in _FROM_LEAST:
            needed[tried] = step_bytes(_set_remat(config, tried), state, features, partitioning)
            if IN_ALL * needed[tried] <= memory:
                way = tried
                break
        return way, "" if way == "none" else (
            f"recompute: {way!r}, since a step that keeps all activations takes about"
            f" {needed['none'] / GIB:.2f} GiB of a device's {memory / GIB:.2f} GiB"
        )

    # All processes must run one program. A process may not know the memory of another's device, and
    # limits may differ by some bytes.
    way, why = broadcast_from_first(least)
    return _set_remat(config, way), why


def step_bytes(
    config: TrainRun,
    state: TrainState,
    features: Mapping[str, tuple[int, int]],
    partitioning: Partitioning,
) -> int:
    """Approximate bytes a train step needs on a device; docs/scaling.md compares with compilers.

    For arguments see `step_memory`.
    """
    memory = step_memory(config, state, features, partitioning)
    if config.num_microbatches > 1:
        return memory.total
    # With one microbatch, gradients reuse the memory of activations that are no longer needed.
    return memory.total - min(memory.gradients, memory.activations)


def step_memory(
    config: TrainRun,
    state: TrainState,
    features: Mapping[str, tuple[int, int]],
    partitioning: Partitioning,
) -> Memory:
    """A train step's memory on a device, computed from shapes; nothing is compiled.

    Temporaries are the copies of kernels that scanned layers read.

    Args:
      config: a training run.
      state: shapes of the state as its trainer holds it, with their shardings.
      features: shapes of a batch (`batch_shapes`).
      partitioning: its devices.
    """
    copied = _copied_bytes(config, state.params if state.frozen is None else state.frozen)
    trained, slots = bytes_per_device(state.params), bytes_per_device(state.slots)
    parameters = trained + bytes_per_device(state.frozen)
    return Memory(
        parameters=parameters,
        slots=slots,
        gradients=trained,  # float32, like the parameters
        activations=_measure_saved_activations(config, features, partitioning),
        temporaries=copied,
        other=bytes_per_device(state) - parameters - slots,
    )


def batch_shapes(run: TrainRun) -> dict[str, tuple[int, int]]:
    """The shapes [rows, length] of the features that a training run's model reads from a batch.

    Exact if the lengths of inputs and targets are bound; else see ASSUMED_LENGTH.
    """
    data, rows = run.plan.train_data, run.batch_size
    assumed = {"inputs": ASSUMED_LENGTH, "targets": ASSUMED_LENGTH}
    lengths = {**assumed, **(run.sequence_length or {})}
    inputs, targets = lengths["inputs"], lengths["targets"]
    if (loss := run.model.choice_loss) is not None:
        shapes = dict.fromkeys(("targets", "targets_segmentation"), (rows, loss.choices * targets))
        return {"inputs": (rows, inputs), **shapes}
    converter = run.plan.converter
    if converter == "decoder":
        targets = sum((run.sequence_length or assumed).values())
    elif converter == "pass_through":
        passed = passed_through_lengths(run)
        inputs = passed.get("encoder_input_tokens") or ASSUMED_LENGTH
        targets = passed["decoder_target_tokens"] or ASSUMED_LENGTH
    shapes = {"targets": (rows, targets)}
    if not run.model.decoder_only:
        shapes = {"inputs": (rows, inputs), **shapes}
    if data is not None and data.pack:
        shapes |= {f"{name}_segmentation": shape for name, shape in shapes.items()}
    if converter != "encoder_decoder":
        shapes["loss_weights"] = shapes["targets"]
    if converter == "decoder" and run.model.input_full_attention:
        shapes["full_attention"] = shapes["targets"]
    return shapes


def passed_through_lengths(run: TrainRun) -> dict[str, int | None]:
    """Tokens in a row of the features that a task itself gives to a model; None if unbound.

    No length is applied to them, but the run's settings have lengths for what the task reads.
    """
    bound = run.sequence_length or {}
    read = {"decoder_target_tokens": ("inputs", "targets")}
    if not run.model.decoder_only:
        read = {"encoder_input_tokens": ("inputs",), "decoder_target_tokens": ("targets",)}
    return {
        feature: bound.get(feature) or sum(bound.get(part, 0) for part in parts) or None
        for feature, parts in read.items()
    }


def _measure_saved_activations(
    config: TrainRun, features: Mapping[str, tuple[int, int]], partitioning: Partitioning
) -> int:
    """Bytes that one device keeps from a microbatch's forward pass for the backward pass.

    Args:
      config: A training run.
      features: Shapes [rows, length] of the features of a full batch.
      partitioning: Its devices.
    """
    # One device's share, outside of any mesh: what the model decides by the size of a device's
    # arrays (attention in blocks, logits in slices) is then as in the real step.
    model = T5(_share(config.model, partitioning.model), config.dtypes)
    parts = config.num_microbatches * partitioning.data
    batch = {
        name: jax.ShapeDtypeStruct((-(-rows // parts), length), jnp.int32)
        for name, (rows, length) in features.items()
    }

    def loss(parameters: Any, drawn: Any) -> Any:
        params, frozen = parameters
        # The base has no gradients, so nothing is saved for them.
        state = TrainState(jnp.int32(0), params, None, frozen=jax.lax.stop_gradient(frozen))
        full_batch, loss_fn = T5Model(model, measured=False).whole_batch(drawn[0])
        return loss_fn(state.parameters_of(model.config), full_batch, drawn[1])

    # Dropout masks are as large as the batch, so count them with it, though they depend on the key
    # only.
    drawn = (batch, jax.eval_shape(lambda: jax.random.key(0)))
    trained = parameter_shapes(model), None
    if model.config.adapter is not None:
        trained = adapter_shapes(model), frozen_shapes(model)
    return residual_bytes(loss, trained, drawn)


def _share(model: ModelConfig, parts: int) -> ModelConfig:
    """The model with the heads, d_ff and vocabulary of which one device holds a shard."""
    adapter = model.adapter
    if adapter is not None:
        # A shard may have a smaller side than its kernel.
        sides = (model.num_heads * model.d_kv // parts, model.d_ff // parts)
        adapter = dataclasses.replace(adapter, rank=min(adapter.rank, *sides))
    # All of these divide evenly, or `devices.check_divides` would have refused the layout.
    return dataclasses.replace(
        model,
        adapter=adapter,
        num_heads=model.num_heads // parts,
        d_ff=model.d_ff // parts,
        vocab_size=model.vocab_size // parts,
    )


def _copied_bytes(config: TrainRun, parameters: Any) -> int:
    """Bytes of the kernel copies that scanned layers read, see `towers.Tower`."""
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
        else:
            kernels += [
                x for x in jax.tree.leaves(tower[LAYERS]) if x.ndim > 2 and x.dtype != dtype
            ]
    held = config.model.adapter.base_dtype if config.model.adapter else "float32"
    return bytes_per_device(kernels) * dtype.itemsize // jnp.dtype(held).itemsize


def _set_remat(config: TrainRun, way: Recompute | None) -> TrainRun:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, recompute=way))
