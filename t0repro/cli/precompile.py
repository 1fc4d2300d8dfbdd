"""`t0repro precompile`: whether a run fits on given devices, and how long a step takes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.gin_options import Demo, RunMode, RunModes, SkippedNames
from t0repro.cli.groups import expand_groups
from t0repro.cli.options import AsJson, ProcessOptions
from t0repro.cli.paths import output
from t0repro.cli.results import echo
from t0repro.cli.t5x_options import T5xOptions, parse_files
from t0repro.config.gin.errors import configuration_errors
from t0repro.config.run import TrainRun
from t0repro.config.t5x.gin_files import Parsed, T5xInputs
from t0repro.config.t5x.run import read_precompile_run, read_train_run
from t0repro.errors import UserError
from t0repro.storage import check_address
from t0repro.tasks.registry import DEMO_MODULE


@expand_groups
def precompile(
    options: T5xOptions,
    processes: ProcessOptions,
    skipped: SkippedNames,
    topology: Annotated[
        str | None,
        typer.Option(help="v3-512, v4-128, v5e-256, ..., cpu-8; by default this machine's own."),
    ] = None,
    model_parallelism: Annotated[
        int | None, typer.Option(min=1, help="Devices that shard each layer; overrides gin.")
    ] = None,
    fully_sharded: Annotated[
        bool, typer.Option("--fully_sharded", help="Shard parameters and slots across all devices.")
    ] = False,
    num_microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches per batch; overrides gin.")
    ] = None,
    hlo: Annotated[
        Path | None, typer.Option(callback=output, help="Folder for the compiled programs.")
    ] = None,
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest", help="If a training run does not fit, find changes that make it fit."
        ),
    ] = False,
    run_mode: RunModes = None,
    demo: Demo = False,
    as_json: AsJson = False,
) -> None:
    r"""Compile a run's steps and report memory, FLOPs, communication and time.

    Compiles the train step, or scoring and generation, for a TPU slice (with libtpu, the extra
    tpu), for virtual CPU devices, or for this machine's own. Nothing is allocated or run, and no
    data is read, unless --dry_run checks the tasks. T5X's precompile.gin leaves the compiled
    modules in its MODEL_DIR; with --run_mode train, give the files of a T5X training run.

    Example:
      t0repro precompile --demo --topology v3-8
      t0repro precompile --topology v3-8 \
        --gin_file t5x/examples/t5/t5_1_1/small.gin \
        --gin_file t5x/configs/runs/precompile.gin \
        --gin.DROPOUT_RATE=0.0 --gin.MODEL_DIR="'runs/compiled'" \
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" \
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}"
    """
    if demo:
        modules = [DEMO_MODULE, *(options.module_import or ())]
        options = dataclasses.replace(options.with_demo(), module_import=modules)
    mode = run_mode
    if mode is None and options.import_t5x():
        mode = RunMode.PRECOMPILE
    # T5X's files first, so that their errors are reported before JAX is imported.
    read = None if mode is None else _t5x_config(options.t5x_inputs(mode.value))
    if mode is RunMode.PRECOMPILE and read is not None:
        check_address(read[1].model_dir, read[1].provenance.get("model_dir", "MODEL_DIR"))
    with _join_processes(processes, topology):
        echo("looking for devices, with JAX ...", err=True)
        from t0repro.cli.bodies import precompile as compiling

        compiling.precompile(
            options,
            read,
            skipped,
            topology,
            changes=(model_parallelism, fully_sharded, num_microbatches),
            # T5X's precompile leaves its modules in MODEL_DIR; other modes only report.
            leaves_modules=mode is RunMode.PRECOMPILE,
            hlo=hlo,
            suggest=suggest,
            as_json=as_json,
        )


@contextlib.contextmanager
def _join_processes(processes: ProcessOptions, topology: str | None) -> Iterator[None]:
    """A context in which JAX's devices are those to compile for, or do not matter.

    Raises:
      UserError: if several processes are to compile for devices that none of them has.
    """
    if topology is None:
        with processes.joined():
            yield
        return
    if processes != ProcessOptions():
        raise UserError(
            "Only a single process can compile for devices that are not attached.",
            where=f"--topology={topology}",
            fix="Leave out --topology, for the devices of all processes, or leave out their flags.",
        )
    # Before JAX is imported, so that compiling for other devices does not occupy local ones.
    os.environ["JAX_PLATFORMS"] = "cpu"
    yield


def _t5x_config(inputs: T5xInputs) -> tuple[Parsed, TrainRun]:
    """T5X's parsed gin files, and the training run that they describe."""
    readers = {"train": read_train_run, "precompile": read_precompile_run}
    if inputs.run_mode not in readers:
        raise UserError(
            f"precompile compiles T5X's training runs, not {inputs.run_mode!r}.",
            where="--run_mode",
            fix="Give precompile.gin, or --run_mode train and the gin files of a training run.",
        )
    with configuration_errors():
        parsed = parse_files(inputs)
        return parsed, readers[inputs.run_mode](parsed)
