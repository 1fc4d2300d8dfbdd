"""How to make a run fit while changing it as little as possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from t0repro.config.model import ModelConfig, Recompute
from t0repro.config.run import Run, TrainRun
from t0repro.errors import UserError
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.topologies import GIB, Chip
from t0repro.runs.programs import Program, arrange_run, compile_programs

_Run = TypeVar("_Run", bound=Run)


def fits(program: Program, config: Run, partitioning: Partitioning, chip: Chip) -> str:
    """Whether a step fits into a device's memory and, if not, what would make it fit."""
    spare = chip.memory - program.memory.total
    if program.fits_in(chip):
        return f"fits with {format_gib(spare)} to spare"
    much = f"{format_gib(-spare)} too much" if spare < 0 else program.refused
    return f"does not fit, {much}: {'; or '.join(remedies(config, partitioning))}"


def remedies(config: Run, partitioning: Partitioning) -> list[str]:
    """Ways to reduce a step's memory that the run does not use yet."""
    found, model = [], config.model
    if isinstance(config, TrainRun):
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


def adjust_run(
    config: _Run,
    model_parallelism: int | None = None,
    fully_sharded: bool = False,
    num_microbatches: int | None = None,
) -> _Run:
    """The run with another layout, whose data axis takes the remaining devices, or microbatches.

    Raises:
      UserError: For microbatches of a run that does not train.
    """
    layout = config.layout
    if model_parallelism is not None:
        layout = dataclasses.replace(layout, data=None, model=model_parallelism, topology=None)
    if fully_sharded:
        layout = dataclasses.replace(layout, fully_sharded=True)
    if num_microbatches is not None:
        if not isinstance(config, TrainRun):
            raise UserError(
                f"Mode {config.mode!r} has no microbatches; only training has.",
                where=f"--num_microbatches={num_microbatches}",
                fix="Leave out --num_microbatches, or give a training run.",
            )
        config = dataclasses.replace(config, num_microbatches=num_microbatches)
    return dataclasses.replace(config, layout=layout)


def suggest(config: TrainRun, devices: Sequence[Any], chip: Chip) -> Iterator[str]:
    """Compiles ever smaller variants of a training run until one fits; yields a line for each.

    Args:
      config: a training run.
      devices: to compile for.
      chip: its published figures.
    """
    run, partitioning, why = arrange_run(config, devices)
    if why:
        yield why
    if all(program.fits_in(chip) for program in compile_programs(run, partitioning)):
        yield "as configured: fits"
        return
    for change, variant in variants(run, partitioning):
        # If a layout cannot shard the model, report it and try the next.
        try:
            _, changed, _ = arrange_run(variant, devices)
        except UserError as error:
            yield f"{change}: {error.what}"
            continue
        (program,) = compile_programs(variant, changed)
        yield f"{change}: {fits(program, variant, changed, chip).partition(':')[0]}"
        if program.fits_in(chip):
            return
    yield "nothing that can be tried fits: use devices with more memory"


def variants(config: TrainRun, partitioning: Partitioning) -> Iterator[tuple[str, TrainRun]]:
    """The variants to try, each on top of the one before: what costs least time comes first."""
    changes: dict[str, str] = {}

    def change(kind: str, text: str, **parts: Any) -> tuple[str, TrainRun]:
        nonlocal config
        config = dataclasses.replace(config, **parts)
        changes[kind] = text
        return ", ".join(changes.values()), config

    def recompute(way: Recompute) -> tuple[str, TrainRun]:
        model = dataclasses.replace(config.model, recompute=way)
        return change("recompute", f"recompute = {way!r}", model=model)

    rows, data = config.batch_size // config.num_microbatches, partitioning.data
    # Halve, so that microbatches stay equal.
    while rows % 2 == 0 and rows // 2 >= data:
        rows, count = rows // 2, 2 * config.num_microbatches
        # Costs some utilization: smaller matmuls.
        yield change("parts", f"{count} microbatches", num_microbatches=count)
    ways = more_recomputation(config.model)
    # Costs about 1% more FLOPs.
    if "minimal" in ways:
        yield recompute("minimal")
    # Costs communication that partly overlaps with computation.
    if not config.layout.fully_sharded and data > 1:
        layout = dataclasses.replace(config.layout, fully_sharded=True)
        yield change("sharding", "full sharding", layout=layout)
    # Costs up to a third more FLOPs: the forward pass runs twice.
    if "full" in ways:
        yield recompute("full")
    # Costs communication that does not overlap, since a layer needs its result to go on.
    parts = config.layout.model
    while data % 2 == 0 and config.model.num_heads % (2 * parts) == 0:
        parts, data = 2 * parts, data // 2
        layout = dataclasses.replace(config.layout, data=data, model=parts, topology=None)
        yield change("model", f"model parallelism {parts}", layout=layout)


def format_gib(size: float) -> str:
    """A number of bytes in GiB, MiB or KiB."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"
