"""Compiles a run's steps for devices that need not be attached, and reports their cost there.

Nothing is allocated: the compiler only gets shapes. For TPU slices the compiler is libtpu's own.
"""

from __future__ import annotations

import dataclasses
import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.config.run_config import ModelConfig, Recompute, RunConfig
from t0repro.errors import UserError
from t0repro.evaluation import engine
from t0repro.files import write_atomically
from t0repro.model.decoding import generate
from t0repro.model.t5 import T5, held_for_evaluation, parameter_shapes
from t0repro.partitioning.costs import Collective, Memory, assumed_length, collectives, count_flops
from t0repro.partitioning.devices import Partitioning, choose, line_of
from t0repro.partitioning.topologies import GIB, Chip
from t0repro.progress import working
from t0repro.training.optimizers import make_optimizer, make_schedule
from t0repro.training.rematerialization import (
    batch_shapes,
    bytes_per_device,
    decided,
    step_memory,
)
from t0repro.training.train_state import held_shapes
from t0repro.training.train_step import jitted_train_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled step.

    Attributes:
      name: train, encode, decode (both of scoring) or generate.
      memory: its memory on a device, as the compiler reports it.
      by_shapes: a train step's memory computed from shapes; None for an evaluation's step, which
        keeps nothing for a backward pass.
      refused: the compiler's message if the program does not fit; "" if it compiled.
      flops: FLOPs on all devices together, see `count_flops`.
      communication: its collectives.
      seconds: time to trace and compile.
      hlo: the compiled program's text; "" if it did not compile.
      modules: HLO modules before and after optimization, serialized; none if it did not compile.
    """

    name: str
    memory: Memory
    by_shapes: Memory | None
    refused: str
    flops: int
    communication: Sequence[Collective]
    seconds: float
    hlo: str
    modules: tuple[bytes, ...] = ()

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of `memory`, by purpose."""
        parts = dataclasses.asdict(self.memory)
        if self.by_shapes is None:
            parts = {
                "parameters": parts["parameters"],
                "activations and temporaries": parts["temporaries"],
                "other": parts["other"],
            }
        return parts

    @property
    def sent(self) -> int:
        """Bytes that a device sends per step."""
        return sum(item.sent for item in self.communication)

    def fits_in(self, chip: Chip) -> bool:
        """Whether a device has enough memory for it."""
        return not self.refused and self.memory.total <= chip.memory


def precompile(
    config: RunConfig,
    devices: Sequence[Any],
    chip: Chip | None,
    hlo: Path | None = None,
    t5x_folder: Path | None = None,
    found: Callable[[dict[str, Any]], None] = lambda facts: None,
) -> Iterator[str]:
    """Compiles the steps of a run's mode and yields lines about each.

    Args:
      config: the run.
      devices: to compile for, available or from t0repro.partitioning.topologies.
      chip: its published figures; None leaves out predictions.
      hlo: folder to write each compiled program's text to.
      t5x_folder: folder to write the files of T5X's precompile to; see `write_t5x_files`.
      found: receives each step's figures.

    Raises:
      UserError: if the devices cannot be arranged as the layout asks.
    """
    run, partitioning, why = arranged(config, devices)
    yield line_of(partitioning, config.layout)
    if why:
        yield why
    for program in compiled_programs(run, partitioning):
        yield from described(program, run, partitioning, chip)
        found(figures(program, partitioning, chip))
        if hlo is not None and program.hlo:
            write_atomically(hlo / f"{program.name}.hlo.txt", program.hlo)
            yield f"  HLO: {hlo / program.name}.hlo.txt"
        if t5x_folder is not None and program.modules:
            files = write_t5x_files(t5x_folder, program, partitioning)
            yield f"  HLO: {', '.join(map(str, files))}"


def write_t5x_files(folder: Path, program: Program, partitioning: Partitioning) -> list[Path]:
    """Writes what T5X's precompile leaves in model_dir, under its names; returns the files.

    They are the serialized HLO modules before and after optimization, and `assignment`, the numbers
    of the device mesh as numpy saves them.
    """
    numbers = io.BytesIO()
    np.save(numbers, partitioning.mesh.device_ids)
    before, after = program.modules
    contents = {
        "lowered_hlo_pre_optimization": before,
        "lowered_hlo_post_optimization": after,
        "assignment": numbers.getvalue(),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def devices_line(config: RunConfig, devices: Sequence[Any]) -> str:
    """A line that describes the devices of a run.

    Raises:
      UserError: if the devices cannot be arranged as the layout asks.
    """
    return line_of(_partitioning(config, devices), config.layout)


def arranged(config: RunConfig, devices: Sequence[Any]) -> tuple[RunConfig, Partitioning, str]:
    """The run as devices would execute it, its partitioning, and why it rematerializes.

    Raises:
      UserError: if the devices cannot be arranged as the layout asks.
    """
    partitioning = _partitioning(config, devices)
    if config.mode != "train" or config.optimizer is None:
        return config, partitioning, ""
    held = held_shapes(T5(config.model, config.dtypes), make_optimizer(config.optimizer))
    run, why = decided(config, held, batch_shapes(config), partitioning, partitioning.memory)
    return run, partitioning, why


def compiled_programs(config: RunConfig, partitioning: Partitioning) -> Iterator[Program]:
    """The steps of a run's mode, each compiled only when iteration reaches it.

    A caller that stops at the first one that does not fit pays for no more.
    """
    programs = train_programs if config.mode == "train" else evaluation_programs
    return programs(config, partitioning)


def _partitioning(config: RunConfig, devices: Sequence[Any]) -> Partitioning:
    rows = config.batch_size // config.num_microbatches if config.mode == "train" else None
    where = config.provenance.get("layout")
    return choose(config.layout, config.model, rows=rows, devices=devices, where=where)


# ---- Programs -----------------------------------------------------------------------------------


def train_programs(config: RunConfig, partitioning: Partitioning) -> Iterator[Program]:
    """The train step.

    Raises:
      UserError: without an optimizer or schedule.
    """
    if config.optimizer is None or config.schedule is None:
        raise UserError("The run has no optimizer or no learning-rate schedule.", where="utils.run")
    model, optimizer = T5(config.model, config.dtypes), make_optimizer(config.optimizer)
    several = partitioning if partitioning.mesh.size > 1 else None
    step = make_train_step(
        model,
        optimizer,
        make_schedule(config.schedule),
        num_microbatches=config.num_microbatches,
        # Any key will do: no values are computed.
        dropout_key=jax.random.key(0),
        partitioning=several,
    )
    features = batch_shapes(config)
    batch = {name: _tokens(partitioning, *shape) for name, shape in features.items()}
    # Give the sharding even for one device, which need not be the default one.
    state = partitioning.divided(held_shapes(model, optimizer))
    jitted = jitted_train_step(step, state, several or partitioning)
    by_shapes = step_memory(config, state, features, partitioning)
    yield _compiled("train", jitted, (state, batch), partitioning, by_shapes)


def evaluation_programs(config: RunConfig, partitioning: Partitioning) -> Iterator[Program]:
    """Scoring, as its two steps encode and decode, and generation, each for one batch."""
    model = T5(config.model, config.dtypes)
    parameters = partitioning.divided(held_for_evaluation(model, parameter_shapes(model)))
    # Evaluations pad a batch until its rows shard evenly across the devices.
    rows = -(-config.batch_size // partitioning.data) * partitioning.data
    inputs = _tokens(partitioning, rows, assumed_length(config, "inputs"))
    targets = _tokens(partitioning, rows, assumed_length(config, "targets"))
    memory = jax.eval_shape(lambda p, x: engine.encode(model, p, x, x), parameters, inputs)
    # Keys and values are [rows, heads, length, d_kv].
    by_heads = NamedSharding(partitioning.mesh, PartitionSpec("data", "model"))
    memory = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_heads), memory
    )
    # Tokens serve as segments, too: only the shape and the type matter here.
    encode = jax.jit(lambda p, x, s: engine.encode(model, p, x, s))
    yield _compiled("encode", encode, (parameters, inputs, inputs), partitioning)
    decode = jax.jit(lambda p, *arrays: engine.decode(model, p, *arrays))
    arguments = (parameters, memory, inputs, targets, targets, targets)
    yield _compiled("decode", decode, arguments, partitioning)
    length = config.decoding.max_length or assumed_length(config, "inputs")
    texts = jax.jit(lambda p, x: generate(model, p, x, config.decoding, length=length))
    yield _compiled("generate", texts, (parameters, inputs), partitioning)


def _compiled(
    name: str,
    jitted: Any,
    arguments: tuple[Any, ...],
    partitioning: Partitioning,
    by_shapes: Memory | None = None,
) -> Program:
    """Traces and compiles a step; one that does not fit gives a result too."""
    started = time.monotonic()
    expected = by_shapes or Memory(bytes_per_device(arguments[0]))
    held = expected.parameters + expected.slots
    with partitioning.active(), working(f"compiling {name}"):
        traced = jitted.trace(*arguments)
        flops = count_flops(traced.jaxpr.jaxpr)
        try:
            lowered = traced.lower()
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            # The lines after libtpu's first one list the largest allocations.
            refused = str(error).splitlines()[0]
            # Only a program that does not fit is a result; any other error is one.
            if "RESOURCE_EXHAUSTED" not in refused:
                raise
            seconds = time.monotonic() - started
            memory = expected.compiled(_temporaries(refused, held), other=0)
            return Program(name, memory, by_shapes, refused, flops, (), seconds, hlo="")
    reported, hlo = compiled.memory_analysis(), compiled.as_text()
    # Parameters that a program does not read, such as the decoder's while encoding, are not among
    # its arguments; the device holds them all the same.
    other = max(0, reported.argument_size_in_bytes - held) + reported.generated_code_size_in_bytes
    # A donated buffer is both argument and result, and counts once.
    other += reported.output_size_in_bytes - reported.alias_size_in_bytes
    return Program(
        name,
        expected.compiled(_most_at_once(reported, partitioning), other),
        by_shapes,
        refused="",
        flops=flops,
        communication=collectives(hlo),
        seconds=time.monotonic() - started,
        hlo=hlo,
        modules=(
            lowered.compiler_ir(dialect="hlo").as_serialized_hlo_module_proto(),
            compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto(),
        ),
    )


def _most_at_once(memory: Any, partitioning: Partitioning) -> int:
    """Bytes that a compiled program needs in addition to arguments and results."""
    # XLA's peak on CPU leaves temporaries out.
    if partitioning.mesh.devices.flat[0].platform != "tpu":
        return memory.temp_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    beside = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results
    # libtpu's temp_size_in_bytes may be too high: 11.04 GiB where its own report (xla_dump_to) has
    # 8.15. Its peak agrees, but counts on-chip memory, which matters in small programs.
    return min(memory.temp_size_in_bytes, max(0, beside))


def _tokens(partitioning: Partitioning, rows: int, length: int) -> jax.ShapeDtypeStruct:
    sharding = partitioning.batch_sharding(rows)
    return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)


def _temporaries(refused: str, held: int) -> int:
    """Bytes that a program would need, from libtpu's "required for HLO temporaries (37.71G)".

    Args:
      refused: libtpu's message.
      held: bytes of the parameters and slots.
    """
    match = re.search(r"temporaries \(([\d.]+)([KMGT])\)", refused)
    needed = float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1) if match else 0
    # Despite its name, libtpu's number includes the arguments.
    return max(0, int(needed) - held)


# ---- In words -----------------------------------------------------------------------------------


def described(
    program: Program, config: RunConfig, partitioning: Partitioning, chip: Chip | None
) -> Iterator[str]:
    """Lines about a compiled step: memory and whether it fits, FLOPs, communication, time."""
    yield f"{program.name}: compiled in {program.seconds:.0f} s"
    yield from _memory(program)
    if chip is not None:
        yield f"  {fits(program, config, partitioning, chip)}"
    devices = partitioning.mesh.size
    each = program.flops / devices
    yield f"  operations: {program.flops:.4g}, {each:.4g} a device (matmuls)"
    if program.refused:
        return  # its communication could only be read from the compiled program
    kinds: dict[str, list[int]] = {}
    for item in program.communication:
        kinds.setdefault(item.kind, []).append(item.sent)
    parts = [f"{len(sent)} {kind} {_gib(sum(sent))}" for kind, sent in sorted(kinds.items())]
    yield f"  communication: a device sends {_gib(program.sent)} ({', '.join(parts) or 'nothing'})"
    if chip is not None:
        yield (
            f"  predicted step: {predicted_seconds(program, partitioning, chip):.3g} s ="
            f" {each:.4g} operations / {chip.flops:.4g} a second"
            f" + {program.sent:.4g} bytes / {chip.link:.4g} a second (published peaks, no overlap)"
        )


def figures(program: Program, partitioning: Partitioning, chip: Chip | None) -> dict[str, Any]:
    """The same as values: bytes a device, FLOPs of all devices, seconds."""
    known = chip if not program.refused else None
    return {
        "name": program.name,
        "seconds_to_compile": program.seconds,
        "memory": {**dataclasses.asdict(program.memory), "total": program.memory.total},
        "fits": None if chip is None else program.fits_in(chip),
        "refused": program.refused,
        "flops": program.flops,
        "bytes_sent": None if program.refused else program.sent,
        "predicted_seconds": known and predicted_seconds(program, partitioning, known),
    }


def predicted_seconds(program: Program, partitioning: Partitioning, chip: Chip) -> float:
    """Seconds per step at published peaks, with computation and communication in sequence."""
    return program.flops / partitioning.mesh.size / chip.flops + program.sent / chip.link


def fits(program: Program, config: RunConfig, partitioning: Partitioning, chip: Chip) -> str:
    """Whether a step fits into a device's memory and, if not, what would make it fit."""
    spare = chip.memory - program.memory.total
    if program.fits_in(chip):
        return f"fits with {_gib(spare)} to spare"
    much = f"{_gib(-spare)} too much" if spare < 0 else program.refused
    return f"does not fit, {much}: {'; or '.join(remedies(config, partitioning))}"


def remedies(config: RunConfig, partitioning: Partitioning) -> list[str]:
    """Ways to reduce a step's memory that the run does not use yet."""
    found, model = [], config.model
    if config.mode == "train":
        if ways := more_recomputation(model):
            found.append(f"recompute activations ({' or '.join(map(repr, ways))})")
        rows = config.batch_size // config.num_microbatches
        if rows > partitioning.data:
            found.append(f"more microbatches than {config.num_microbatches}")
    elif config.batch_size > partitioning.data:
        found.append(f"a smaller batch than {config.batch_size}")
    # Taken from the data axis; it must divide heads, d_ff and vocabulary evenly.
    wider = partitioning.model * 2
    if partitioning.data > 1 and not any(
        size % wider for size in (model.num_heads, model.d_ff, model.vocab_size)
    ):
        found.append(f"model parallelism {wider} instead of {partitioning.model}")
    if partitioning.data > 1 and not partitioning.fully_sharded:
        found.append("full sharding")
    return found or ["use devices with more memory"]


def more_recomputation(model: ModelConfig) -> tuple[Recompute, ...]:
    """Policies that keep less than the model's own, the one that recomputes least first."""
    stronger: dict[Recompute, tuple[Recompute, ...]] = {
        "none": ("minimal", "full"),
        "minimal": ("full",),
    }
    return stronger.get(model.recompute or "none", ())


def _memory(program: Program) -> Iterator[str]:
    listed = " + ".join(f"{name} {_gib(size)}" for name, size in program.parts.items())
    yield f"  memory of a device: {_gib(program.memory.total)} = {listed}"
    found, memory = program.by_shapes, program.memory
    beside = memory.gradients + memory.activations + memory.temporaries
    # This is 0 if a compiler refuses the program without saying how much memory it needs.
    if found is not None and found.gradients + found.activations > beside > 0:
        yield (
            f"  by shapes, gradients are {_gib(found.gradients)} and activations"
            f" {_gib(found.activations)}: not all of that is in this memory at once"
        )


def _gib(size: float) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"


def adjusted(
    config: RunConfig,
    model_parallelism: int | None = None,
    fully_sharded: bool = False,
    num_microbatches: int | None = None,
) -> RunConfig:
    """The run with another layout, whose data axis takes the remaining devices, or microbatches."""
    layout = config.layout
    if model_parallelism is not None:
        layout = dataclasses.replace(layout, data=None, model=model_parallelism, topology=None)
    if fully_sharded:
        layout = dataclasses.replace(layout, fully_sharded=True)
    if num_microbatches is not None:
        config = dataclasses.replace(config, num_microbatches=num_microbatches)
    return dataclasses.replace(config, layout=layout)


# ---- How to make a run fit while changing it as little as possible -------------------------------


def suggest(config: RunConfig, devices: Sequence[Any], chip: Chip) -> Iterator[str]:
    """Compiles ever smaller variants of a training run until one fits; yields a line for each.

    Args:
      config: a training run.
      devices: to compile for.
      chip: its published figures.
    """
    run, partitioning, why = arranged(config, devices)
    if why:
        yield why
    if all(program.fits_in(chip) for program in compiled_programs(run, partitioning)):
        yield "as configured: fits"
        return
    for change, variant in variants(run, partitioning):
        # If a layout cannot shard the model, report it and try the next.
        try:
            _, changed, _ = arranged(variant, devices)
        except UserError as error:
            yield f"{change}: {error.what}"
            continue
        (program,) = compiled_programs(variant, changed)
        yield f"{change}: {fits(program, variant, changed, chip).partition(':')[0]}"
        if program.fits_in(chip):
            return
    yield "nothing that can be tried fits: use devices with more memory"


def variants(config: RunConfig, partitioning: Partitioning) -> Iterator[tuple[str, RunConfig]]:
    """The variants to try, each on top of the one before: what costs least time comes first."""
    changes: dict[str, str] = {}

    def with_change(kind: str, text: str) -> tuple[str, RunConfig]:
        changes[kind] = text
        return ", ".join(changes.values()), config

    rows, data = config.batch_size // config.num_microbatches, partitioning.data
    # Halve, so that microbatches stay equal.
    while rows % 2 == 0 and rows // 2 >= data:
        rows //= 2
        config = dataclasses.replace(config, num_microbatches=2 * config.num_microbatches)
        # Costs some utilization: smaller matmuls.
        yield with_change("parts", f"{config.num_microbatches} microbatches")
    ways = more_recomputation(config.model)

    def recomputing(way: Recompute) -> tuple[str, RunConfig]:
        nonlocal config
        model = dataclasses.replace(config.model, recompute=way)
        config = dataclasses.replace(config, model=model)
        return with_change("recompute", f"recompute = {way!r}")

    # Costs about 1% more FLOPs.
    if "minimal" in ways:
        yield recomputing("minimal")
    # Costs communication that partly overlaps with computation.
    if not config.layout.fully_sharded and data > 1:
        layout = dataclasses.replace(config.layout, fully_sharded=True)
        config = dataclasses.replace(config, layout=layout)
        yield with_change("sharding", "full sharding")
    # Costs up to a third more FLOPs: the forward pass runs twice.
    if "full" in ways:
        yield recomputing("full")
    # Costs communication that does not overlap, since a layer needs its result to go on.
    parts = config.layout.model
    while data % 2 == 0 and config.model.num_heads % (2 * parts) == 0:
        parts, data = 2 * parts, data // 2
        layout = dataclasses.replace(config.layout, data=data, model=parts, topology=None)
        config = dataclasses.replace(config, layout=layout)
        yield with_change("model", f"model parallelism {parts}")
