"""`t0repro train`: trains what T5X's gin files describe; and `t0repro run --run_mode=...`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

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
) -> None:
    """Train what T5X's gin files describe: pretraining or fine-tuning.

    Example:
      t0repro train --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/pretrain.gin --gin.MODEL_DIR="'runs/c4'"
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" --gin.TRAIN_STEPS=10000
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" --gin.DROPOUT_RATE=0.0
    """
    _check_processes(multiprocess_gpu, coordinator_address, process_count, process_index)
    del initialization_timeout
    parsed = parse_files("train", gin_file, gin_bindings, gin_search_paths, gin_import_allowlist)
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
    from t0repro.runs import planned_start

    planned_start.start(parsed, config, allow_changed=allow_changed)


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
