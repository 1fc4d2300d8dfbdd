"""`t0repro launch`: starts a command as several processes on a cluster, through its own engine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from t0repro.cli.echo import echo
from t0repro.errors import UserError


def launch(
    context: typer.Context,
    to: Annotated[
        Literal["slurm", "k8s", "tpu-vm"], typer.Option("--to", help="The engine that starts it.")
    ],
    name: Annotated[str, typer.Option(help="The job's name on the engine.")] = "t0repro",
    processes: Annotated[
        int, typer.Option(min=1, help="How many processes work together; a TPU decides itself.")
    ] = 1,
    # With `=`, since Click would otherwise read --partition as an option of this command.
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option for sbatch, kubectl or gcloud, as --option=--partition=gpu."),
    ] = None,
    machines: Annotated[
        Path | None, typer.Option(help="A YAML file: what platforms and cells stand for.")
    ] = None,
    platform: Annotated[str | None, typer.Option(help="An entry of the file of machines.")] = None,
    cell: Annotated[str | None, typer.Option(help="An entry of the file of machines.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Print what the engine would get, and end.")
    ] = False,
) -> None:
    """Start a command as several processes on Slurm, Kubernetes or a Cloud TPU.

    The command follows two dashes. For a TPU, the gcloud commands are printed, to be run in turn.

    Example:
      t0repro launch --to slurm --processes 4 --option=--gpus-per-task=1 --dry_run
        -- t0repro train --gin_file run.gin --gin.MODEL_DIR="'runs/a'"
    """
    import dataclasses

    from t0repro.cloud import engines, launching
    from t0repro.cloud.machines import find_machine

    if not context.args:
        raise UserError(
            "There is no command to start.",
            where="the command line",
            fix="Write it after two dashes: t0repro launch --to slurm -- t0repro train ...",
        )
    if machines is None and (platform or cell):
        raise UserError(
            f"No file says what {platform or cell} stands for.",
            where="--platform" if platform else "--cell",
            fix="Name the file of machines: --machines FILE.",
        )
    machine = find_machine(machines, platform, cell)
    machine = dataclasses.replace(machine, options=[*machine.options, *(option or ())])
    asked = launching.Launch(name, tuple(context.args), processes, machine)
    if to == "tpu-vm":
        for command in launching.tpu_vm_commands(asked):
            typer.echo(shlex.join(command))
        return
    if to == "slurm":
        text, submit = launching.slurm_script(asked), ("sbatch", "--parsable")
    else:
        shown = asked.shown if dry_run else asked
        manifest = launching.job_set(shown, engines.read_template(machine.template))
        text = json.dumps(manifest, indent=2) + "\n"
        submit = ("kubectl", "create", "--filename=-", *machine.options)
    if dry_run:
        echo(text.rstrip("\n"))
    else:
        echo(engines.run_engine(*submit, text=text, environment=asked.secrets))
