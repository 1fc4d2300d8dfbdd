"""`t0repro train`: trains what T5X's gin files describe; and `t0repro run --run_mode=...`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from t0repro.cli import aux
from t0repro.cli.gin_options import (
    GinBindings,
    GinFiles,
    GinImportAllowlist,
    GinSearchPaths,
    RunMode,
)
from t0repro.cli.options import Modules
from t0repro.cli.t5x_run import CacheDirs, DryRun, TfdsDataDir, parse_files, register
from t0repro.errors import UserError

MultiprocessGpu = Annotated[
    bool, typer.Option("--multiprocess_gpu", help="Not supported: a run is one process.")
]


def train(
    gin_file: GinFiles = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
    gin_import_allowlist: GinImportAllowlist = None,
    module_import: Modules = None,
    tfds_data_dir: TfdsDataDir = None,
    seqio_additional_cache_dirs: CacheDirs = None,
    dry_run: DryRun = False,
    allow_changed: Annotated[
        bool,
        typer.Option(help="Train on in a model_dir although the optimizer or the model changed."),
    ] = False,
    multiprocess_gpu: MultiprocessGpu = False,
    coordinator_address: Annotated[
        str | None, typer.Option(help="Address of the first of several processes.")
    ] = None,
    process_count: Annotated[int | None, typer.Option(help="Number of processes.")] = None,
    process_index: Annotated[int | None, typer.Option(help="Number of this process.")] = None,
    initialization_timeout: Annotated[
        int | None, typer.Option(help="Seconds to wait for the other processes.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="MODEL_DIR is runs/NAME unless it is set.")
    ] = None,
    platform: Annotated[str | None, typer.Option(help="Must stand for this machine.")] = None,
    cell: Annotated[str | None, typer.Option(help="Must stand for this machine.")] = None,
    auxiliary_job_mixtures: aux.Mixtures = None,
    auxiliary_job_gin_file: aux.JobGinFile = None,
    replace_gin_file: aux.ReplaceGinFile = False,
    final_auxiliary_job_steps: aux.FinalSteps = 0,
    auxiliary_job_build_target_path: aux.BuildTarget = "eval",
    auxiliary_job_platform: aux.Platform = None,
    auxiliary_job_cell: aux.Cell = None,
    machines: aux.Machines = None,
    launcher: aux.LauncherName = None,
    max_parallel: aux.MaxParallel = 1,
    poll_seconds: aux.PollSeconds = 10.0,
) -> None:
    """Train what T5X's gin files describe: pretraining or fine-tuning.

    With --auxiliary_job_mixtures every checkpoint is evaluated, or fine-tuned, as training goes
    on: docs/auxiliary_jobs.md.

    Example:
      t0repro train --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/pretrain.gin --gin.MODEL_DIR="'runs/c4'"
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" --gin.TRAIN_STEPS=10000
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" --gin.DROPOUT_RATE=0.0
    """
    _check_processes(multiprocess_gpu, coordinator_address, process_count, process_index)
    del initialization_timeout
    _check_machine(machines, platform, cell)
    named = [f"MODEL_DIR = 'runs/{name}'"] if name else []
    bindings = [*named, *(gin_bindings or ())]  # the later one wins
    parsed = parse_files("train", gin_file, bindings, gin_search_paths, gin_import_allowlist)
    from t0repro.config.t5x.run import train_config

    config, model = train_config(parsed), parsed.program.model
    data = parsed.program.train_dataset_cfg
    modules = [*(module_import or ()), *([data.module] if data.module else [])]
    register(parsed, modules, tfds_data_dir, seqio_additional_cache_dirs)
    vocabularies = (model.input_vocabulary, model.output_vocabulary)
    from t0repro.runs import dry_run as checks

    if dry_run:
        checks.check_training(config, vocabularies, typer.echo)
        return
    from t0repro.jobs.beside import AuxiliaryOptions, auxiliary_jobs_beside
    from t0repro.runs import planned_start

    with contextlib.ExitStack() as beside:
        if auxiliary_job_mixtures or auxiliary_job_gin_file:
            jobs = AuxiliaryOptions(
                mixtures=auxiliary_job_mixtures,
                gin_file=auxiliary_job_gin_file,
                train_gin_files=tuple(gin_file or ()),
                gin_search_paths=gin_search_paths,
                replace_gin_file=replace_gin_file,
                final_steps=final_auxiliary_job_steps,
                build_target=auxiliary_job_build_target_path,
                platform=auxiliary_job_platform,
                cell=auxiliary_job_cell,
                machines=machines,
                launcher=launcher,
                max_parallel=max_parallel,
                poll_seconds=poll_seconds,
            )
            beside.enter_context(auxiliary_jobs_beside(config.model_dir, jobs))
        planned_start.start(parsed, config, allow_changed=allow_changed)


def _check_machine(machines: Path | None, platform: str | None, cell: str | None) -> None:
    """Refuses to train elsewhere than here; labels that no file explains mean this machine."""
    from t0repro.jobs.machines import find_machine

    machine = find_machine(machines, platform, cell)
    if machine.launcher != "local":
        raise UserError(
            f"The platform or cell stands for {machine.launcher}, but this command trains here.",
            where="--platform" if platform else "--cell",
            fix="Submit this command to that machine, without --platform and --cell.",
        )


def _check_processes(
    multiprocess_gpu: bool, address: str | None, count: int | None, index: int | None
) -> None:
    """Refuses several processes; the flags that describe a single one pass."""
    if count not in (None, 1) or index not in (None, 0):
        raise UserError(
            "A run of several processes is not supported.",
            where="--process_count" if count not in (None, 1) else "--process_index",
            fix="Start one process on a machine with all the devices.",
        )
    if multiprocess_gpu and address is None:
        raise UserError(
            "--multiprocess_gpu needs --coordinator_address.",
            where="--multiprocess_gpu",
            fix="Leave it out: one process drives all devices of a machine.",
        )


def run(
    context: typer.Context,
    run_mode: Annotated[RunMode, typer.Option("--run_mode", help="What to do.")],
) -> None:
    """Run one of T5X's run modes: the same as the command of that name, with its options.

    Example:
      t0repro run --run_mode=train --gin_file run.gin --gin.MODEL_DIR="'runs/a'"
    """
    if run_mode is RunMode.PRECOMPILE:
        raise UserError(
            "The run mode precompile, with T5X's precompile.gin, is not supported.",
            where="--run_mode",
            fix="Compile a training: t0repro precompile --run_mode train, with its gin files.",
        )
    group: Any = context.parent.command if context.parent else None
    command = group.get_command(context, run_mode.value)
    with command.make_context(run_mode.value, list(context.args), parent=context.parent) as inner:
        command.invoke(inner)
