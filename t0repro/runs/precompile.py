"""Compiles a run's steps for devices that need not be attached, and reports their cost there.

Nothing is allocated: the compiler only gets shapes. For TPU slices the compiler is libtpu's own.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.config.run import Run, TrainRun
from t0repro.partitioning.devices import Partitioning, describe_devices
from t0repro.partitioning.memory import ASSUMED_LENGTH
from t0repro.partitioning.topologies import Chip
from t0repro.runs.fitting import fits, format_gib
from t0repro.runs.programs import Program, arrange_run, compile_programs
from t0repro.storage import write_atomically
from t0repro.training.rematerialization import passed_through_lengths


def precompile(
    config: Run,
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
    run, partitioning, why = arrange_run(config, devices)
    yield describe_devices(partitioning, config.layout)
    if why:
        yield why
    yield from length_assumptions(config)
    for program in compile_programs(run, partitioning):
        yield from describe_program(program, run, partitioning, chip)
        found(figures(program, partitioning, chip))
        if hlo is not None and program.hlo:
            write_atomically(hlo / f"{program.name}.hlo.txt", program.hlo)
            yield f"  HLO: {hlo / program.name}.hlo.txt"
        if t5x_folder is not None and program.modules:
            files = write_t5x_files(t5x_folder, program, partitioning)
            yield f"  HLO: {', '.join(map(str, files))}"


def length_assumptions(config: Run) -> Iterator[str]:
    """A line if the data do not say how long the rows of a compiled step are."""
    if not isinstance(config, TrainRun) or config.plan.converter != "pass_through":
        return
    if unbound := [name for name, n in passed_through_lengths(config).items() if n is None]:
        yield (
            f"The task gives the model's features, and no length is bound for"
            f" {' and '.join(unbound)}: rows of {ASSUMED_LENGTH} tokens are assumed. Bind them in"
            " TASK_FEATURE_LENGTHS."
        )


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


def describe_program(
    program: Program, config: Run, partitioning: Partitioning, chip: Chip | None
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
    parts = [f"{len(sent)} {kind} {format_gib(sum(sent))}" for kind, sent in sorted(kinds.items())]
    sent = format_gib(program.sent)
    yield f"  communication: a device sends {sent} ({', '.join(parts) or 'nothing'})"
    if chip is not None:
        yield (
            f"  predicted step: {predict_seconds(program, partitioning, chip):.3g} s ="
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
        "predicted_seconds": known and predict_seconds(program, partitioning, known),
    }


def predict_seconds(program: Program, partitioning: Partitioning, chip: Chip) -> float:
    """Seconds per step at published peaks, with computation and communication in sequence."""
    return program.flops / partitioning.mesh.size / chip.flops + program.sent / chip.link


def _memory(program: Program) -> Iterator[str]:
    listed = " + ".join(f"{name} {format_gib(size)}" for name, size in program.parts.items())
    yield f"  memory of a device: {format_gib(program.memory.total)} = {listed}"
    found, memory = program.by_shapes, program.memory
    beside = memory.gradients + memory.activations + memory.temporaries
    # This is 0 if a compiler refuses the program without saying how much memory it needs.
    if found is not None and found.gradients + found.activations > beside > 0:
        yield (
            f"  by shapes, gradients are {format_gib(found.gradients)} and activations"
            f" {format_gib(found.activations)}: not all of that is in this memory at once"
        )
