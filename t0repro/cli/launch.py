"""`t0repro launch`: a command as several processes on a cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from t0repro.cli.groups import expand_groups
from t0repro.cli.results import echo
from t0repro.cloud.launchers.launch import Launch
from t0repro.cloud.launchers.machines import Machine, find_machine
from t0repro.cloud.launchers.table import CommandLauncher, import_launcher
from t0repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Where the processes run, and the launcher's own options."""

    # With `=`, because Click would otherwise parse --partition as an option of this command.
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option for the launcher's own command, as --option=--partition=gpu."),
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
        if self.machines is None and (self.platform or self.cell):
            raise UserError(
                f"No file of machines defines {self.platform or self.cell}.",
                where="--platform" if self.platform else "--cell",
                fix="Name the file of machines: --machines FILE.",
            )
        machine = find_machine(self.machines, self.platform, self.cell)
        return dataclasses.replace(machine, options=[*machine.options, *(self.option or ())])


@expand_groups
def launch(
    context: typer.Context,
    to: Annotated[CommandLauncher, typer.Option(help="What starts the command.")],
    where: MachineOptions,
    name: Annotated[str, typer.Option(help="The job's name there.")] = "t0repro",
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes; a TPU slice sets its own.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Print what it would receive, then exit.")
    ] = False,
) -> None:
    r"""Start a command as several processes on Slurm, Kubernetes, SkyPilot, GKE or a Cloud TPU.

    The command follows two dashes. Google's Cluster Toolkit (gcluster) submits it to GKE. For
    tpu-vm, prints the gcloud commands to run one after another.

    Example:
      t0repro launch --to slurm --processes 4 --option=--gpus-per-task=1 \
        --dry_run -- t0repro train --gin_file run.gin \
        --gin.MODEL_DIR="'runs/a'"
    """
    if not context.args:
        raise UserError(
            "There is no command to start.",
            where="the command line",
            fix="Write it after two dashes: t0repro launch --to slurm -- t0repro train ...",
        )
    start = import_launcher(to).start
    echo(start(Launch(name, tuple(context.args), processes, where.machine()), dry_run=dry_run))
