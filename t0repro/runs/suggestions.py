"""Finds, by compiling, how to make a training run fit while changing it as little as possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from t0repro.config.run_config import Recompute, RunConfig
from t0repro.errors import UserError
from t0repro.partitioning.devices import Partitioning
from t0repro.partitioning.topologies import Chip
from t0repro.runs.precompile import arranged, compiled_programs, fits, more_recomputation


def suggest(config: RunConfig, devices: Sequence[Any], chip: Chip) -> Iterator[str]:
    """Compiles ever smaller variants of a training run until one fits; yields a line for each.

    Args:
      config: a training run.
      devices: to compile for.
      chip: what is published about them.
    """
    run, partitioning, why = arranged(config, devices)
    if why:
        yield why
    if all(program.fits_in(chip) for program in compiled_programs(run, partitioning)):
        yield "as configured: fits"
        return
    for change, variant in variants(run, partitioning):
        # A layout that cannot divide the model is reported; the next one may.
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
    """What to try, each with the changes before it: what costs least time comes first.

    Microbatches cost some utilisation; `minimal` recomputation about 1% more operations; full
    sharding communication, of which a part overlaps with computing; `full` recomputation up to a
    third more operations; and model parallelism communication that nothing overlaps with.
    """
    changes: dict[str, str] = {}

    def with_change(kind: str, text: str) -> tuple[str, RunConfig]:
        changes[kind] = text
        return ", ".join(changes.values()), config

    rows, data = config.batch_size // config.num_microbatches, partitioning.data
    # By halves, so that microbatches stay equal.
    while rows % 2 == 0 and rows // 2 >= data:
        rows //= 2
        config = dataclasses.replace(config, num_microbatches=2 * config.num_microbatches)
        yield with_change("parts", f"{config.num_microbatches} microbatches")
    ways = more_recomputation(config.model)

    def recomputing(way: Recompute) -> tuple[str, RunConfig]:
        nonlocal config
        model = dataclasses.replace(config.model, recompute=way)
        config = dataclasses.replace(config, model=model)
        return with_change("recompute", f"recompute = {way!r}")

    if "minimal" in ways:
        yield recomputing("minimal")
    if not config.layout.fully_sharded and data > 1:
        layout = dataclasses.replace(config.layout, fully_sharded=True)
        config = dataclasses.replace(config, layout=layout)
        yield with_change("sharding", "full sharding")
    if "full" in ways:
        yield recomputing("full")
    parts = config.layout.model
    while data % 2 == 0 and config.model.num_heads % (2 * parts) == 0:
        parts, data = 2 * parts, data // 2
        layout = dataclasses.replace(config.layout, data=data, model=parts, topology=None)
        config = dataclasses.replace(config, layout=layout)
        yield with_change("model", f"model parallelism {parts}")
