"""Google's Cluster Toolkit: one command that creates a JobSet on GKE."""

from __future__ import annotations

import re
import shlex

from t0repro.cloud.launchers.launch import (
    PORT,
    RESTARTS,
    SECONDS_TO_SAVE,
    Launch,
    environment_of,
    limit_command_time,
    option_value,
    refuse_secrets,
    require_options,
    resource_name,
    run_command,
)
from t0repro.errors import UserError

_LONGEST_NAME = 28
# Names that gcluster itself takes for a TPU's: it resolves v5p-4 to ct5p-hightpu-4t, for example.
_TPU = re.compile(r"v[4-6][ep]?(-\d+)?|v5litepod.*|ct.*|.*tpu.*", re.IGNORECASE)


def start(launch: Launch, *, dry_run: bool) -> str:
    """Submits a command, or only shows how; returns what gcluster says, or its command line."""
    command = gcluster_command(launch)
    return shlex.join(command) if dry_run else run_command(*command)


def gcluster_command(launch: Launch) -> list[str]:
    """The command of Google's Cluster Toolkit that creates a JobSet, one pod for each process.

    A TPU slice determines the number of its pods, so `processes` is not used there.

    Raises:
      UserError: if gcluster would refuse the command, or lacks a place for a part of it.
    """
    options, limits = launch.machine.options, launch.limits
    require_options(
        options, "gcluster submits no job", "--compute-type", ("--image", "--base-image")
    )
    if limits.cpus or limits.memory_gb is not None:
        raise UserError(
            "gcluster has no option for a process's processors and memory.",
            where="cpus, memory_gb, in the file of machines",
            fix="Remove them: a process gets the machine that --option=--compute-type names.",
        )
    refuse_secrets(launch, "in the JobSet's command")
    name = resource_name(launch.name, _LONGEST_NAME)
    variables = dict(environment_of(launch))
    if _TPU.fullmatch(option_value(options, "--compute-type")):
        variables["T0REPRO_PROCESS_COUNT"] = "auto"
        size = []
    else:
        if option_value(options, "--num-slices") not in ("", "1"):
            raise UserError(
                "Processes of different slices without a TPU would have the same index.",
                where="--option=--num-slices",
                fix="Remove it, and give the number of all machines: --processes.",
            )
        variables |= {
            # gcluster calls its only replicated job main-job.
            "T0REPRO_COORDINATOR_ADDRESS": f"{name}-main-job-0-0.{name}:{PORT}",
            "T0REPRO_PROCESS_COUNT": str(launch.processes),
        }
        size = [f"--num-nodes={launch.processes}"]
    words = shlex.join(["env", *(f"{key}={text}" for key, text in variables.items())])
    return [
        *("gcluster", "job", "submit", f"--name={name}", *size, f"--restarts={RESTARTS}"),
        f"--grace-period={SECONDS_TO_SAVE}s",
        # Bash runs it in the pod, after Kubernetes has replaced $(NAME) and $$.
        "--command=" + f"exec {words} {limit_command_time(launch)}".replace("$", "$$"),
        # Last, because a user's value for an option above overrides it.
        *options,
    ]
