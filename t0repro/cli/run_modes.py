"""`t0repro train`, `eval`, `infer` and `run`: T5X's run modes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from t0repro.cli.commands import More
from t0repro.cli.gin_options import run_mode_of
from t0repro.cli.groups import expand_groups
from t0repro.cli.options import ProcessOptions, Trackers
from t0repro.cli.paths import source
from t0repro.cli.t5x_options import T5xOptions, check_restored, parse_files
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.cloud.launchers.machines import find_machine
from t0repro.cloud.trackers.table import check_trackers
from t0repro.cloud.vertex.command_line import JobMode
from t0repro.config.t5x.run import read_train_run
from t0repro.errors import UserError
from t0repro.storage import check_folder

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


_Label = Annotated[
    str | None,
    typer.Option(rich_help_panel=More("Labels"), help="T5X's label for this machine."),
]


@expand_groups
def evaluate(
    options: T5xOptions,
    processes: ProcessOptions,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Keep evaluating new checkpoints (mode latest or all)."),
    ] = False,
    until: Annotated[
        int | None, typer.Option(help="With --watch: stop after this step.", min=0)
    ] = None,
    adapter: _Adapter = None,
) -> None:
    r"""Evaluate checkpoints with the metrics of SeqIO tasks, as T5X's gin files say.

    Results are below EVAL_OUTPUT_DIR/inference_eval: TensorBoard's events, metrics and predictions.
    Checkpoints listed in evaluated.json there are skipped unless they have been replaced.

    Example:
      t0repro eval --gin_file t5x/examples/t5/t5_1_1/small.gin \
        --gin_file t5x/configs/runs/eval.gin --gin.DROPOUT_RATE=0.0 \
        --gin.MIXTURE_OR_TASK_NAME="'my_task'" \
        --gin.CHECKPOINT_PATH="'runs/c4/checkpoint_1000'" \
        --gin.EVAL_OUTPUT_DIR="'runs/eval'" --module_import my_tasks
    """
    parsed = parse_files(options.t5x_inputs("eval", last=_bind_adapter(adapter)))
    # Processes join before anything asks JAX for its devices.
    with processes.joined():
        from t0repro.cli.bodies import inference

        inference.evaluate(parsed, options, watch=watch, until=until)


@expand_groups
def infer(
    options: T5xOptions,
    processes: ProcessOptions,
    shard_id: Annotated[int | None, typer.Option(help="Overrides infer.shard_id.", min=0)] = None,
    adapter: _Adapter = None,
) -> None:
    r"""Write predictions or scores of examples as JSON lines, as T5X's gin files say.

    An interrupted run continues where it stopped.

    Example:
      t0repro infer --gin_file t5x/examples/t5/t5_1_1/small.gin \
        --gin_file t5x/configs/runs/infer.gin --gin.DROPOUT_RATE=0.0 \
        --gin.MIXTURE_OR_TASK_NAME="'my_task'" \
        --gin.CHECKPOINT_PATH="'runs/c4/checkpoint_1000'" \
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 64}" \
        --gin.INFER_OUTPUT_DIR="'runs/infer'" --module_import my_tasks
    """
    shard = [] if shard_id is None else [f"infer.shard_id = {shard_id}"]
    parsed = parse_files(options.t5x_inputs("infer", last=[*shard, *_bind_adapter(adapter)]))
    with processes.joined():
        from t0repro.cli.bodies import inference

        inference.infer(parsed, options)


def _bind_adapter(path: str | None) -> list[str]:
    """The binding of --adapter, which comes last so that it overrides the gin files."""
    return [] if path is None else [f"utils.RestoreCheckpointConfig.adapter = {path!r}"]


@expand_groups
def train(
    options: T5xOptions,
    processes: ProcessOptions,
    jobs: Annotated[AuxiliaryOptions, More("Auxiliary jobs")],
    allow_changed: Annotated[
        bool,
        typer.Option(
            "--allow_changed",
            help="Continue in a model_dir even if the optimizer or the model changed.",
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Sets MODEL_DIR to runs/NAME unless it is set.")
    ] = None,
    platform: _Label = None,
    cell: _Label = None,
    tracker: Trackers = None,
) -> None:
    r"""Train what T5X's gin files describe: pretraining or fine-tuning.

    With --auxiliary_job_mixtures every checkpoint is evaluated, or fine-tuned, while training
    continues: docs/auxiliary_jobs.md.

    Example:
      t0repro train --gin_file t5x/examples/t5/t5_1_1/small.gin \
        --gin_file t5x/configs/runs/pretrain.gin --gin.MODEL_DIR="'runs/c4'" \
        --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'" \
        --gin.TRAIN_STEPS=10000 \
        --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" \
        --gin.DROPOUT_RATE=0.0 --module_import t5.data.mixtures
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
    inputs = options.t5x_inputs("train", first=named)
    parsed = parse_files(inputs)
    config = read_train_run(parsed)
    check_folder(config.model_dir, config.provenance.get("model_dir", "MODEL_DIR"))
    check_restored(config.plan.restore, config.provenance, "plan.restore")
    # The training run's bindings do not apply to its jobs.
    files = dataclasses.replace(inputs, gin_bindings=())
    with processes.joined():
        from t0repro.cli.bodies import training

        training.train(parsed, config, options, jobs, files, tracker, allow_changed=allow_changed)


def _check_machine(machines: Path | None, platform: str | None, cell: str | None) -> None:
    """Refuses to train on another machine; labels that no file defines mean this one."""
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
            parser=run_mode_of(JobMode),
            metavar="MODE",
            help=f"What to do: {', '.join(JobMode)}.",
        ),
    ],
) -> None:
    r"""Run a run mode: the same as the command of that name, with its options.

    This is the entry point of containers.

    Example:
      t0repro run --run_mode=train --gin_file run.gin \
        --gin.MODEL_DIR="'runs/a'"
    """
    group: Any = context.parent.command if context.parent else None
    # That command's own parser checks the options.
    command = group.get_command(context, run_mode.value)
    arguments = list(context.args)
    if run_mode is JobMode.PRECOMPILE:  # this command also accepts Mesh TensorFlow's files
        arguments += ["--run_mode", run_mode.value]
    with command.make_context(run_mode.value, arguments, parent=context.parent) as inner:
        command.invoke(inner)
