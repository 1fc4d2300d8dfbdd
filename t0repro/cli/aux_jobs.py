"""`t0repro aux`: work on every checkpoint of a training run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from t0repro import storage
from t0repro.cli.commands import App
from t0repro.cli.gin_options import GinOptions
from t0repro.cli.groups import expand_groups
from t0repro.cli.options import AsJson, SkipMissing
from t0repro.cli.paths import source
from t0repro.cli.results import echo, print_json
from t0repro.cloud.auxiliary import check_jobs, hand_on_skip_missing, make_controller
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.jobs.journal import FOLDER, HEADER, curves, read_status, rows, to_json
from t0repro.progress import Waiting, heard_by
from t0repro.storage import check_address
from t0repro.terminal import print_table, terminal
from t0repro.training.run_state import read_run_state
from t0repro.words import counted

app = App("aux", invoke_without_command=True)


@app.callback()
@expand_groups
def aux(
    context: typer.Context,
    jobs: AuxiliaryOptions,
    gin: GinOptions,
    model_dir: Annotated[
        str | None,
        typer.Option(
            callback=source,
            help="The training run's folder, or its gs:// or s3:// address.",
            rich_help_panel="Required",  # except with a subcommand
        ),
    ] = None,
    skip_missing: SkipMissing = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Process the checkpoints that exist now, then stop. Without it, the command also"
            " waits for new checkpoints, until the training run has finished.",
        ),
    ] = False,
) -> None:
    r"""Auxiliary jobs: evaluate or fine-tune every checkpoint while training continues.

    Starts one job per mixture for every new checkpoint, and ends when the training run has finished
    and all its checkpoints are done.
    In the jobs' gin files MODEL_DIR, MIXTURE_OR_TASK_NAME, INITIAL_CHECKPOINT_PATH, TRAIN_STEPS
    and EVAL_OUTPUT_DIR are set; any other command finds these names in its environment. If it is
    interrupted, starting it again continues where it stopped.

    Example:
      t0repro aux --model_dir runs/demo/model \
        --auxiliary_job_mixtures demo_eval_score_eval \
        --auxiliary_job_build_target_path \
        "rank-eval --module_import t0repro.tasks.demo" --once
      t0repro aux status runs/demo/model --watch
    """
    # Typer calls a group's callback before each of its commands, such as `status`.
    if context.invoked_subcommand is not None:
        return
    if model_dir is None:
        raise UserError(
            "There is no folder to watch for checkpoints.",
            where="--model_dir",
            fix="Give the folder of the training run; it may not exist yet.",
        )
    echo("checking what the jobs will read ...", err=True)
    check_address(model_dir, "--model_dir")
    if skip_missing:
        jobs = hand_on_skip_missing(jobs)
    inputs = gin.t5x_inputs("train")
    jobs = check_jobs(jobs, inputs)
    if not jobs.mixtures:
        raise UserError(
            "There are no jobs: nothing of their mixtures is on this machine.",
            where="--auxiliary_job_mixtures",
            fix="Set T0REPRO_DATA_DIR to the folder of the datasets, or name other mixtures.",
        )
    is_known = read_run_state(model_dir) is not None or storage.is_directory(
        storage.join(model_dir, FOLDER)
    )
    if once and not is_known:
        find_checkpoint(model_dir)  # raises unless there is one, and says where there are others
    with heard_by(typer.echo):
        controller = make_controller(model_dir, jobs, inputs)
    echo(f"looking for checkpoints in {model_dir} ...", err=True)

    def training_continues() -> bool:
        if once:
            return False
        state = read_run_state(model_dir)
        return state is None or state.state != "finished"

    with heard_by(typer.echo):
        done = controller.run(training_continues)
    raise typer.Exit(0 if done else 1)


@app.command()
def status(
    model_dir: Annotated[Path, typer.Argument(help="The training run's folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Reprint whenever it changes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every checkpoint's jobs: state, attempts, time, main metric; and the metric's curve.

    Example:
      t0repro aux status runs/demo/model --watch
    """
    shown, waiting = None, Waiting()
    while True:
        found = read_status(model_dir)
        if found != shown:
            if as_json:
                print_json(to_json(found))
            else:
                console = terminal()
                # In a log, each state is printed below the previous one.
                if console.is_terminal and watch:
                    console.clear()
                print_table(console, "", HEADER, rows(found), numbers=("attempts", "seconds"))
                for line in curves(found):
                    typer.echo(line)
            shown = found
        if not watch or all(each.is_final for each in found.values()):
            return
        left = sum(not each.is_final for each in found.values())
        waiting.report(
            f"waiting for {counted(left, 'job')}; Ctrl-C ends this command, not the jobs"
        )
        time.sleep(1.0)
