"""A Cloud TPU: gcloud's commands that create it, run a command on all machines and delete it."""

from __future__ import annotations

import shlex

from t0repro.cloud.launchers.launch import (
    Launch,
    environment_of,
    refuse_secrets,
    require_options,
    resource_name,
)


def start(launch: Launch, *, dry_run: bool) -> str:
    """The commands, one a line, for the user to run one after another; starts nothing."""
    return "\n".join(map(shlex.join, tpu_vm_commands(launch)))


def tpu_vm_commands(launch: Launch) -> list[list[str]]:
    """The gcloud commands that create a TPU, run the command on all its machines and delete it.

    The TPU itself determines the number of machines, so `processes` is not used.

    Raises:
      UserError: if the machine's options lack what gcloud requires, or the name has no letter.
    """
    options = launch.machine.options
    require_options(options, "gcloud creates no TPU", "--zone", "--accelerator-type", "--version")
    # Where the TPU is; the other options describe what to create.
    place = [option for option in options if option.startswith(("--zone=", "--project="))]
    tpu_vm, name = ["gcloud", "compute", "tpus", "tpu-vm"], resource_name(launch.name)
    refuse_secrets(launch, "in the list of the TPU's processes")
    variables = [*environment_of(launch), ("T0REPRO_PROCESS_COUNT", "auto")]
    words = ["env", *(f"{key}={text}" for key, text in variables), *launch.command]
    return [
        [*tpu_vm, "create", name, *options],
        [*tpu_vm, "ssh", name, *place, "--worker=all", f"--command={shlex.join(words)}"],
        [*tpu_vm, "delete", name, *place, "--quiet"],
    ]
