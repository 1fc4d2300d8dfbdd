"""How much memory a run needs, estimated from its configuration before anything starts."""

from __future__ import annotations

import dataclasses

from t0repro.config.run_config import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    ModelConfig,
    MomentumConfig,
    OptimizerConfig,
    RunConfig,
)
from t0repro.errors import UserError
from t0repro.words import counted, sized

ATTENTION_BLOCK_BYTES = 1 << 26
"""Most bytes of attention logits that JAX makes at a time for a layer on a device."""

_FLOAT32 = 4
_LENGTH = 512  # tokens assumed for a feature with no bound length


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a run needs on one device.

    Attributes:
      parameters: Parameters: in float32, or as activations where a run only evaluates.
      training: Gradients and optimizer slots; 0 outside training.
      activations: Activations of one microbatch, by a rule of thumb.
    """

    parameters: int
    training: int
    activations: int

    @property
    def certain(self) -> int:
        """Bytes needed whatever the batch size."""
        return self.parameters + self.training

    @property
    def total(self) -> int:
        """Bytes needed in all, activations included."""
        return self.certain + self.activations


def estimate(run: RunConfig, devices: int = 1) -> Memory:
    """Estimates the memory that a run needs on each of so many devices."""
    layout = run.layout
    # On one device nothing is divided, whatever the layout asks for.
    model = layout.model if devices > 1 else 1
    data = devices // model
    # The factor by which one device's share of the parameters is smaller than the whole.
    shares = model * (data if layout.fully_sharded else 1)
    trains = run.mode == "train"
    bytes_each = 2 if run.dtypes.activation == "bfloat16" else _FLOAT32
    count = run.model.shape.parameter_count()
    parameters = count * (_FLOAT32 if trains else bytes_each) // shares
    # Rows of a microbatch on one device, rounded up.
    rows = -(-run.batch_size // (run.num_microbatches * max(1, data)))
    return Memory(
        parameters=parameters,
        # 1: the gradients, which are as large as the parameters.
        training=parameters * (1 + _slots(run.optimizer)) if trains else 0,
        activations=_activations(
            run.model,
            rows,
            assumed_length(run, "inputs"),
            assumed_length(run, "targets"),
            bytes_each=bytes_each,
            keep_all=trains and not run.model.recomputes,
        ),
    )


def assumed_length(run: RunConfig, feature: str) -> int:
    """The tokens of a feature in a row; a guess where no length is bound."""
    return (run.sequence_length or {}).get(feature, _LENGTH)


def _slots(optimizer: OptimizerConfig | None) -> int:
    """Number of slots as large as the parameters; Adafactor's rows and columns are negligible."""
    if isinstance(optimizer, AdafactorConfig):
        return (not optimizer.factored) + (optimizer.beta1 > 0)
    if isinstance(optimizer, AdamWeightDecayConfig):
        return 2
    return int(isinstance(optimizer, MomentumConfig))


def _activations(
    model: ModelConfig, rows: int, inputs: int, targets: int, *, bytes_each: int, keep_all: bool
) -> int:
    """Bytes of the activations that are in memory at the same time.

    Counts, for each layer and token, the residual stream and its norms, the four projections of the
    attention, the feed-forward layer, and the attention weights of each head, of which only a block
    exists where they are large. The backward pass needs all layers; a forward pass alone needs one.
    """

    def attention(length: int, keys: int) -> int:
        weights = rows * model.num_heads * length * keys
        return 2 * min(weights, ATTENTION_BLOCK_BYTES // _FLOAT32)

    per_token = 4 * model.d_model + 4 * model.num_heads * model.d_kv
    per_token += (len(model.activations) + 1) * model.d_ff
    encoder = rows * inputs * per_token + attention(inputs, inputs)
    # Decoder layers have two attentions, and attend to their own targets and to the inputs.
    decoder = 2 * rows * targets * per_token
    decoder += attention(targets, targets) + attention(targets, inputs)
    if keep_all:
        layers = model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
    else:
        layers = max(encoder, decoder)
    # In float32 whatever the activations are.
    logits = 2 * rows * targets * model.vocab_size * _FLOAT32
    return layers * bytes_each + logits


def check_fits(run: RunConfig, total: int, free: int, devices: int = 1) -> str:
    """Says in one line whether a run fits into a device's memory.

    Args:
      run: The run.
      total: Memory of the device, in bytes.
      free: How many of those bytes are not in use.
      devices: How many such devices the run is divided among.

    Raises:
      UserError: If parameters, gradients and slots alone need more than the device has.
    """
    memory = estimate(run, devices)
    lengths = run.sequence_length or {}
    tokens = " + ".join(str(length) for length in lengths.values()) or "the longest example's"
    batch = f"{counted(run.batch_size, 'sequence')} of {tokens} tokens"
    if run.num_microbatches > 1:
        batch += f" in {counted(run.num_microbatches, 'microbatch', 'microbatches')}"
    need = (
        f"{batch}: about {sized(memory.total)}"
        f" ({sized(memory.parameters)} parameters,"
        f" {sized(memory.training)} gradients and slots,"
        f" {sized(memory.activations)} activations); {sized(free)} of"
        f" {sized(total)} are free"
    )
    # Against all of the memory: parameters do not fit however free the device is.
    if memory.certain > total:
        raise UserError(
            f"The model does not fit into memory: {need}.",
            where=run.provenance.get("model.d_model"),
            fix="Run it on a device with more memory, or choose a smaller model.",
        )
    # Against what is free now: another process may leave.
    if memory.total > free:
        return f"{need}: this may not fit; lower tokens_per_microbatch_per_replica or the batch."
    return f"{need}: it fits."
