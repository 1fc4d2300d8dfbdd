"""A command to start as several processes, and what launchers' modules share.

The processes find each other by what the launcher puts into their environment
(t0repro.partitioning.processes).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from t0repro.cloud.launchers.machines import Machine
from t0repro.errors import UserError
from t0repro.jobs.job import Limits
from t0repro.words import is_secret, remove_passwords

PORT = 8476  # any free one, the same on all machines
RESTARTS = 3
# The processes save and end when they get this signal; Slurm sends it before the time is up.
SECONDS_TO_SAVE = 120
# JobSet refuses a manifest whose longest pod name, NAME-processes-0-9999-abcde, has more than 63
# letters, and a TPU's name may have 40.
_LONGEST_NAME = 40


@dataclasses.dataclass(frozen=True)
class Launch:
    """A command to start.

    Attributes:
      name: of the job on the launcher.
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
        variables = self.machine.environment.items()
        return {name: value for name, value in variables if is_secret(name, value)}

    @property
    def shown(self) -> Launch:
        """The launch without the secrets' values, for printing."""
        hidden = self.machine.environment | dict.fromkeys(self.secrets, "***")
        return dataclasses.replace(
            self, machine=dataclasses.replace(self.machine, environment=hidden)
        )


def run_command(
    *command: str, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """The output of a launcher's command, without surrounding whitespace.

    Args:
      *command: Its words.
      text: Its standard input.
      environment: Variables to add to this process's own.

    Raises:
      UserError: if the command is missing or fails, with the first line of its complaint.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except FileNotFoundError as error:
        raise UserError(
            f"There is no command {command[0]} here.",
            fix="Start this on a machine that can submit jobs, or choose another launcher.",
        ) from error
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().split("\n")[0]
        raise UserError(
            f"{command[0]} failed: {complaint or f'exit code {done.returncode}'}",
            where=shlex.join(command),
            fix="Run this command to see all that it says.",
        )
    return done.stdout.strip()


def option_value(options: Sequence[str], name: str) -> str:
    """An option's value, the last one given; empty if there is none."""
    values = [option for option in options if option.startswith(f"{name}=")]
    return values[-1].removeprefix(f"{name}=") if values else ""


def require_options(options: Sequence[str], does_not: str, *names: str | tuple[str, ...]) -> None:
    """Refuses options without a value for each name; of several names in a tuple one is enough."""
    for name in names:
        choices = (name,) if isinstance(name, str) else name
        if not any(option_value(options, choice) for choice in choices):
            raise UserError(
                f"{does_not} without {' or '.join(choices)}.",
                where="--option",
                fix=f"Add --option={choices[0]}=..., or put it into the file of machines.",
            )


def refuse_secrets(launch: Launch, where: str) -> None:
    """Raises UserError for a secret that would stand `where` others can read it."""
    secrets, words = [*launch.secrets], shlex.join(launch.command)
    if remove_passwords(words) != words:
        secrets.append("a secret of the command")
    if secrets:
        raise UserError(
            f"{', '.join(secrets)} would be printed and stand {where}.",
            where="environment, in the file of machines, and the command",
            fix="Keep it in Secret Manager, and read it in the command that is started.",
        )


def limit_command_time(launch: Launch) -> str:
    """The command for a shell; at the time limit it gets the signal, saves and ends."""
    words, seconds = shlex.join(launch.command), launch.limits.seconds
    if seconds is None:
        return words
    return f"timeout --kill-after={SECONDS_TO_SAVE} {math.ceil(seconds)} {words}"


def make_allowed_name(name: str) -> str:
    """A name as Kubernetes allows it: lower case letters, digits and dashes, at most 63."""
    # Keep the end of a name, which distinguishes attempts.
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-63:].strip("-")


def resource_name(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name as JobSet and TPUs take it: lower case letters, digits and dashes, a letter first."""
    label = re.sub("^[^a-z]+", "", make_allowed_name(name))[:longest].strip("-")
    if not label:
        raise UserError(
            f"The name {name!r} has no letter from a to z.",
            where="--name",
            fix="Choose a name such as t0-train.",
        )
    return label


def environment_of(launch: Launch) -> list[tuple[str, str]]:
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
