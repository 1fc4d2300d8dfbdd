"""A run's costs on a device: its memory, a traced program's FLOPs, a compiled program's messages.

The breakdown of the memory, which every command prints, has three sources, each more exact than
the one before:

    estimate            the configuration alone; needs no JAX
    rematerialization   activations counted from the shapes of the traced step (training)
    compiled            the compiler's own figure for a program (runs/precompile)
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config.run_config import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    ModelConfig,
    MomentumConfig,
    MultiOptimizerConfig,
    OptimizerConfig,
    RunConfig,
)
from t0repro.errors import UserError
from t0repro.parameters.shape import factoring
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


def estimate(run: RunConfig, devices: int = 1) -> Memory:
    """Estimates the memory that a run needs on each of `devices` devices, activations included."""
    parallel = run.layout
    # A single device holds everything, whatever the layout.
    model = parallel.model if devices > 1 else 1
    data = devices // model
    # How many times smaller one device's shard of the parameters is than the whole.
    shards = model * (data if parallel.fully_sharded else 1)
    trains = run.mode == "train"
    bytes_each = 2 if run.dtypes.activation == "bfloat16" else _FLOAT32
    count, adapter = run.model.shape.parameter_count(), run.model.adapter
    parameters = count * (_FLOAT32 if trains else bytes_each) // shards
    trained, slots = parameters, slot_bytes(run.model.shape.parameters(), run.optimizer) // shards
    if adapter is not None:
        sizes = adapter.parameter_shapes(run.model.shape)
        trained, slots = _FLOAT32 * sum(map(math.prod, sizes.values())), 0
        parameters = count * (2 if adapter.base_dtype == "bfloat16" else _FLOAT32) // shards
        parameters, slots = parameters + trained, slot_bytes(sizes, run.optimizer)
    # Rows of a microbatch on one device, rounded up.
    rows = -(-run.batch_size // (run.num_microbatches * max(1, data)))
    choices = run.model.choice_loss.choices if run.model.choice_loss else 1
    return Memory(
        parameters=parameters,
        slots=slots if trains else 0,
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
    if isinstance(optimizer, MultiOptimizerConfig):
        return _FLOAT32 * sum(
            _slot_entries(path, sizes[path], part.optimizer)
            for part in optimizer.parts
            for path in part.paths
        )
    frozen = getattr(optimizer, "frozen", ())
    return _FLOAT32 * sum(
        _slot_entries(path, size, optimizer) for path, size in sizes.items() if path not in frozen
    )


def _slot_entries(path: str, shape: tuple[int, ...], optimizer: OptimizerConfig | None) -> int:
    """Number of slot entries that an optimizer keeps for a parameter."""
    entries = math.prod(shape)
    if isinstance(optimizer, AdafactorConfig):
        momentum = entries if optimizer.beta1 or optimizer.momentum_slot else 0
        axes = factoring(path, shape, optimizer)
        return sum(map(math.prod, axes.slot_shapes(shape).values())) + momentum
    if isinstance(optimizer, AdamWeightDecayConfig):
        return 2 * entries
    return entries if isinstance(optimizer, MomentumConfig) else 0


def assumed_length(run: RunConfig, feature: str) -> int:
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


def check_fits(run: RunConfig, total: int, free: int, devices: int = 1) -> str:
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
    if run.num_microbatches > 1:
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
            f"A batch of {rows:,} rows of {tokens:,} tokens has {sized(size)}, and the memory"
            f" {sized(memory)}.",
            where=where,
            fix="Bind a smaller batch.",
        )


# ---- A traced program's FLOPs, counted on matmuls ------------------------------------------------


ATTENDED = "attended"
"""The name of an attention kernel's results, by which rematerialization can save them."""

KERNEL_MATMULS = {"t0repro_attention": 2, "t0repro_attention_gradients": 4}
"""How many matmuls over queries x keys x depth each attention kernel represents."""


def count_flops(jaxpr: Any) -> int:
    """FLOPs of all matmuls in a jaxpr, two for each multiply-add.

    Loops of known length count as often as they run, a loop until a condition once. Matmuls
    rematerialized in the backward pass count again, except inside an attention kernel, which counts
    like whole-matrix attention. Everything else is left out; in a T5 that is a few percent.

    Args:
      jaxpr: of the whole computation, on all devices together.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
        elif matmuls := KERNEL_MATMULS.get(equation.params.get("target_name")):
            total += matmuls * _kernel(equation)
        elif equation.primitive.name == "pallas_call":
            # Its jaxpr has one block's matmuls.
            total += equation.params["cost_estimate"].flops
        else:
            inner = sum(count_flops(inner) for inner in _inner(equation.params))
            total += _times(equation) * inner
    return total


def _times(equation: Any) -> int:
    """How often the jaxpr of an equation runs, on all devices together."""
    if equation.primitive.name == "scan":
        return equation.params["length"]
    if equation.primitive.name == "shard_map":
        # Its jaxpr is what a single device computes.
        mesh = equation.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in equation.params["newly_manual_axes"])
    return 1


def _dot(equation: Any) -> int:
    """Twice the size of the result, times the size of the contracted axes."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    )


def _kernel(equation: Any) -> int:
    """FLOPs of one matmul of an attention kernel, whose first arguments are queries and keys."""
    (batch, heads, length, depth), keys = (x.aval.shape for x in equation.invars[:2])
    return 2 * batch * heads * length * keys[2] * depth


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation calls; for a condition, those of all branches."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            # Some primitives hold a jaxpr, others a closed one around it.
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


# ---- The communication of a compiled program, read off its HLO text ------------------------------


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "s4": 4, "u4": 4}
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_OPERATION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|called_computations|branch_computations)="
    r"(?:\{(?P<many>[^}]*)\}|%?(?P<one>[\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]\s*\{(?P<taken>[^}]*)\}")
_AXIS_LENGTH = re.compile(r"'(\w+)'=(\d+)")
_TAKEN = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred|s4|u4|f8\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation in which devices exchange data.

    Attributes:
      kind: its name in HLO, one of `KINDS`.
      result: bytes of its result on each device.
      group: number of devices that take part together.
      in_loop: whether it is in the body of a loop, such as a scan.
      times: how often it runs in one call of the program; a loop of unknown length counts once.
    """

    kind: str
    result: int
    group: int
    in_loop: bool
    times: int

    @property
    def sent(self) -> int:
        """Bytes that a device sends per call of the program, in a ring over its group."""
        others = (self.group - 1) / self.group
        # A reduce-scatter returns one shard of the reduced array; the other kinds return all of it.
        factor = {
            "all-reduce": 2 * others,
            "all-gather": others,
            "reduce-scatter": self.group - 1,
            "all-to-all": others,
        }.get(self.kind, 1.0)
        return math.ceil(self.result * factor * self.times)


def collectives(hlo: str) -> list[Collective]:
    """Every collective operation of a compiled program.

    Args:
      hlo: the result of `as_text` of a compiled function.
    """
    lines = _computations(hlo)
    calls = {name: list(_calls(body, lines)) for name, body in lines.items()}
    entry = re.search(r"^ENTRY %?([\w.\-]+) ", hlo, re.M)
    if entry is None:
        return []
    runs: dict[str, tuple[int, bool]] = {}

    # A computation may be called from several places, inside and outside of a loop.
    def visit(name: str, times: int, in_loop: bool) -> None:
        before = runs.get(name, (0, False))
        runs[name] = (before[0] + times, before[1] or in_loop)
        for called, trips, loop in calls.get(name, ()):
            visit(called, times * trips, in_loop or loop)

    visit(entry[1], 1, False)
    return [
        Collective(kind, size, group, in_loop, times)
        for name, (times, in_loop) in runs.items()
        for kind, size, group in _operations(name, lines.get(name, []))
    ]


def counts(found: list[Collective]) -> dict[str, int]:
    """Number of operations of each kind, separately for loops: {"all-reduce in loop": 24, ...}."""
    names = [f"{item.kind} in loop" if item.in_loop else item.kind for item in found]
    return dict(sorted(collections.Counter(names).items()))


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    lines: dict[str, list[str]] = {}
    body: list[str] = []
    for line in hlo.splitlines():
        # A computation's first line is not indented; its operations are.
        if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
            body = lines[head["name"]] = []
        else:
            body.append(line)
    return lines


def _calls(body: list[str], lines: dict[str, list[str]]) -> Iterator[tuple[str, int, bool]]:
    """The computations that one calls: name, number of calls, and whether as a loop's body."""
    for line in body:
        loop = " while(" in line
        times = _trip_count(line, lines) if loop else 1
        for match in _CALLED.finditer(line):
            for name in (match["many"] or match["one"]).split(","):
                yield name.strip().lstrip("%"), times, loop


def _trip_count(line: str, lines: dict[str, list[str]]) -> int:
    """How often a loop runs: from XLA's annotation or, on TPUs, the bound of its counter."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    body = lines.get(condition[1], []) if condition else []
    if not any("direction=LT" in each for each in body):
        return 1
    limits = [int(found[1]) for each in body if (found := _CONSTANT.search(each))]
    return limits[0] if len(limits) == 1 else 1


def _operations(name: str, body: list[str]) -> Iterator[tuple[str, int, int]]:
    """The collectives of a computation of this name: kind, bytes of the result, size of a group."""
    # A TPU's reduce-scatter is a fusion with this name: an all-reduce and a slice of its result.
    scatters = name.startswith("all-reduce-scatter")
    for line in body:
        if match := _OPERATION.search(line):
            # A result may be a tuple: XLA combines several arrays in one operation.
            sizes = [_bytes(*array) for array in _ARRAY.findall(match["type"])]
            if match["start"] and match["kind"] in ("all-gather", "collective-permute"):
                sizes = sizes[len(sizes) // 2 :]  # the first half are its operands
            kind, size, group = match["kind"], sum(sizes), _group(line)
            if scatters and kind == "all-reduce":
                kind, size = "reduce-scatter", size // group
            yield kind, size, group


def _bytes(dtype: str, shape: str) -> int:
    # A type's name ends in its number of bits, except for pred, which takes a byte.
    bits = _BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8


def _group(line: str) -> int:
    """Size of a group: 2 in `replica_groups={{0,1},{2,3}}` and in `replica_groups=[4,2]<=[8]`.

    libtpu also names axes of a mesh: 8 in `replica_groups=mesh['a'=8,'b'=4] {'a'}`, and 2 if it
    uses only part of that axis, `{'a':(1)2}`.
    """
    if match := _MESH_GROUPS.search(line):
        lengths = {name: int(length) for name, length in _AXIS_LENGTH.findall(match["mesh"])}
        taken = _TAKEN.findall(match["taken"])
        return math.prod(int(part) if part else lengths[name] for name, part in taken)
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return match[1].count(",") + 1
    return 2  # a permutation has pairs, no groups
