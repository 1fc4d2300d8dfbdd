"""A run's memory on a device.

The breakdown, which every command prints, has three sources, each more exact than the one before:

    estimate            the configuration alone; needs no JAX
    rematerialization   activations counted from the shapes of the traced step (training)
    compiled            the compiler's own figure for a program (runs/precompile)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from t0repro.config.model import ModelConfig
from t0repro.config.optimizer import MultiOptimizerConfig, OptaxConfig, OptimizerConfig
from t0repro.config.run import Run, TrainRun
from t0repro.errors import UserError
from t0repro.words import counted, sized

ATTENTION_BLOCK_BYTES = 1 << 26
"""Maximum bytes of attention logits that JAX holds at a time for a layer on a device."""

_FLOAT32 = 4
ASSUMED_LENGTH = 512  # tokens assumed for a feature with no bound length


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters: Parameters: float32, or in the activations' dtype in a run that only evaluates.
      slots: The optimizer's slots, float32; 0 outside training.
      gradients: One float32 array per trained parameter, sharded like it; 0 outside training.
      activations: Values that a microbatch's forward pass saves for its backward pass.
      temporaries: A program's further needs; 0 in an estimate.
      other: Batches, results and the program itself; 0 in an estimate.
    """

    parameters: int
    slots: int = 0
    gradients: int = 0
    activations: int = 0
    temporaries: int = 0
    other: int = 0

    @property
    def certain(self) -> int:
        """Bytes needed for any batch size."""
        return self.parameters + self.slots + self.gradients

    @property
    def total(self) -> int:
        """All bytes."""
        return self.certain + self.activations + self.temporaries + self.other

    def compiled(self, temporaries: int, other: int) -> Memory:
        """The breakdown with a compiler's figure in place of the estimate.

        A compiler reports one figure for a program's peak memory besides its arguments. The
        estimate may exceed it there. With one microbatch, gradients reuse the memory of activations
        that are no longer needed, and an update may consume each gradient as it is computed. A
        compiler may also rematerialize cheap values, or keep them in on-chip memory, as libtpu does
        in small models. So each byte counts once: first as gradients, with which every backward
        pass ends, then as activations, then as temporaries.

        Args:
          temporaries: Bytes that the program needs besides its arguments and results.
          other: Bytes of batches, results and the program itself.
        """
        gradients = min(self.gradients, temporaries)
        activations = min(self.activations, temporaries - gradients)
        rest = temporaries - gradients - activations
        return Memory(self.parameters, self.slots, gradients, activations, rest, other)


def estimate(run: Run, devices: int = 1) -> Memory:
    """Estimates the memory that a run needs on each of `devices` devices, activations included."""
    parallel = run.layout
    # A single device holds everything, whatever the layout.
    model = parallel.model if devices > 1 else 1
    data = devices // model
    # How many times smaller one device's shard of the parameters is than the whole.
    shards = model * (data if parallel.fully_sharded else 1)
    trains = isinstance(run, TrainRun)
    optimizer, microbatches = (run.optimizer, run.num_microbatches) if trains else (None, 1)
    bytes_each = 2 if run.dtypes.activation == "bfloat16" else _FLOAT32
    count, adapter = run.model.shape.parameter_count(), run.model.adapter
    parameters = count * (_FLOAT32 if trains else bytes_each) // shards
    trained, slots = parameters, slot_bytes(run.model.shape.parameters(), optimizer) // shards
    if adapter is not None:
        sizes = adapter.parameter_shapes(run.model.shape)
        trained, slots = _FLOAT32 * sum(map(math.prod, sizes.values())), 0
        parameters = count * (2 if adapter.base_dtype == "bfloat16" else _FLOAT32) // shards
        parameters, slots = parameters + trained, slot_bytes(sizes, optimizer)
    # Rows of a microbatch on one device, rounded up.
    rows = -(-run.batch_size // (microbatches * max(1, data)))
    choices = run.model.choice_loss.choices if run.model.choice_loss else 1
    return Memory(
        parameters=parameters,
        slots=slots,
        gradients=trained if trains else 0,
        activations=_activations(
            run.model,
            rows,
            assumed_length(run, "inputs"),
            choices * assumed_length(run, "targets"),
            bytes_each=bytes_each,
            keep_all=trains and not run.model.recomputes,
        ),
    )


def slot_bytes(sizes: Mapping[str, tuple[int, ...]], optimizer: OptimizerConfig | None) -> int:
    """Bytes of the float32 slots that an optimizer keeps for parameters of these shapes, unsharded.

    Optimizers given as optax transformations count as having none: only optax knows their state,
    which a traced or compiled step counts.
    """
    if optimizer is None or isinstance(optimizer, OptaxConfig):
        return 0
    if isinstance(optimizer, MultiOptimizerConfig):
        return sum(
            slot_bytes({path: sizes[path] for path in part.paths}, part.optimizer)
            for part in optimizer.parts
        )
    return _FLOAT32 * sum(
        math.prod(slot)
        for path, shape in sizes.items()
        if path not in optimizer.frozen
        for slot in optimizer.slot_shapes(path, shape).values()
    )


def assumed_length(run: Run, feature: str) -> int:
    """Tokens per row of a feature; a guess if no length is bound."""
    return (run.sequence_length or {}).get(feature, ASSUMED_LENGTH)


def _activations(
    model: ModelConfig, rows: int, inputs: int, targets: int, *, bytes_each: int, keep_all: bool
) -> int:
    """Approximate bytes of the activations that are in memory at the same time.

    Counts, for each layer and token, the residual stream and its norms, the four projections of the
    attention, the feed-forward layer, and the attention weights of each head; if these are large,
    only one block of them exists at a time. The backward pass needs all layers; a forward pass
    alone needs one.
    """

    def attention(length: int, keys: int) -> int:
        weights = rows * model.num_heads * length * keys
        return 2 * min(weights, ATTENTION_BLOCK_BYTES // _FLOAT32)

    per_token = 4 * model.d_model + 4 * model.num_heads * model.d_kv
    per_token += (len(model.activations) + 1) * model.d_ff
    encoder = rows * inputs * per_token + attention(inputs, inputs)
    # Decoder layers have two attentions: to their own targets and to the inputs.
    decoder = 2 * rows * targets * per_token
    decoder += attention(targets, targets) + attention(targets, inputs)
    if keep_all:
        layers = model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
    else:
        layers = max(encoder, decoder)
    # Logits are float32 in any case.
    logits = 2 * rows * targets * model.vocab_size * _FLOAT32
    return layers * bytes_each + logits


def check_fits(run: Run, total: int, free: int, devices: int = 1) -> str:
    """Returns one line that says whether a run fits into a device's memory.

    Args:
      run: The run.
      total: Memory of the device, in bytes.
      free: How many of those bytes are not in use.
      devices: How many such devices the run is sharded across.

    Raises:
      UserError: If parameters, gradients and slots alone need more than the device has, or the
        batch's tokens do.
    """
    check_batch(
        run.batch_size // devices, run.sequence_length, total, run.provenance.get("batch_size")
    )
    memory = estimate(run, devices)
    lengths = run.sequence_length or {}
    tokens = " + ".join(str(length) for length in lengths.values()) or "the longest example's"
    batch = f"{counted(run.batch_size, 'sequence')} of {tokens} tokens"
    if isinstance(run, TrainRun) and run.num_microbatches > 1:
        batch += f" in {counted(run.num_microbatches, 'microbatch', 'microbatches')}"
    need = (
        f"{batch}: about {sized(memory.total)}"
        f" ({sized(memory.parameters)} parameters,"
        f" {sized(memory.gradients + memory.slots)} gradients and slots,"
        f" {sized(memory.activations)} activations); {sized(free)} of"
        f" {sized(total)} are free"
    )
    # Compare with the total memory: parameters never fit, however much is free.
    if memory.certain > total:
        raise UserError(
            f"The model does not fit into memory: {need}.",
            where=run.provenance.get("model.d_model"),
            fix="Run it on a device with more memory, or choose a smaller model.",
        )
    # Compare with the free memory: another process may exit.
    if memory.total > free:
        return f"{need}: this may not fit; lower tokens_per_microbatch_per_replica or the batch."
    return f"{need}: it fits."


def check_batch(
    rows: int, lengths: Mapping[str, int] | None, memory: int, where: str | None = None
) -> None:
    """Refuses a batch that is larger than a memory, whatever the model.

    Args:
      rows: The batch's rows.
      lengths: Tokens per feature; None if no length is bound.
      memory: The memory of the machine or device that holds the batch, in bytes.
      where: The place that sets the number of rows.

    Raises:
      UserError: If the batch's tokens alone need more.
    """
    tokens = sum((lengths or {}).values())
    # A token is an int32.
    if (size := rows * tokens * 4) > memory:
        raise UserError(
            f"A batch of {rows:,} rows of {tokens:,} tokens takes {sized(size)}; the memory is"
            f" {sized(memory)}.",
            where=where,
            fix="Bind a smaller batch.",
        )
