"""`t0repro precompile`: whether a run fits on given devices, and how long a step takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t0repro.cli.options import (
    GinFolders,
    GinParams,
    ProcessOptions,
    RunMode,
    RunModes,
    mesh_inputs,
    with_groups,
)
from t0repro.cli.results import echo
from t0repro.cli.run_modes import T5xOptions, gin_inputs, parse_files, register
from t0repro.cli.spelling import output
from t0repro.files import check_address

if TYPE_CHECKING:
    from t0repro.config.run_config import RunConfig
    from t0repro.config.t5x.gin_files import Parsed, T5xInputs


@with_groups
def precompile(
    options: T5xOptions,
    processes: ProcessOptions,
    gin_param: GinParams = None,
    gin_location_prefix: GinFolders = None,
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
) -> None:
    """Compile a run's steps and report memory, FLOPs, communication and time.

    Compiles the train step, or scoring and generation, for a TPU slice (with libtpu, the extra
    tpu), for virtual CPU devices, or for this machine's own. Nothing is allocated or run, and no
    data is read, unless --dry_run checks the tasks. T5X's precompile.gin leaves the compiled
    modules in its MODEL_DIR; with --run_mode train, give the files of a T5X training run.

    Example:
      t0repro precompile --topology v3-8 --module_import t0repro.tasks.demo --gin_file dataset.gin
        --gin_file demo/t5.1.1.demo.gin --gin_param "MIXTURE_NAME = 'demo_train'"
        --gin_param "run.train_steps = 100" --gin_param "utils.run.mesh_shape = []"
      t0repro precompile --topology v3-8 --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/precompile.gin --gin.DROPOUT_RATE=0.0
        --gin.MODEL_DIR="'runs/compiled'" --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'"
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}"
    """
    mode = _t5x_mode(options, run_mode, gin_param)
    # T5X's files first, so that their errors are reported before JAX is imported.
    read = None if mode is None else _t5x_config(gin_inputs(mode.value, options))
    if mode is RunMode.PRECOMPILE and read is not None:
        check_address(read[1].model_dir, read[1].provenance.get("model_dir", "MODEL_DIR"))
    with _joined(processes, topology):
        if read is not None and options.dry_run:
            _check_tasks(*read, options)
        devices, chip, float32 = _devices(topology)
        config = (
            _mesh_config(options, gin_param, gin_location_prefix, float32)
            if read is None
            else read[1]
        )
        from t0repro.partitioning.processes import output_folder
        from t0repro.runs import precompile as compiling

        config = compiling.adjusted(config, model_parallelism, fully_sharded, num_microbatches)
        if suggest:
            _suggest(config, devices, chip)
        elif options.dry_run:
            typer.echo(compiling.devices_line(config, devices))
        else:
            # T5X's precompile leaves its modules in MODEL_DIR; other modes only report.
            left = output_folder(config.model_dir) if mode is RunMode.PRECOMPILE else None
            hlo = hlo and output_folder(hlo)
            for line in compiling.precompile(config, devices, chip, hlo, left):
                typer.echo(line)


@contextlib.contextmanager
def _joined(processes: ProcessOptions, topology: str | None) -> Iterator[None]:
    """A context in which JAX's devices are those to compile for, or do not matter.

    Raises:
      UserError: if several processes are to compile for devices that none of them has.
    """
    if topology is None:
        with processes.joined():
            yield
        return
    if processes != ProcessOptions():
        from t0repro.errors import UserError

        raise UserError(
            "Only a single process can compile for devices that are not attached.",
            where=f"--topology={topology}",
            fix="Leave out --topology, for the devices of all processes, or leave out their flags.",
        )
    # Before JAX is imported, so that compiling for other devices does not occupy local ones.
    os.environ["JAX_PLATFORMS"] = "cpu"
    yield


def _mesh_config(
    options: T5xOptions,
    gin_param: list[str] | None,
    gin_location_prefix: list[str] | None,
    float32: bool,
) -> RunConfig:
    echo("reading gin files ...", err=True)
    from t0repro.config.mtf.dialect import describe_or_load

    inputs = mesh_inputs(options.gin_file, gin_param, gin_location_prefix, options.module_import)
    return describe_or_load(inputs, float32_activations=float32).run


def _t5x_mode(
    options: T5xOptions, run_mode: RunMode | None, gin_param: list[str] | None
) -> RunMode | None:
    """The run mode of T5X that the gin files are for; None if they are Mesh TensorFlow's."""
    # Only Mesh TensorFlow's dialect has --gin_param, and only T5X's has --gin.NAME.
    if run_mode is not None or gin_param:
        return run_mode
    return RunMode.PRECOMPILE if options.gin_bindings or _import_t5x(options) else None


def _import_t5x(options: T5xOptions) -> bool:
    """Whether a gin file imports T5X or its script, as all of T5X's do."""
    from t0repro.config.gin_imports import list_imports
    from t0repro.config.t5x.gin_files import shipped_files
    from t0repro.errors import UserError

    folders = [*options.gin_search_paths.split(","), str(shipped_files())]
    try:
        # Listed and not parsed, because parsing would fail in the wrong dialect.
        lines = list_imports(options.gin_file or (), (), folders, None)
    except UserError:  # one of Mesh TensorFlow's is not found there
        return False
    return any(line.module.partition(".")[0] in ("t5x", "__main__") for line in lines)


def _suggest(config: RunConfig, devices: Any, chip: Any) -> None:
    """Prints each change that is tried to make a training run fit."""
    from t0repro.errors import UserError
    from t0repro.runs.precompile import suggest

    if chip is None or config.mode != "train":
        raise UserError(
            "There is nothing to suggest: the devices' memory is not known."
            if chip is None
            else "--suggest needs a training run.",
            where="--suggest",
            fix="Give a training run, and a TPU slice as --topology.",
        )
    for line in suggest(config, devices, chip):
        typer.echo(line)


def _t5x_config(inputs: T5xInputs) -> tuple[Parsed, RunConfig]:
    """T5X's parsed gin files, and the training run that they describe."""
    from t0repro.config.gin_errors import configuration_errors
    from t0repro.config.t5x.run import precompile_config, train_config
    from t0repro.errors import UserError

    readers = {"train": train_config, "precompile": precompile_config}
    if inputs.run_mode not in readers:
        raise UserError(
            f"precompile compiles T5X's training runs, not {inputs.run_mode!r}.",
            where="--run_mode",
            fix="Give precompile.gin, or --run_mode train and the gin files of a training run.",
        )
    with configuration_errors():
        parsed = parse_files(inputs)
        return parsed, readers[inputs.run_mode](parsed)


def _check_tasks(parsed: Parsed, config: RunConfig, options: T5xOptions) -> None:
    """Checks the tasks and vocabularies of a training run, as its dry run does."""
    from t0repro.data.described import why_not_trained
    from t0repro.runs.preflight import check_training

    model = parsed.program.model
    vocabularies = (model.input_vocabulary, model.output_vocabulary)
    register(parsed, options, lambda: why_not_trained(config, vocabularies))
    check_training(config, vocabularies, typer.echo)


def _devices(topology: str | None) -> tuple:
    """What to compile for, what is published about it, and whether it computes in float32."""
    echo("looking for devices, with JAX ...", err=True)
    import jax

    from t0repro.errors import UserError
    from t0repro.partitioning import topologies

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
    return devices, topologies.published(devices[0].device_kind), devices[0].platform == "cpu"
