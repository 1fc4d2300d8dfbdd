"""`t0repro eval` and `t0repro infer`: T5X's run modes, and the flags of all of its run modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import typer

from t0repro.cli.echo import echo
from t0repro.cli.gin_options import (
    GinBindings,
    GinFiles,
    GinImportAllowlist,
    GinSearchPaths,
    allowlist_of,
    t5x_inputs,
)
from t0repro.cli.log_flags import LogOptions
from t0repro.cli.option_groups import with_groups
from t0repro.cli.options import Modules
from t0repro.cli.process_flags import ProcessOptions
from t0repro.files import check_output

if TYPE_CHECKING:
    from t0repro.config.inference_plan import InferencePlan
    from t0repro.config.t5x.gin_files import Parsed, T5xInputs

Plan = TypeVar("Plan", bound="InferencePlan")


@dataclasses.dataclass(frozen=True)
class T5xOptions(LogOptions):
    """What every run mode of T5X takes."""

    HEADING: ClassVar = "Gin files and data"

    gin_file: GinFiles = None
    gin_bindings: GinBindings = None
    gin_search_paths: GinSearchPaths = "."
    gin_import_allowlist: GinImportAllowlist = None
    module_import: Modules = None
    tfds_data_dir: Annotated[
        str | None, typer.Option(help="The folder of TensorFlow Datasets' data.")
    ] = None
    seqio_additional_cache_dirs: Annotated[
        list[str] | None,
        typer.Option(help="Folders of SeqIO's caches, separated by commas; repeatable."),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry_run",
            help="Only check: macros, tasks, caches, vocabularies, checkpoints. Nothing is"
            " written.",
        ),
    ] = False


@with_groups
def evaluate(
    options: T5xOptions,
    processes: ProcessOptions,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Continue as checkpoints appear (mode latest or all)."),
    ] = False,
    until: Annotated[
        int | None, typer.Option("--until", help="With --watch: stop after this step.", min=0)
    ] = None,
) -> None:
    """Evaluate checkpoints with the metrics of SeqIO tasks, as T5X's gin files say.

    Results are below EVAL_OUTPUT_DIR/inference_eval: TensorBoard's events, metrics and predictions.
    Checkpoints that evaluated.json there lists are skipped, unless they were replaced since.

    Example:
      t0repro eval --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/eval.gin --gin.DROPOUT_RATE=0.0
        --gin.MIXTURE_OR_TASK_NAME="'my_task'" --gin.CHECKPOINT_PATH="'runs/c4/checkpoint_1000'"
        --gin.EVAL_OUTPUT_DIR="'runs/eval'" --module_import my_tasks
    """
    parsed = parse_files(gin_inputs("eval", options))
    # Processes join before anything asks JAX for its devices.
    with processes.joined():
        from t0repro.config.t5x.inference import eval_plan

        plan = eval_plan(parsed)
        _check_output(plan, parsed, "evaluate.output_dir")
        # Once the gin files are known to be sound: importing tasks takes seconds.
        register(parsed, options)
        if options.dry_run:
            from t0repro.runs.preflight import check_inference

            check_inference(plan, typer.echo)
            return
        from t0repro.evaluation.seqio_evaluator import FOLDER
        from t0repro.locks import folder_lock
        from t0repro.partitioning.processes import held_by_first
        from t0repro.runs.description import describe_inference
        from t0repro.runs.task_eval import evaluate_checkpoints

        # Not EVAL_OUTPUT_DIR itself, which may be the folder that a training run holds.
        results = Path(plan.output_dir, FOLDER)
        fix = "Wait for it to end, or bind another EVAL_OUTPUT_DIR."
        with held_by_first(lambda: folder_lock(results, "evaluation", fix=fix)):
            plan = _with_own_output(plan)
            evaluate_checkpoints(
                plan,
                watch=watch,
                until=until,
                describe=lambda: describe_inference(plan, parsed.gin_text),
            )


@with_groups
def infer(
    options: T5xOptions,
    processes: ProcessOptions,
    shard_id: Annotated[
        int | None, typer.Option("--shard_id", help="Overrides infer.shard_id.", min=0)
    ] = None,
) -> None:
    """Write predictions or scores of examples as JSON lines, as T5X's gin files say.

    An interrupted run continues where it stopped.

    Example:
      t0repro infer --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/infer.gin --gin.DROPOUT_RATE=0.0
        --gin.MIXTURE_OR_TASK_NAME="'my_task'" --gin.CHECKPOINT_PATH="'runs/c4/checkpoint_1000'"
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 64}"
        --gin.INFER_OUTPUT_DIR="'runs/infer'" --module_import my_tasks
    """
    # Last, so that the flag wins over the gin files.
    last = [] if shard_id is None else [f"infer.shard_id = {shard_id}"]
    parsed = parse_files(gin_inputs("infer", options, last=last))
    with processes.joined():
        from t0repro.config.t5x.inference import infer_plan

        plan = infer_plan(parsed)
        _check_output(plan, parsed, "infer.output_dir")
        register(parsed, options)
        if options.dry_run:
            from t0repro.runs.preflight import check_inference

            check_inference(plan, typer.echo)
            return
        from t0repro.locks import folder_lock
        from t0repro.partitioning.processes import held_by_first
        from t0repro.runs import batch_infer
        from t0repro.runs.description import describe_inference

        # Shards may run at once, into one folder.
        shard = Path(plan.output_dir, f".shard-{plan.shard_id:05}-of-{plan.num_shards:05}")
        fix = "Wait for it to end, or bind another INFER_OUTPUT_DIR."
        with held_by_first(lambda: folder_lock(shard, "inference", fix=fix)):
            plan = _with_own_output(plan)
            batch_infer.infer(plan, lambda: describe_inference(plan, parsed.gin_text))


def _check_output(plan: InferencePlan, parsed: Parsed, name: str) -> None:
    """Refuses an address for the results, before tasks are imported."""
    from t0repro.config.t5x.places import Places

    check_output(plan.output_dir, Places.of(parsed.values).place(name) or name)


def _with_own_output(plan: Plan) -> Plan:
    """Of several processes, only the first one's results are kept."""
    from t0repro.partitioning.processes import output_folder

    # With what is there already, so that all processes skip the same finished work.
    folder = output_folder(plan.output_dir, resumed=True)
    return dataclasses.replace(plan, output_dir=str(folder))


def gin_inputs(
    run_mode: str, options: T5xOptions, *, first: Sequence[str] = (), last: Sequence[str] = ()
) -> T5xInputs:
    """What the command line says about gin; of two bindings of one name, the later wins.

    Args:
      run_mode: T5X's name of the run mode.
      options: the flags.
      first: bindings before those of the command line.
      last: bindings after them.
    """
    return t5x_inputs(
        run_mode,
        options.gin_file,
        [*first, *(options.gin_bindings or ()), *last],
        options.gin_search_paths,
        allowlist_of(options.gin_import_allowlist),
    )


def parse_files(inputs: T5xInputs) -> Parsed:
    """The program that the command line's gin files configure; shows warnings.

    Raises:
      UserError: see `t0repro.config.t5x.gin_files.parse`.
    """
    echo("reading gin files ...", err=True)
    from t0repro.config.t5x.differences import differences
    from t0repro.config.t5x.gin_files import parse

    parsed = parse(inputs)
    for warning in (*parsed.warnings, *differences(parsed)):
        typer.echo(f"warning: {warning}", err=True)
    return parsed


def register(parsed: Parsed, options: T5xOptions) -> None:
    """Registers the tasks of the modules that the gin files and the command line name.

    Raises:
      UserError: If a module cannot be found.
    """
    echo("importing the tasks, with TensorFlow and SeqIO ...", err=True)
    from t0repro import compat
    from t0repro.tasks.registration import load_tasks

    # Before SeqIO, which needs what this repairs for today's Python.
    compat.install()
    import seqio

    if options.tfds_data_dir:
        seqio.set_tfds_data_dir_override(options.tfds_data_dir)
    cache_dirs = options.seqio_additional_cache_dirs or ()
    folders = [folder for value in cache_dirs for folder in value.split(",") if folder]
    if folders:
        seqio.add_global_cache_dirs(folders)
    load_tasks([*parsed.imports, *(options.module_import or ())], into_seqio=True)
