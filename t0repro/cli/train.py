"""`t0repro train`: trains what T5X's gin files describe; and `t0repro run --run_mode=...`."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t0repro.buckets import is_address
from t0repro.cli.gin_options import run_mode_of
from t0repro.cli.option_groups import with_groups
from t0repro.cli.process_flags import ProcessOptions
from t0repro.cli.t5x_run import T5xOptions, gin_inputs, parse_files, register
from t0repro.cli.tracking import Trackers, tracked_training
from t0repro.cloud.arguments import JobMode
from t0repro.errors import UserError
from t0repro.files import check_output
from t0repro.jobs.options import AuxiliaryOptions

if TYPE_CHECKING:
    from t0repro.config.run_config import RunConfig


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
        str | None, typer.Option(help="MODEL_DIR is runs/NAME unless it is set.")
    ] = None,
    platform: Annotated[str | None, typer.Option(help="Must stand for this machine.")] = None,
    cell: Annotated[str | None, typer.Option(help="Must stand for this machine.")] = None,
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
    # First, since a mistake need not wait for the other processes, nor for JAX to be imported.
    _check_machine(jobs.machines, platform, cell)
    if name is not None and is_address(name):
        raise UserError(
            f"A run cannot be named {name}: it would be the local folder runs/{name}.",
            where="--name",
            fix="Set MODEL_DIR to the address instead.",
        )
    # First, so that --gin.MODEL_DIR wins.
    named = [f"MODEL_DIR = 'runs/{name}'"] if name else []
    inputs = gin_inputs("train", options, first=named)
    parsed = parse_files(inputs)
    from t0repro.config.t5x.run import train_config

    config, model = train_config(parsed), parsed.program.model
    check_output(config.model_dir, config.provenance.get("model_dir", "MODEL_DIR"))
    with processes.joined(), contextlib.ExitStack() as beside:
        register(parsed, options)
        vocabularies = (model.input_vocabulary, model.output_vocabulary)
        from t0repro.runs.preflight import check_training

        check_training(config, vocabularies, typer.echo if options.dry_run else _silent)
        if options.dry_run:
            return
        from t0repro.cloud.auxiliary import auxiliary_jobs_beside
        from t0repro.data.checks import note_uncached
        from t0repro.partitioning.processes import is_first

        # One process speaks for all of them.
        if is_first():
            assert config.plan.train_data is not None
            note_uncached(config.plan.train_data.use_cached)
            beside.enter_context(tracked_training(tracker, Path(config.model_dir), config))
        if jobs.are_given and is_first():
            # The training run's own bindings are not its jobs'.
            files = dataclasses.replace(inputs, gin_bindings=())
            beside.enter_context(auxiliary_jobs_beside(config.model_dir, jobs, files))
        start(parsed.gin_text, config, vocabularies, allow_changed)


def start(
    gin_text: str, config: RunConfig, vocabularies: tuple[Any, Any], allow_changed: bool
) -> None:
    """Trains, in a folder that keeps the configuration as T5X's does."""
    import gin
    from t0repro.data.vocabularies import seqio_vocabulary
    from t0repro.runs.description import describe_training
    from t0repro.runs.start import start_training

    start_training(
        config,
        describe=lambda state, devices: describe_training(
            config.model_dir, gin_text, state, devices
        ),
        config_text=gin.markdown(gin_text),
        vocabularies=(seqio_vocabulary(vocabularies[0]), seqio_vocabulary(vocabularies[1]))
        if "model" in config.plan.user_classes
        else (None, None),
        allow_changed=allow_changed,
    )


def _silent(line: str) -> None:
    """Drops a line: a run that starts reports what is wrong alone."""


def _check_machine(machines: Path | None, platform: str | None, cell: str | None) -> None:
    """Refuses to train elsewhere than here; labels that no file explains mean this machine."""
    from t0repro.cloud.machines import find_machine

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
    # By that command's own parser, which checks its options.
    command = group.get_command(context, run_mode.value)
    arguments = list(context.args)
    if run_mode is JobMode.PRECOMPILE:  # this command takes Mesh TensorFlow's files too
        arguments += ["--run_mode", run_mode.value]
    with command.make_context(run_mode.value, arguments, parent=context.parent) as inner:
        command.invoke(inner)
