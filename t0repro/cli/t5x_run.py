"""`t0repro eval` and `t0repro infer`: T5X's run modes, with its flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from t0repro.cli.gin_options import (
    GinBindings,
    GinFiles,
    GinImportAllowlist,
    GinSearchPaths,
    allowlist_of,
    t5x_inputs,
)
from t0repro.cli.options import Modules

if TYPE_CHECKING:
    from t0repro.config.t5x.gin_files import Parsed

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry_run",
        help="Only check: macros, tasks, caches, vocabularies, checkpoints. Nothing is written.",
    ),
]
TfdsDataDir = Annotated[
    str | None, typer.Option("--tfds_data_dir", help="The folder of TensorFlow Datasets' data.")
]
CacheDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--seqio_additional_cache_dirs",
        help="Folders of SeqIO's caches, separated by commas; repeatable.",
    ),
]


def evaluate(
    gin_file: GinFiles = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
    gin_import_allowlist: GinImportAllowlist = None,
    module_import: Modules = None,
    tfds_data_dir: TfdsDataDir = None,
    seqio_additional_cache_dirs: CacheDirs = None,
    dry_run: DryRun = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on as checkpoints come (mode latest or all).")
    ] = False,
    until: Annotated[
        int | None, typer.Option("--until", help="With --watch: end after this step.", min=0)
    ] = None,
) -> None:
    """Evaluate checkpoints with the metrics of SeqIO tasks, as T5X's gin files say.

    Results are below EVAL_OUTPUT_DIR/inference_eval: TensorBoard's events, metrics and predictions.
    What evaluated.json there has is not done again.

    Example:
      t0repro eval --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/eval.gin --gin.DROPOUT_RATE=0.0
        --gin.MIXTURE_OR_TASK_NAME="'my_task'" --gin.CHECKPOINT_PATH="'runs/c4/checkpoint_1000'"
        --gin.EVAL_OUTPUT_DIR="'runs/eval'" --module_import my_tasks
    """
    parsed = parse_files("eval", gin_file, gin_bindings, gin_search_paths, gin_import_allowlist)
    from t0repro.config.t5x.inference import eval_plan

    plan = eval_plan(parsed)
    register(parsed, module_import, tfds_data_dir, seqio_additional_cache_dirs)
    if dry_run:
        from t0repro.runs.dry_run import check_inference

        check_inference(plan, typer.echo)
        return
    from t0repro.runs.task_eval import evaluate_checkpoints

    evaluate_checkpoints(plan, watch=watch, until=until)


def infer(
    gin_file: GinFiles = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
    gin_import_allowlist: GinImportAllowlist = None,
    module_import: Modules = None,
    tfds_data_dir: TfdsDataDir = None,
    seqio_additional_cache_dirs: CacheDirs = None,
    dry_run: DryRun = False,
    shard_id: Annotated[
        int | None, typer.Option("--shard_id", help="Overrides infer.shard_id.", min=0)
    ] = None,
) -> None:
    """Write predictions or scores of examples as JSON lines, as T5X's gin files say.

    An interrupted run goes on where it was.

    Example:
      t0repro infer --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/infer.gin --gin.DROPOUT_RATE=0.0
        --gin.MIXTURE_OR_TASK_NAME="'my_task'" --gin.CHECKPOINT_PATH="'runs/c4/checkpoint_1000'"
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 64}"
        --gin.INFER_OUTPUT_DIR="'runs/infer'" --module_import my_tasks
    """
    bindings = [*(gin_bindings or ())]
    if shard_id is not None:
        bindings.append(f"infer.shard_id = {shard_id}")
    parsed = parse_files("infer", gin_file, bindings, gin_search_paths, gin_import_allowlist)
    from t0repro.config.t5x.inference import infer_plan

    plan = infer_plan(parsed)
    register(parsed, module_import, tfds_data_dir, seqio_additional_cache_dirs)
    if dry_run:
        from t0repro.runs.dry_run import check_inference

        check_inference(plan, typer.echo)
        return
    from t0repro.runs import batch_infer

    batch_infer.infer(plan)


def parse_files(
    run_mode: str,
    files: Sequence[str] | None,
    bindings: Sequence[str] | None,
    search_paths: str,
    allowlist: Sequence[str] | None,
) -> Parsed:
    """The program that the command line's gin files configure; shows warnings.

    Raises:
      UserError: see `t0repro.config.t5x.gin_files.parse`.
    """
    from t0repro.config.t5x.gin_files import parse

    parsed = parse(t5x_inputs(run_mode, files, bindings, search_paths, allowlist_of(allowlist)))
    for warning in parsed.warnings:
        typer.echo(f"warning: {warning}", err=True)
    return parsed


def register(
    parsed: Parsed,
    modules: Sequence[str] | None,
    tfds_data_dir: str | None,
    cache_dirs: Sequence[str] | None,
) -> None:
    """Registers the tasks of the modules that the gin files and the command line name.

    Raises:
      UserError: If a module cannot be found.
    """
    from t0repro.mesh import compat
    from t0repro.tasks.registration import load_tasks

    compat.quiet_logs()
    compat.install()
    import seqio

    if tfds_data_dir:
        seqio.set_tfds_data_dir_override(tfds_data_dir)
    folders = [folder for value in cache_dirs or () for folder in value.split(",") if folder]
    if folders:
        seqio.add_global_cache_dirs(folders)
    load_tasks([*parsed.imports, *(modules or ())], into_seqio=True)
