"""`t0repro explain` and `precompile`: what a run will do, before it starts."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t0repro.cli.options import (
    AsJson,
    GinBindings,
    GinFiles,
    GinFolders,
    GinImportAllowlist,
    GinParams,
    GinSearchPaths,
    Modules,
    ProcessOptions,
    RunMode,
    RunModes,
    SkippedNames,
    allowlist_of,
    gin_folders,
    mesh_inputs,
    t5x_inputs,
    with_groups,
)
from t0repro.cli.results import echo, print_json
from t0repro.cli.run_modes import T5xOptions, gin_inputs, parse_files, register
from t0repro.cli.spelling import LogOptions, output
from t0repro.errors import UserError, t5x_command
from t0repro.files import check_address

if TYPE_CHECKING:
    from t0repro.config.run_config import RunConfig
    from t0repro.config.t5x.gin_files import Parsed, T5xInputs


# ---- `t0repro explain`: every value of a run with the place that set it --------------------------


class Dialects(enum.StrEnum):
    """The two dialects of gin files."""

    MTF = "mtf"
    T5X = "t5x"


@with_groups
def explain(
    logs: LogOptions,
    skipped: SkippedNames,
    gin_file: GinFiles = None,
    gin_param: GinParams = None,
    gin_location_prefix: GinFolders = None,
    module_import: Modules = None,
    model_dir: Annotated[str, typer.Option("--model_dir", help="The run's model_dir.")] = "",
    as_json: AsJson = False,
    run_mode: RunModes = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
    gin_import_allowlist: GinImportAllowlist = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry_run", help="Only list what the files would import; import nothing."),
    ] = False,
    dialect: Annotated[
        Dialects | None,
        typer.Option(
            "--as", help="Translate a training run to the dialect of Mesh TensorFlow or T5X."
        ),
    ] = None,
) -> None:
    """Show every value that gin files and overrides set, with the file and line that set it.

    The files are Mesh TensorFlow's or, with --run_mode, T5X's.

    Example:
      t0repro explain --module_import t0repro.tasks.demo --gin_file dataset.gin
        --gin_file demo/t5.1.1.demo.gin --gin_param "MIXTURE_NAME = 'demo_train'"
        --gin_param "run.train_steps = 100" --gin_param "utils.run.mesh_shape = []"
      t0repro explain --run_mode train --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/pretrain.gin --gin.MODEL_DIR="'runs/c4'"
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" --gin.TRAIN_STEPS=10000
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" --gin.DROPOUT_RATE=0.0
    """
    del logs  # its options take effect as soon as they are parsed
    allowlist = allowlist_of(gin_import_allowlist)
    if dry_run:
        # The listing must not run anyone's code, so it returns before anything is imported.
        overrides = [*(gin_param or ()), *(gin_bindings or ())]
        folders = gin_search_paths.split(",") if run_mode else gin_folders(gin_location_prefix)
        _list_imports(run_mode, gin_file or (), overrides, folders, allowlist, as_json)
        return
    if run_mode:
        inputs = t5x_inputs(run_mode, gin_file, gin_bindings, gin_search_paths, allowlist)
        with t5x_command():
            _explain_t5x(inputs, as_json=as_json, dialect=dialect)
        return
    if gin_bindings:
        raise UserError(
            "--gin.NAME=VALUE overrides T5X's gin files, and without --run_mode they are read as"
            " Mesh TensorFlow's.",
            where=f"--gin.{gin_bindings[0]}",
            fix="Add --run_mode=train, eval, infer or precompile; or write --gin_param.",
        )
    echo("reading gin files ...", err=True)
    from t0repro.config.configuration import render
    from t0repro.config.mtf.dialect import describe_or_load

    folders = gin_location_prefix
    config = describe_or_load(
        mesh_inputs(
            gin_file,
            gin_param,
            folders,
            module_import,
            skipped=skipped,
            allowlist=allowlist,
            model_dir=model_dir,
        )
    ).run
    # Printed as bindings of a dialect, so that they can be pasted into a file.
    if dialect:
        _show_translation(config, dialect)
        return
    echo(config.to_json() if as_json else render(config))


def _show_translation(config: RunConfig, dialect: Dialects) -> None:
    """Prints a training run as a gin file of a dialect; on stderr, what that cannot express."""
    from t0repro.config.translation import translated

    translation = translated(config, dialect.value)
    for line in (*translation.header, "", *translation.bindings):
        echo(line)
    for line in translation.missing:
        echo(f"not expressed: {line}", err=True)


def _list_imports(
    run_mode: str | None,
    files: Sequence[str],
    overrides: Sequence[str],
    folders: Sequence[str],
    allowlist: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Prints each module that the files would import, the line, and whether it is allowed."""
    from t0repro.config import gin_imports
    from t0repro.config.configuration import in_columns

    if run_mode:
        from t0repro.config.t5x.gin_files import shipped_files

        # This package's files come last, in the order in which a run searches.
        folders = [*folders, str(shipped_files())]
    else:
        folders = gin_imports.mesh_folders(folders)
    found = gin_imports.list_imports(files, overrides, folders, allowlist)
    if as_json:
        print_json(found)
    elif found:
        words = {True: "allowed", False: "refused by --gin_import_allowlist"}
        echo(in_columns([(line.module, words[line.allowed], line.place) for line in found]))
    else:
        echo("These files import nothing.")


def _explain_t5x(inputs: T5xInputs, *, as_json: bool, dialect: Dialects | None) -> None:
    from t0repro.config.configuration import in_columns
    from t0repro.config.t5x.gin_files import parse
    from t0repro.config.t5x.model import differences
    from t0repro.config.t5x.run import converted

    if dialect and inputs.run_mode != "train":
        raise UserError(
            "Only a training run can be translated to another dialect, not a run of"
            f" {inputs.run_mode}.",
            where="--as",
            fix="Leave out --as, or give --run_mode=train.",
        )
    parsed = parse(inputs)
    if dialect:
        from t0repro.config.t5x.run import train_config

        _show_translation(train_config(parsed), dialect)
        return
    # Values come first, because they explain a refusal.
    if as_json:
        values = {item.name: {"value": item.value, "place": item.place} for item in parsed.values}
        print_json({"values": values, "imports": parsed.imports})
        converted(parsed)
        return
    echo(in_columns([(item.name, item.value, item.place) for item in parsed.values]))
    for module in parsed.imports:
        echo(f"imports {module}")
    for warning in (*parsed.warnings, *differences(parsed)):
        echo(f"warning: {warning}", err=True)
    converted(parsed)


# ---- `t0repro precompile`: whether a run fits on given devices, and how long a step takes --------


@with_groups
def precompile(
    options: T5xOptions,
    processes: ProcessOptions,
    skipped: SkippedNames,
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
    as_json: AsJson = False,
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
            _mesh_config(options, gin_param, gin_location_prefix, skipped, float32)
            if read is None
            else read[1]
        )
        from t0repro.partitioning.processes import output_folder
        from t0repro.runs import precompile as compiling

        config = compiling.adjusted(config, model_parallelism, fully_sharded, num_microbatches)
        found: list[dict[str, Any]] = []
        if suggest:
            lines = _suggestions(config, devices, chip)
        elif options.dry_run:
            lines = iter([compiling.devices_line(config, devices)])
        else:
            # T5X's precompile leaves its modules in MODEL_DIR; other modes only report.
            left = output_folder(config.model_dir) if mode is RunMode.PRECOMPILE else None
            hlo = hlo and output_folder(hlo)
            lines = compiling.precompile(config, devices, chip, hlo, left, found.append)
        said = []
        for line in lines:
            typer.echo(line, err=as_json)
            said.append(line)
        if as_json:
            print_json({"steps": found, "lines": said})


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
    skipped: SkippedNames,
    float32: bool,
) -> RunConfig:
    echo("reading gin files ...", err=True)
    from t0repro.config.mtf.dialect import describe_or_load

    inputs = mesh_inputs(
        options.gin_file, gin_param, gin_location_prefix, options.module_import, skipped=skipped
    )
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

    folders = [*options.gin_search_paths.split(","), str(shipped_files())]
    try:
        # Listed and not parsed, because parsing would fail in the wrong dialect.
        lines = list_imports(options.gin_file or (), (), folders, None)
    except UserError:  # one of Mesh TensorFlow's is not found there
        return False
    return any(line.module.partition(".")[0] in ("t5x", "__main__") for line in lines)


def _suggestions(config: RunConfig, devices: Any, chip: Any) -> Iterator[str]:
    """A line for each change that is tried to make a training run fit."""
    from t0repro.runs.precompile import suggest

    if chip is None or config.mode != "train":
        raise UserError(
            "There is nothing to suggest: the devices' memory is not known."
            if chip is None
            else "--suggest needs a training run.",
            where="--suggest",
            fix="Give a training run, and a TPU slice as --topology.",
        )
    return suggest(config, devices, chip)


def _t5x_config(inputs: T5xInputs) -> tuple[Parsed, RunConfig]:
    """T5X's parsed gin files, and the training run that they describe."""
    from t0repro.config.gin_errors import configuration_errors
    from t0repro.config.t5x.run import precompile_config, train_config

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
    from t0repro.data.batches import why_not_trained
    from t0repro.runs.preflight import check_training

    model = parsed.program.model
    vocabularies = (model.input_vocabulary, model.output_vocabulary)
    register(parsed, options, lambda: why_not_trained(config, vocabularies))
    check_training(config, vocabularies, typer.echo)


def _devices(topology: str | None) -> tuple:
    """What to compile for, what is published about it, and whether it computes in float32."""
    echo("looking for devices, with JAX ...", err=True)
    import jax

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
