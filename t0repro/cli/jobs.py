"""`t0repro aux` and `t0repro launch`: work on every checkpoint of a run, and runs on a cluster."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from t0repro.cli.options import (
    AsJson,
    GinBindings,
    GinFiles,
    GinSearchPaths,
    t5x_inputs,
    with_groups,
)
from t0repro.cli.results import echo, print_json
from t0repro.cli.spelling import source
from t0repro.cloud.auxiliary import AuxiliaryOptions
from t0repro.errors import UserError

if TYPE_CHECKING:
    from t0repro.cloud.engines import Machine

app = typer.Typer(name="aux", invoke_without_command=True)


@app.callback()
@with_groups
def aux(
    context: typer.Context,
    jobs: AuxiliaryOptions,
    model_dir: Annotated[
        str | None,
        typer.Option(
            callback=source, help="The training run's folder, or its gs:// or s3:// address."
        ),
    ] = None,
    gin_file: GinFiles = None,
    gin_bindings: GinBindings = None,
    gin_search_paths: GinSearchPaths = ".",
    once: Annotated[
        bool, typer.Option("--once", help="Process the checkpoints that exist now, then stop.")
    ] = False,
) -> None:
    """Auxiliary jobs: evaluate or fine-tune every checkpoint while training continues.

    Starts one job per mixture for every new checkpoint.
    In the jobs' gin files MODEL_DIR, MIXTURE_OR_TASK_NAME, INITIAL_CHECKPOINT_PATH, TRAIN_STEPS
    and EVAL_OUTPUT_DIR are set; any other command finds these names in its environment. If it is
    interrupted, starting it again continues where it stopped.

    Example:
      t0repro aux --model_dir runs/demo/model --auxiliary_job_mixtures demo_eval_score_eval
        --auxiliary_job_build_target_path "rank-eval --module_import t0repro.tasks.demo" --once
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
    from t0repro.cloud.auxiliary import check_jobs, make_controller
    from t0repro.progress import heard_by

    gin = t5x_inputs("train", gin_file, gin_bindings, gin_search_paths)
    with heard_by(typer.echo):
        controller = make_controller(model_dir, jobs, gin)
    check_jobs(jobs, gin)
    echo(f"looking for checkpoints in {model_dir} ...", err=True)
    with heard_by(typer.echo):
        done = controller.run(lambda: not once)
    raise typer.Exit(0 if done else 1)


@app.command()
def status(
    model_dir: Annotated[Path, typer.Argument(help="The training run's folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Reprint whenever it changes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every checkpoint's jobs: state, attempts, time, main metric; and the metric's curve.

    Example: t0repro aux status runs/demo/model --watch
    """
    from t0repro.jobs.journal import HEADER, curves, read_status, rows, to_json
    from t0repro.terminal import print_table, terminal

    shown = None
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
        time.sleep(1.0)


# ---- `t0repro launch`: a command as several processes on a cluster -------------------------------


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Where the processes run, and the engine's own options."""

    # With `=`, because Click would otherwise parse --partition as an option of this command.
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option for the engine's own command, as --option=--partition=gpu."),
    ] = None
    machines: Annotated[
        Path | None, typer.Option(help="A YAML file that defines platforms and cells.")
    ] = None
    platform: Annotated[
        str | None, typer.Option(help="An entry in the file given by --machines.")
    ] = None
    cell: Annotated[str | None, typer.Option(help="An entry in the file given by --machines.")] = (
        None
    )

    def machine(self) -> Machine:
        """The machine of the file's entries, with the options of the command line after its own.

        Raises:
          UserError: If an entry is named without a file, or the file lacks it.
        """
        from t0repro.cloud.engines import find_machine

        if self.machines is None and (self.platform or self.cell):
            raise UserError(
                f"No file of machines defines {self.platform or self.cell}.",
                where="--platform" if self.platform else "--cell",
                fix="Name the file of machines: --machines FILE.",
            )
        found = find_machine(self.machines, self.platform, self.cell)
        return dataclasses.replace(found, options=[*found.options, *(self.option or ())])


@with_groups
def launch(
    context: typer.Context,
    to: Annotated[
        Literal["slurm", "k8s", "skypilot", "gcluster", "tpu-vm"],
        typer.Option("--to", help="The engine that starts the command."),
    ],
    where: MachineOptions,
    name: Annotated[str, typer.Option(help="The job's name on the engine.")] = "t0repro",
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes; a TPU slice sets its own.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Print what the engine would receive, then exit.")
    ] = False,
) -> None:
    """Start a command as several processes on Slurm, Kubernetes, SkyPilot, GKE or a Cloud TPU.

    The command follows two dashes. Google's Cluster Toolkit (gcluster) submits it to GKE. For
    tpu-vm, prints the gcloud commands to run one after another.

    Example:
      t0repro launch --to slurm --processes 4 --option=--gpus-per-task=1 --dry_run
        -- t0repro train --gin_file run.gin --gin.MODEL_DIR="'runs/a'"
    """
    from t0repro.cloud import engines, launching

    if not context.args:
        raise UserError(
            "There is no command to start.",
            where="the command line",
            fix="Write it after two dashes: t0repro launch --to slurm -- t0repro train ...",
        )
    asked = launching.Launch(name, tuple(context.args), processes, where.machine())
    if to == "tpu-vm":
        for command in launching.tpu_vm_commands(asked):
            echo(shlex.join(command))
        return
    if to == "gcluster":
        submit = launching.gcluster_command(asked)
        echo(shlex.join(submit) if dry_run else engines.run_engine(*submit))
        return
    submit, text = launching.engine_input(to, asked, to_print=dry_run)
    if dry_run:
        echo(text.rstrip("\n"))
        return
    with tempfile.TemporaryDirectory() as folder:
        if to == "skypilot":
            # sky recognizes a task file by its suffix.
            Path(folder, "task.yaml").write_text(text)
            submit = (*submit, f"{folder}/task.yaml")
        echo(engines.run_engine(*submit, text=text, environment=asked.secrets))
