"""Writes an engine's input to start a command as several processes that work together.

Slurm gets a batch script, Kubernetes a JobSet, SkyPilot a task, Google's Cluster Toolkit one
command, a Cloud TPU three. In each the processes find each other by what the engine puts into their
environment (t0repro.partitioning.processes).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Literal

from t0repro.cloud import engines
from t0repro.cloud.engines import Machine
from t0repro.errors import UserError
from t0repro.jobs.worker import Limits
from t0repro.words import is_secret, without_passwords

_PORT = 8476  # any free one, the same on all machines
_PODS = "processes"
_RESTARTS = 3
# JobSet refuses a manifest whose longest pod name, NAME-processes-0-9999-abcde, has more than 63
# letters, and a TPU's name may have 40.
_LONGEST_NAME = 40
_LONGEST_NAME_OF_GCLUSTER = 28
# Names that gcluster itself takes for a TPU's: it resolves v5p-4 to ct5p-hightpu-4t, for example.
_TPU = re.compile(r"v[4-6][ep]?(-\d+)?|v5litepod.*|ct.*|.*tpu.*", re.IGNORECASE)
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


def engine_input(
    engine: Literal["slurm", "k8s", "skypilot"], launch: Launch, *, to_print: bool
) -> tuple[tuple[str, ...], str]:
    """An engine's own command, and the text that it reads: a script, a task or a manifest.

    Args:
      engine: which engine.
      launch: the command.
      to_print: whether the text is shown, so that it must not hold a secret.

    Raises:
      UserError: like `slurm_script`, `sky_task` or `job_set`.
    """
    options = launch.machine.options
    if engine == "slurm":
        return ("sbatch", "--parsable"), slurm_script(launch)
    if engine == "skypilot":
        secrets = (f"--secret={variable}" for variable in launch.secrets)
        command = ("sky", "launch", "--yes", "--detach-run", *options, *secrets)
        return command, json.dumps(sky_task(launch), indent=2) + "\n"
    template = engines.read_template(launch.machine.template)
    manifest = job_set(launch.shown if to_print else launch, template)
    return ("kubectl", "create", "--filename=-", *options), json.dumps(manifest, indent=2) + "\n"


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
    # The template's arguments belong to the command that is replaced here.
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
    limits = launch.limits
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
{_timed(launch)}
""",
    }


def gcluster_command(launch: Launch) -> list[str]:
    """The command of Google's Cluster Toolkit that creates a JobSet, one pod for each process.

    A TPU slice determines the number of its pods, so `processes` is not used there.

    Raises:
      UserError: if gcluster would refuse the command, or lacks a place for a part of it.
    """
    options, limits = launch.machine.options, launch.limits
    _require(options, "gcluster submits no job", "--compute-type", ("--image", "--base-image"))
    if limits.cpus or limits.memory_gb is not None:
        raise UserError(
            "gcluster has no option for a process's processors and memory.",
            where="cpus, memory_gb, in the file of machines",
            fix="Remove them: a process gets the machine that --option=--compute-type names.",
        )
    _refuse_secrets(launch, "in the JobSet's command")
    name = _label(launch.name, _LONGEST_NAME_OF_GCLUSTER)
    variables = dict(_environment(launch))
    if _TPU.fullmatch(_value(options, "--compute-type")):
        variables["T0REPRO_PROCESS_COUNT"] = "auto"
        size = []
    else:
        if _value(options, "--num-slices") not in ("", "1"):
            raise UserError(
                "Processes of different slices without a TPU would have the same index.",
                where="--option=--num-slices",
                fix="Remove it, and give the number of all machines: --processes.",
            )
        variables |= {
            # gcluster calls its only replicated job main-job.
            "T0REPRO_COORDINATOR_ADDRESS": f"{name}-main-job-0-0.{name}:{_PORT}",
            "T0REPRO_PROCESS_COUNT": str(launch.processes),
        }
        size = [f"--num-nodes={launch.processes}"]
    words = shlex.join(["env", *(f"{key}={text}" for key, text in variables.items())])
    return [
        *("gcluster", "job", "submit", f"--name={name}", *size, f"--restarts={_RESTARTS}"),
        f"--grace-period={_SECONDS_TO_SAVE}s",
        # Bash runs it in the pod, after Kubernetes has replaced $(NAME) and $$.
        "--command=" + f"exec {words} {_timed(launch)}".replace("$", "$$"),
        # Last, because a user's value for an option above overrides it.
        *options,
    ]


def tpu_vm_commands(launch: Launch) -> list[list[str]]:
    """The gcloud commands that create a TPU, run the command on all its machines and delete it.

    The TPU itself determines the number of machines, so `processes` is not used.

    Raises:
      UserError: if the machine's options lack what gcloud requires, or the name has no letter.
    """
    options = launch.machine.options
    _require(options, "gcloud creates no TPU", "--zone", "--accelerator-type", "--version")
    # Where the TPU is; the other options describe what to create.
    place = [option for option in options if option.startswith(("--zone=", "--project="))]
    tpu_vm, name = ["gcloud", "compute", "tpus", "tpu-vm"], _label(launch.name)
    _refuse_secrets(launch, "in the list of the TPU's processes")
    variables = [*_environment(launch), ("T0REPRO_PROCESS_COUNT", "auto")]
    words = ["env", *(f"{key}={text}" for key, text in variables), *launch.command]
    return [
        [*tpu_vm, "create", name, *options],
        [*tpu_vm, "ssh", name, *place, "--worker=all", f"--command={shlex.join(words)}"],
        [*tpu_vm, "delete", name, *place, "--quiet"],
    ]


def _value(options: Sequence[str], name: str) -> str:
    """An option's value, the last one given; empty if there is none."""
    given = [option for option in options if option.startswith(f"{name}=")]
    return given[-1].removeprefix(f"{name}=") if given else ""


def _require(options: Sequence[str], does_not: str, *names: str | tuple[str, ...]) -> None:
    """Refuses options without a value for each name; of several names in a tuple one is enough."""
    for name in names:
        choices = (name,) if isinstance(name, str) else name
        if not any(_value(options, choice) for choice in choices):
            raise UserError(
                f"{does_not} without {' or '.join(choices)}.",
                where="--option",
                fix=f"Add --option={choices[0]}=..., or put it into the file of machines.",
            )


def _refuse_secrets(launch: Launch, where: str) -> None:
    secrets, words = [*launch.secrets], shlex.join(launch.command)
    if without_passwords(words) != words:
        secrets.append("a secret of the command")
    if secrets:
        raise UserError(
            f"{', '.join(secrets)} would be printed and stand {where}.",
            where="environment, in the file of machines, and the command",
            fix="Keep it in Secret Manager, and read it in the command that is started.",
        )


def _timed(launch: Launch) -> str:
    """The command for a shell; at the time limit it gets the signal, saves and ends."""
    words, seconds = shlex.join(launch.command), launch.limits.seconds
    if seconds is None:
        return words
    return f"timeout --kill-after={_SECONDS_TO_SAVE} {math.ceil(seconds)} {words}"


def _sbatch_word(option: str) -> str:
    """An option as sbatch reads it from a script, where it knows quotes, backslashes and #.

    Unlike a shell, it takes a backslash between single quotes for an escape.
    """
    whole = option.startswith("-") and not option.endswith("=")
    # A line's end at its end too, which splitlines would not show, and NUL.
    if not whole or not option.isprintable():
        raise UserError(
            f"{option!r} cannot be an option in a script for sbatch.",
            where="--option, --name",
            fix="Write it on one line and with its value, as --option=--partition=gpu.",
        )
    if not re.search(r"""[\s"'\\#]""", option):
        return option
    escaped = re.sub(r"""(["\\])""", r"\\\1", option)
    return f'"{escaped}"'


def _label(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name as JobSet and TPUs take it: lower case letters, digits and dashes, a letter first."""
    label = re.sub("^[^a-z]+", "", engines.allowed_name(name))[:longest].strip("-")
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
