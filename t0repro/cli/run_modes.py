"""`t0repro train`, `eval`, `infer` and `run`: T5X's run modes, and the flags of all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import typer

from t0repro.cli.options import (
    GIN,
    GinBindings,
    GinFiles,
    GinImportAllowlist,
    GinSearchPaths,
    Modules,
    ProcessOptions,
    Trackers,
    allowlist_of,
    run_mode_of,
    t5x_inputs,
    tracked_training,
    with_groups,
)
from t0repro.cli.results import echo
from t0repro.cli.spelling import LogOptions, source
from t0repro.cloud.auxiliary import AuxiliaryOptions
from t0repro.cloud.spec import JobMode
from t0repro.cloud.tracker import check_trackers
from t0repro.errors import UserError, needs_reference_tier
from t0repro.files import check_address, check_folder, folder_lock, output_path

if TYPE_CHECKING:
    from t0repro.config.inference_plan import EvalPlan, InferencePlan, InferPlan
    from t0repro.config.run_config import RunConfig
    from t0repro.config.t5x.gin_files import Parsed, T5xInputs
    from t0repro.config.training_plan import RestoreConfig


_Adapter = Annotated[
    str | None,
    typer.Option(
        callback=source,
        metavar="DIR",
        help="Evaluate the checkpoint with this adapter, ours or a folder of PEFT's. Overrides"
        " utils.RestoreCheckpointConfig.adapter.",
        show_default="the checkpoint alone",
    ),
]

Plan = TypeVar("Plan", bound="InferencePlan")


@dataclasses.dataclass(frozen=True)
class T5xOptions(LogOptions):
    """The options of every run mode of T5X."""

    HEADING: ClassVar = GIN

    gin_file: GinFiles = None
    gin_bindings: GinBindings = None
    gin_search_paths: GinSearchPaths = "."
    gin_import_allowlist: GinImportAllowlist = None
    module_import: Modules = None
    tfds_data_dir: Annotated[
        str | None,
        typer.Option(callback=source, help="The folder of TensorFlow Datasets' data."),
    ] = None
    seqio_additional_cache_dirs: Annotated[
        list[str] | None,
        typer.Option(
            callback=source, help="Folders of SeqIO's caches, separated by commas; repeatable."
        ),
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
        typer.Option("--watch", help="Keep evaluating new checkpoints (mode latest or all)."),
    ] = False,
    until: Annotated[
        int | None, typer.Option("--until", help="With --watch: stop after this step.", min=0)
    ] = None,
    adapter: _Adapter = None,
) -> None:
    """Evaluate checkpoints with the metrics of SeqIO tasks, as T5X's gin files say.

    Results are below EVAL_OUTPUT_DIR/inference_eval: TensorBoard's events, metrics and predictions.
    Checkpoints listed in its evaluated.json are skipped unless they have been replaced.

    Example:
      t0repro eval --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/eval.gin --gin.DROPOUT_RATE=0.0
        --gin.MIXTURE_OR_TASK_NAME="'my_task'" --gin.CHECKPOINT_PATH="'runs/c4/checkpoint_1000'"
        --gin.EVAL_OUTPUT_DIR="'runs/eval'" --module_import my_tasks
    """
    parsed = parse_files(gin_inputs("eval", options, last=_of_adapter(adapter)))
    # Processes join before anything asks JAX for its devices.
    with processes.joined():
        from t0repro.config.t5x.inference import eval_plan

        plan = eval_plan(parsed)
        _check_addresses(plan, parsed, "evaluate.output_dir")
        # Only after the gin files have been checked, because importing tasks takes seconds.
        register(parsed, options, lambda: _why_not_evaluated_alone(plan))
        if options.dry_run:
            from t0repro.runs.preflight import check_inference

            check_inference(plan, typer.echo)
            return
        from t0repro.evaluation.evaluator import FOLDER
        from t0repro.partitioning.processes import held_by_first
        from t0repro.runs.description import describe_inference
        from t0repro.runs.evaluate import evaluate_checkpoints

        # Not EVAL_OUTPUT_DIR itself, which a training run may have locked.
        results = output_path(plan.output_dir) / FOLDER
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
    adapter: _Adapter = None,
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
    shard = [] if shard_id is None else [f"infer.shard_id = {shard_id}"]
    parsed = parse_files(gin_inputs("infer", options, last=[*shard, *_of_adapter(adapter)]))
    with processes.joined():
        from t0repro.config.t5x.inference import infer_plan

        plan = infer_plan(parsed)
        _check_addresses(plan, parsed, "infer.output_dir")
        register(parsed, options, lambda: _why_not_inferred_alone(plan))
        if options.dry_run:
            from t0repro.runs.preflight import check_inference

            check_inference(plan, typer.echo)
            return
        from t0repro.partitioning.processes import held_by_first
        from t0repro.runs import batch_infer
        from t0repro.runs.description import describe_inference

        # Several shards may run at the same time in one folder.
        shard = output_path(plan.output_dir) / f".shard-{plan.shard_id:05}-of-{plan.num_shards:05}"
        fix = "Wait for it to end, or bind another INFER_OUTPUT_DIR."
        with held_by_first(lambda: folder_lock(shard, "inference", fix=fix)):
            plan = _with_own_output(plan)
            batch_infer.infer(plan, lambda: describe_inference(plan, parsed.gin_text))


def _why_not_evaluated_alone(plan: EvalPlan) -> str | None:
    """What in an evaluation needs SeqIO and TensorFlow, its tasks being described."""
    from t0repro.data.eval_examples import why_not_evaluated

    data = plan.data
    return _of_model(plan) or why_not_evaluated(
        data.mixture_or_task_name, data.split, use_cached=data.use_cached
    )


def _why_not_inferred_alone(plan: InferPlan) -> str | None:
    """The same of an inference."""
    from t0repro.data.eval_examples import why_not_read

    data = plan.data
    if plan.files is not None:
        return "infer reads files of examples"
    return _of_model(plan) or why_not_read(
        data.mixture_or_task_name, data.split, use_cached=data.use_cached
    )


def _of_model(plan: InferencePlan) -> str | None:
    from t0repro.config.t5x.records import PIECES_OR_BYTES

    if plan.user_model is not None:
        return "the model is a class of yours"
    vocabularies = (plan.input_vocabulary, plan.output_vocabulary)
    if not all(isinstance(each, PIECES_OR_BYTES) for each in vocabularies):
        return "a vocabulary of the model is neither of pieces nor of bytes"
    return None


def _of_adapter(path: str | None) -> list[str]:
    """The binding of --adapter, which comes last so that it overrides the gin files."""
    return [] if path is None else [f"utils.RestoreCheckpointConfig.adapter = {path!r}"]


def _check_addresses(plan: InferencePlan, parsed: Parsed, output: str) -> None:
    """Refuses addresses that cannot be opened, before tasks are imported.

    Args:
      plan: The run.
      parsed: Its gin files.
      output: The gin name of the results' place.
    """
    from t0repro.config.t5x.gin_files import Places

    check_folder(plan.output_dir, Places.of(parsed.values).place(output) or output)
    _check_restored(plan.restore, parsed)


def _check_restored(restore: RestoreConfig | None, parsed: Parsed) -> None:
    from t0repro.config.t5x.gin_files import Places

    if restore is None:
        return
    paths = (restore.path,) if isinstance(restore.path, str) else restore.path
    named = [("path", path) for path in paths]
    for field, path in [*named, ("adapter", restore.adapter)]:
        if path is not None:
            where = f"utils.RestoreCheckpointConfig.{field}"
            check_address(path, Places.of(parsed.values).place(where) or where)


def _with_own_output(plan: Plan) -> Plan:
    """Keeps only the first process's results if there are several processes."""
    from t0repro.partitioning.processes import output_folder

    # A copy of the existing results, so that all processes skip the same finished work.
    folder = output_folder(plan.output_dir, resumed=True)
    return dataclasses.replace(plan, output_dir=str(folder))


def gin_inputs(
    run_mode: str, options: T5xOptions, *, first: Sequence[str] = (), last: Sequence[str] = ()
) -> T5xInputs:
    """The gin options of the command line; of two bindings of one name, the later wins.

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
    from t0repro.config.t5x.gin_files import parse
    from t0repro.config.t5x.model import differences

    parsed = parse(inputs)
    for warning in (*parsed.warnings, *differences(parsed)):
        typer.echo(f"warning: {warning}", err=True)
    return parsed


def register(
    parsed: Parsed,
    options: T5xOptions,
    why_not: Callable[[], str | None] | None = None,
) -> None:
    """Registers the tasks of the modules that the gin files and the command line name.

    Args:
      parsed: The gin files.
      options: The flags.
      why_not: Returns what in the run needs TensorFlow and SeqIO, if anything; called once this
        project's own tasks are described. None if the run needs them in any case.

    Raises:
      UserError: If a module cannot be found, or the packages are needed and not installed.
    """
    from t0repro import compat
    from t0repro.tasks.registration import load_tasks, needs_seqio
    from t0repro.tasks.task import add_cache_dirs, resolved_modules

    modules = resolved_modules([*parsed.imports, *(options.module_import or ())])
    cache_dirs = options.seqio_additional_cache_dirs or ()
    folders = [folder for value in cache_dirs for folder in value.split(",") if folder]
    flag = "--seqio_additional_cache_dirs"
    if why_not is not None and not options.tfds_data_dir and not needs_seqio(modules):
        load_tasks(modules, into_seqio=False)
        add_cache_dirs(folders, flag)
        why = why_not()
        if why is None:
            return
        if not compat.is_installed():
            raise needs_reference_tier(why)
    echo("importing the tasks, with TensorFlow and SeqIO ...", err=True)
    # Before SeqIO, which needs these patches on today's Python.
    compat.install()
    import seqio

    if options.tfds_data_dir:
        seqio.set_tfds_data_dir_override(options.tfds_data_dir)
    add_cache_dirs(folders, flag)
    load_tasks(modules, into_seqio=True)


# ---- `t0repro train`: trains what T5X's gin files describe; and `t0repro run --run_mode=...` -----


@with_groups
def train(
    options: T5xOptions,
    processes: ProcessOptions,
    jobs: AuxiliaryOptions,
    allow_changed: Annotated[
        bool,
        typer.Option(help="Continue in a model_dir even if the optimizer or the model changed."),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Sets MODEL_DIR to runs/NAME unless it is set.")
    ] = None,
    platform: Annotated[str | None, typer.Option(help="T5X's label for this machine.")] = None,
    cell: Annotated[str | None, typer.Option(help="T5X's label for this machine.")] = None,
    tracker: Trackers = None,
) -> None:
    """Train what T5X's gin files describe: pretraining or fine-tuning.

    With --auxiliary_job_mixtures every checkpoint is evaluated, or fine-tuned, while training
    continues: docs/auxiliary_jobs.md.

    Example:
      t0repro train --gin_file t5x/examples/t5/t5_1_1/small.gin
        --gin_file t5x/configs/runs/pretrain.gin --gin.MODEL_DIR="'runs/c4'"
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" --gin.TRAIN_STEPS=10000
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" --gin.DROPOUT_RATE=0.0
    """
    # First, so that mistakes are reported before joining processes and importing JAX.
    _check_machine(jobs.machines, platform, cell)
    check_trackers(tracker)
    if name is not None and ":" in name:
        raise UserError(
            f"A run cannot be named {name}: it would be the local folder runs/{name}.",
            where="--name",
            fix="Set MODEL_DIR to the address instead.",
        )
    # First, so that --gin.MODEL_DIR overrides it.
    named = [f"MODEL_DIR = 'runs/{name}'"] if name else []
    inputs = gin_inputs("train", options, first=named)
    parsed = parse_files(inputs)
    from t0repro.config.t5x.run import train_config

    config, model = train_config(parsed), parsed.program.model
    check_folder(config.model_dir, config.provenance.get("model_dir", "MODEL_DIR"))
    _check_restored(config.plan.restore, parsed)
    with processes.joined(), contextlib.ExitStack() as beside:
        vocabularies = (model.input_vocabulary, model.output_vocabulary)
        from t0repro.data.batches import why_not_trained
        from t0repro.runs.preflight import check_training

        register(parsed, options, lambda: why_not_trained(config, vocabularies))

        check_training(
            config,
            vocabularies,
            typer.echo if options.dry_run else None,
            starts=not options.dry_run,
            allow_changed=allow_changed,
        )
        from t0repro.cloud.auxiliary import auxiliary_jobs_during_training, check_jobs
        from t0repro.data.checks import note_uncached
        from t0repro.partitioning.processes import is_first

        # The training run's bindings do not apply to its jobs.
        files = dataclasses.replace(inputs, gin_bindings=())
        if options.dry_run:
            if jobs.are_given and is_first():
                check_jobs(jobs, files)
            return
        # Only one process prints.
        if is_first():
            assert config.plan.train_data is not None
            note_uncached(config.plan.train_data.use_cached)
            beside.enter_context(tracked_training(tracker, Path(config.model_dir), config))
            if jobs.are_given:
                jobs_beside = auxiliary_jobs_during_training(config.model_dir, jobs, files)
                beside.enter_context(jobs_beside)
        start(parsed.gin_text, config, vocabularies, allow_changed)


def start(
    gin_text: str, config: RunConfig, vocabularies: tuple[Any, Any], allow_changed: bool
) -> None:
    """Trains, and writes the configuration into the folder as T5X does."""
    import gin
    from t0repro.data.checks import seqio_vocabulary
    from t0repro.runs.description import describe_training
    from t0repro.runs.start import start_training

    start_training(
        config,
        describe=lambda state, devices: describe_training(
            config.model_dir, gin_text, state, devices
        ),
        # TensorBoard shows a text as Markdown, where gin's comments would be headings.
        config_text=gin.markdown(gin_text),
        # Only a user's model calls them, and making them imports SeqIO.
        vocabularies=(seqio_vocabulary(vocabularies[0]), seqio_vocabulary(vocabularies[1]))
        if "model" in config.plan.user_classes
        else (None, None),
        allow_changed=allow_changed,
    )


def _check_machine(machines: Path | None, platform: str | None, cell: str | None) -> None:
    """Refuses to train on another machine; labels that no file defines mean this one."""
    from t0repro.cloud.engines import find_machine

    machine = find_machine(machines, platform, cell)
    if machine.launcher != "local":
        raise UserError(
            f"The platform or cell stands for {machine.launcher}, but this command trains here.",
            where="--platform" if platform else "--cell",
            fix="Submit this command to that machine, without --platform and --cell.",
        )


def run(
    context: typer.Context,
    run_mode: Annotated[
        JobMode,
        typer.Option(
            "--run_mode",
            parser=run_mode_of(JobMode),
            metavar="MODE",
            help=f"What to do: {', '.join(JobMode)}.",
        ),
    ],
) -> None:
    """Run a run mode: the same as the command of that name, with its options.

    This is the entry point of containers.

    Example:
      t0repro run --run_mode=train --gin_file run.gin --gin.MODEL_DIR="'runs/a'"
    """
    group: Any = context.parent.command if context.parent else None
    # That command's own parser checks the options.
    command = group.get_command(context, run_mode.value)
    arguments = list(context.args)
    if run_mode is JobMode.PRECOMPILE:  # this command also accepts Mesh TensorFlow's files
        arguments += ["--run_mode", run_mode.value]
    with command.make_context(run_mode.value, arguments, parent=context.parent) as inner:
        command.invoke(inner)
