"""The programs of a run, compiled for a topology."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.config.run import CheckpointRun, Run, TrainRun
from t0repro.errors import UserError
from t0repro.evaluation import engine
from t0repro.evaluation.generation import rows_decoded_together
from t0repro.evaluation.grouping import choice_class, input_class, memory_class
from t0repro.model.decoding import generate
from t0repro.model.t5 import T5, evaluation_shapes, parameter_shapes
from t0repro.partitioning.collectives import Collective, collectives
from t0repro.partitioning.devices import Partitioning, choose
from t0repro.partitioning.flops import count_flops
from t0repro.partitioning.memory import Memory, assumed_length
from t0repro.partitioning.topologies import Chip
from t0repro.progress import working
from t0repro.training.optimizers import make_optimizer
from t0repro.training.rematerialization import batch_shapes, choose_remat, step_memory
from t0repro.training.residuals import bytes_per_device
from t0repro.training.schedules import make_schedule
from t0repro.training.train_state import stacked_shapes
from t0repro.training.train_step import jit_train_step, make_train_step

_Run = TypeVar("_Run", bound=Run)


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


def compile_programs(config: Run, partitioning: Partitioning) -> Iterator[Program]:
    """The steps of a run's mode, each compiled only when iteration reaches it.

    A caller that stops at the first one that does not fit pays for no more.
    """
    if isinstance(config, TrainRun):
        return train_programs(config, partitioning)
    assert isinstance(config, CheckpointRun)
    return evaluation_programs(config, partitioning)


def shard_over(config: Run, devices: Sequence[Any]) -> Partitioning:
    """The partitioning of a run over devices."""
    trains = isinstance(config, TrainRun)
    rows = config.batch_size // config.num_microbatches if trains else None
    where = config.provenance.get("layout")
    return choose(config.layout, config.model, rows=rows, devices=devices, where=where)


def train_programs(config: TrainRun, partitioning: Partitioning) -> Iterator[Program]:
    """The train step.

    Raises:
      UserError: without an optimizer or schedule.
    """
    if config.optimizer is None or config.schedule is None:
        raise UserError(
            "The run has no optimizer or no learning-rate schedule.",
            where="utils.run",
            fix="Bind utils.run.optimizer and utils.run.learning_rate_schedule.",
        )
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
    state = partitioning.shapes_with_shardings(stacked_shapes(model, optimizer))
    jitted = jit_train_step(step, state, several or partitioning)
    by_shapes = step_memory(config, state, features, partitioning)
    yield _compile_step("train", jitted, (state, batch), partitioning, by_shapes)


def evaluation_programs(config: CheckpointRun, partitioning: Partitioning) -> Iterator[Program]:
    """Scoring, as its two programs encode and decode, and generation, each for one batch."""
    model = T5(config.model, config.dtypes)
    parameters = partitioning.shapes_with_shardings(
        evaluation_shapes(model, parameter_shapes(model))
    )
    yield from _scoring_programs(model, config, parameters, partitioning)
    read = assumed_length(config, "inputs")
    length, padded = config.decoding.max_length or read, memory_class(read)
    if config.decoding.beam_size > 1:
        # Its batch is padded until its rows shard evenly across the devices.
        rows = -(-config.batch_size // partitioning.data)
    else:
        platform = partitioning.mesh.devices.flat[0].platform
        rows = rows_decoded_together(model, padded + length, platform)
    inputs = _tokens(partitioning, rows * partitioning.data, padded)
    decoding = {"config": config.decoding, "length": length}
    texts = jax.jit(functools.partial(generate.__wrapped__, model, **decoding))
    yield _compile_step("generate", texts, (parameters, inputs), partitioning)


def _scoring_programs(
    model: T5, config: CheckpointRun, parameters: Any, partitioning: Partitioning
) -> Iterator[Program]:
    """The programs that score the longest pair, of the rows that an evaluation gives them."""
    mesh, parts = partitioning.mesh, partitioning.data
    sizes = engine.choose_sizes(model, mesh.devices.flat[0].platform)
    length = input_class(assumed_length(config, "inputs"))
    choice, memory = choice_class(assumed_length(config, "targets")), memory_class(length)
    inputs, choices = sizes.input_rows(length), sizes.choice_rows(choice, memory)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec("data") if shape else PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    def room(rows: int, tokens: int) -> Any:
        # Keys and values are [rows, heads, tokens, d_kv].
        sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
        arrays = jax.eval_shape(lambda: engine.make_room(model, rows, tokens))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays
        )

    kept = room(parts, sizes.pages(memory) * sizes.page(memory) + memory)
    encode, decode = (
        # Their own functions, for the parameters to come first; the second argument is overwritten.
        jax.jit(functools.partial(program.__wrapped__, model), donate_argnums=1)
        for program in (engine.encode, engine.decode)
    )
    encoded = (integers(parts, inputs, length), integers(parts, inputs), integers())
    yield _compile_step("encode", encode, (parameters, kept, *encoded), partitioning)
    rows = [integers(parts, choices)] * 2
    decoded = (room(parts * choices, memory), kept, *rows, integers(parts, choices, choice))
    yield _compile_step("decode", decode, (parameters, *decoded), partitioning)


def _compile_step(
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


def arrange_run(config: _Run, devices: Sequence[Any]) -> tuple[_Run, Partitioning, str]:
    """The run as devices would execute it, its partitioning, and why it rematerializes.

    Raises:
      UserError: if the devices cannot be arranged as the layout asks.
    """
    partitioning = shard_over(config, devices)
    if not isinstance(config, TrainRun) or config.optimizer is None:
        return config, partitioning, ""
    held = stacked_shapes(T5(config.model, config.dtypes), make_optimizer(config.optimizer))
    run, why = choose_remat(config, held, batch_shapes(config), partitioning, partitioning.memory)
    return run, partitioning, why
