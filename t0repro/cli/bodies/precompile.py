"""`t0repro precompile`, once T5X's gin files are parsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import typer

from t0repro.cli.bodies.registration import register_for_training
from t0repro.cli.gin_options import SkippedNames
from t0repro.cli.mesh_inputs import mesh_inputs
from t0repro.cli.results import echo, print_json
from t0repro.cli.t5x_options import T5xOptions
from t0repro.config.mtf.dialect import load
from t0repro.config.run import Run, TrainRun
from t0repro.config.t5x.gin_files import Parsed
from t0repro.errors import UserError
from t0repro.partitioning import topologies
from t0repro.partitioning.devices import describe_devices
from t0repro.partitioning.processes import output_folder
from t0repro.runs import fitting
from t0repro.runs import precompile as compiling
from t0repro.runs.preflight import check_training
from t0repro.runs.programs import shard_over


def precompile(
    options: T5xOptions,
    read: tuple[Parsed, TrainRun] | None,
    skipped: SkippedNames,
    topology: str | None,
    *,
    changes: Sequence[Any],
    leaves_modules: bool,
    hlo: Path | None,
    suggest: bool,
    as_json: bool,
) -> None:
    """Compiles a run's steps, or only checks or suggests, and prints what came out.

    Args:
      options: The flags.
      read: T5X's gin files and the run that they describe; None for Mesh TensorFlow's.
      skipped: What Mesh TensorFlow's gin files may name in vain.
      topology: What to compile for; None for this machine's devices.
      changes: Arguments of `adjust_run`.
      leaves_modules: Whether the compiled modules stay in the run's MODEL_DIR.
      hlo: A folder for the compiled programs.
      suggest: Whether to look for changes that make the run fit.
      as_json: Whether to print JSON.

    Raises:
      UserError: If the run cannot be compiled for these devices.
    """
    if read is not None and options.dry_run:
        _check_tasks(*read, options)
    devices, chip, float32 = _devices(topology)
    config = _mesh_config(options, skipped, float32) if read is None else read[1]
    config = fitting.adjust_run(config, *changes)
    steps: list[dict[str, Any]] = []
    if suggest:
        lines = _suggestions(config, devices, chip)
    elif options.dry_run:
        lines = iter([describe_devices(shard_over(config, devices), config.layout)])
    else:
        left = output_folder(config.model_dir) if leaves_modules else None
        hlo = hlo and output_folder(hlo)
        lines = compiling.precompile(config, devices, chip, hlo, left, steps.append)
    printed = []
    for line in lines:
        typer.echo(line, err=as_json)
        printed.append(line)
    if as_json:
        print_json({"steps": steps, "lines": printed})


def _mesh_config(options: T5xOptions, skipped: SkippedNames, float32: bool) -> Run:
    echo("reading gin files ...", err=True)
    inputs = mesh_inputs(options, options.module_import, skipped)
    return load(inputs, float32_activations=float32).run


def _suggestions(config: Run, devices: Any, chip: Any) -> Iterator[str]:
    """A line for each change that is tried to make a training run fit."""
    if chip is None or not isinstance(config, TrainRun):
        raise UserError(
            "There is nothing to suggest: the devices' memory is not known."
            if chip is None
            else "--suggest needs a training run.",
            where="--suggest",
            fix="Name a TPU slice, as --topology=v5e-8 (EXTRAS=tpu), or leave out --suggest."
            if chip is None
            else "Give a training run.",
        )
    return fitting.suggest(config, devices, chip)


def _check_tasks(parsed: Parsed, config: TrainRun, options: T5xOptions) -> None:
    """Checks the tasks and vocabularies of a training run, as its dry run does."""
    vocabularies = register_for_training(parsed, config, options)
    check_training(config, vocabularies, typer.echo)


def _devices(topology: str | None) -> tuple:
    """What to compile for, what is published about it, and whether it computes in float32."""
    if topology is not None and not topology.startswith("cpu"):
        return *topologies.devices_of(topology), False
    if topology is not None:
        count = topology.removeprefix("cpu-")
        if not count.isdigit() or not int(count):
            raise UserError(
                f"There is no topology {topology!r}.",
                where="--topology",
                fix="Give a number of virtual CPU devices, as cpu-8.",
            )
        # Before JAX first uses a device, which fixes their number.
        jax.config.update("jax_num_cpu_devices", int(count))
    devices = jax.devices()
    # Both stacks compute in float32 on a CPU, whatever gin binds.
    return devices, topologies.find_chip(devices[0].device_kind), devices[0].platform == "cpu"
