"""Writes an engine's input to start a command as several processes that work together.

Slurm gets a batch script, Kubernetes a JobSet, SkyPilot a task, a Cloud TPU the gcloud commands. In
each the
processes find each other by what the engine puts into their environment
(t0repro.partitioning.processes).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import sys
from typing import Any

from t0repro.cloud import engines
from t0repro.cloud.machines import Machine
from t0repro.errors import UserError
from t0repro.jobs.worker import Limits
from t0repro.redaction import is_secret

_PORT = 8476  # any free one, the same on all machines
_PODS = "processes"
_RESTARTS = 3
# JobSet refuses a manifest whose longest pod name, NAME-processes-0-9999-abcde, has more than 63
# letters, and a TPU's name may have 40.
_LONGEST_NAME = 40
# The processes save and end when they get this signal; Slurm sends it before the time is up.
_SECONDS_TO_SAVE = 120


@dataclasses.dataclass(frozen=True)
class Launch:
    """A command to start.

    Attributes:
      name: of the job on the engine.
      command: its words.
      processes: how many copies of it work together, each on its own machine or accelerator.
      machine: where, and what each process may use.
    """

    name: str
    command: tuple[str, ...]
    processes: int
    machine: Machine

    @property
    def limits(self) -> Limits:
        """The limits of each process."""
        machine = self.machine
        return Limits(cpus=machine.cpus, memory_gb=machine.memory_gb, seconds=machine.time_limit)

    @property
    def secrets(self) -> dict[str, str]:
        """The variables that look like secrets; never printed."""
        given = self.machine.environment.items()
        return {name: value for name, value in given if is_secret(name, value)}

    @property
    def shown(self) -> Launch:
        """The launch without the secrets' values, for printing."""
        hidden = self.machine.environment | dict.fromkeys(self.secrets, "***")
        return dataclasses.replace(
            self, machine=dataclasses.replace(self.machine, environment=hidden)
        )


def slurm_script(launch: Launch) -> str:
    """A script for sbatch: `srun` starts the processes, and ends all when one fails.

    Raises:
      UserError: for an option or a variable that the script cannot have.
    """
    options = [
        *engines.options(launch.name, f"{launch.name}-%j.log", launch.limits),
        f"--ntasks={launch.processes}",
        f"--signal=TERM@{_SECONDS_TO_SAVE}",
        *launch.machine.options,
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {_sbatch_word(option)}" for option in options),
        "set -euo pipefail",
        # So that `t0repro` is found in a batch shell, and is the one of this Python.
        f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH",
        *(
            f"# {name} comes from the environment of sbatch"
            if is_secret(name, text)
            else f"export {name}={shlex.quote(text)}"
            for name, text in _environment(launch)
        ),
        f"srun --kill-on-bad-exit=1 --label {shlex.join(launch.command)}",
    ]
    return "\n".join(lines) + "\n"


def job_set(launch: Launch, template: dict[str, Any]) -> dict[str, Any]:
    """A JobSet with an indexed Job, one pod for each process; it starts again if one fails.

    Args:
      launch: the command.
      template: a Job manifest of the user's, as for auxiliary jobs.

    Raises:
      UserError: if the template has no container, or the name no letter.
    """
    name = _label(launch.name)
    job, container = engines.completed(template, name, launch.limits)
    # Kubernetes also replaces $(NAME) in a command.
    container["command"] = [word.replace("$", "$$") for word in launch.command]
    # What the image, or the user's manifest, says to do otherwise.
    container.pop("args", None)
    variables = {
        **dict(_environment(launch)),
        "T0REPRO_COORDINATOR_ADDRESS": f"{name}-{_PODS}-0-0.{name}:{_PORT}",
        "T0REPRO_PROCESS_COUNT": str(launch.processes),
    }
    # Our variables override the template's: a pod must not see another coordinator.
    kept = [one for one in container.get("env", []) if one.get("name") not in variables]
    container["env"] = kept + engines.variables(variables)
    size = launch.processes
    job["spec"] |= {"parallelism": size, "completions": size, "completionMode": "Indexed"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job["metadata"],
        "spec": {
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [
                {"name": _PODS, "replicas": 1, "template": {"spec": job["spec"]}},
            ],
        },
    }


def sky_task(launch: Launch) -> dict[str, Any]:
    """A task of SkyPilot's, one node for each process.

    The options for `sky launch` say which accelerators and which cloud. Secrets are named only:
    `sky launch` takes their values from its own environment.

    Raises:
      UserError: for a name without a letter, or a variable's that no shell takes.
    """
    variables = dict(_environment(launch))
    limits, words = launch.limits, shlex.join(launch.command)
    if limits.seconds is not None:
        # The run saves and ends when it gets the signal; a task has no limit of its own.
        words = f"timeout --kill-after={_SECONDS_TO_SAVE} {math.ceil(limits.seconds)} {words}"
    resources = {
        name: f"{math.ceil(limit)}+"
        for name, limit in (("cpus", limits.cpus), ("memory", limits.memory_gb))
        if limit is not None
    }
    return {
        "name": _label(launch.name),
        "num_nodes": launch.processes,
        **({"resources": resources} if resources else {}),
        "envs": {name: text for name, text in variables.items() if name not in launch.secrets},
        # The nodes' addresses, one a line; the first one's is rank 0.
        "run": f"""\
export T0REPRO_COORDINATOR_ADDRESS=$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{_PORT}
export T0REPRO_PROCESS_COUNT=$SKYPILOT_NUM_NODES
export T0REPRO_PROCESS_INDEX=$SKYPILOT_NODE_RANK
{words}
""",
    }


def tpu_vm_commands(launch: Launch) -> list[list[str]]:
    """The gcloud commands that create a TPU, run the command on all its machines and delete it.

    The TPU itself determines the number of machines, so `processes` is not used.

    Raises:
      UserError: if the machine's options lack what gcloud requires, or the name has no letter.
    """
    options = launch.machine.options
    for required in ("--zone", "--accelerator-type", "--version"):
        # "--zone=" alone says nothing either.
        if not any(re.match(f"{required}=.", option) for option in options):
            raise UserError(
                f"gcloud creates no TPU without {required}.",
                where="--option",
                fix=f"Add --option={required}=..., or put it into the file of machines.",
            )
    # Where the TPU is; the other options describe what to create.
    place = [option for option in options if option.startswith(("--zone=", "--project="))]
    tpu_vm, name = ["gcloud", "compute", "tpus", "tpu-vm"], _label(launch.name)
    if secrets := launch.secrets:
        raise UserError(
            f"{', '.join(secrets)} would be printed and stand in the list of the TPU's processes.",
            where="environment, in the file of machines",
            fix="Keep it in Secret Manager, and read it in the command that is started.",
        )
    variables = [*_environment(launch), ("T0REPRO_PROCESS_COUNT", "auto")]
    words = ["env", *(f"{key}={text}" for key, text in variables), *launch.command]
    return [
        [*tpu_vm, "create", name, *options],
        [*tpu_vm, "ssh", name, *place, "--worker=all", f"--command={shlex.join(words)}"],
        [*tpu_vm, "delete", name, *place, "--quiet"],
    ]


def _sbatch_word(option: str) -> str:
    """An option as sbatch reads it from a script, where it knows quotes, backslashes and #.

    Unlike a shell, it takes a backslash between single quotes for an escape.
    """
    whole = option.startswith("-") and not option.endswith("=")
    if not whole or len(option.splitlines()) > 1:
        raise UserError(
            f"{option!r} cannot be an option in a script for sbatch.",
            where="--option, --name",
            fix="Write it on one line and with its value, as --option=--partition=gpu.",
        )
    if not re.search(r"""[\s"'\\#]""", option):
        return option
    escaped = re.sub(r"""(["\\])""", r"\\\1", option)
    return f'"{escaped}"'


def _label(name: str) -> str:
    """A name as JobSet and TPUs take it: lower case letters, digits and dashes, a letter first."""
    label = re.sub("^[^a-z]+", "", engines.allowed_name(name))[:_LONGEST_NAME].strip("-")
    if not label:
        raise UserError(
            f"The name {name!r} has no letter from a to z.",
            where="--name",
            fix="Choose a name such as t0-train.",
        )
    return label


def _environment(launch: Launch) -> list[tuple[str, str]]:
    """The variables of the user's file of machines.

    Raises:
      UserError: for a name that no shell takes.
    """
    variables = sorted(launch.machine.environment.items())
    for name, _ in variables:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(
                f"No variable can be called {name!r}.",
                where="environment, in the file of machines",
                fix="Use letters, digits and underscores.",
            )
    return variables
