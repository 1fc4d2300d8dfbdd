"""Slurm: a batch job for each auxiliary job; a batch script that starts several processes."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys

from t0repro.cloud.launchers.launch import SECONDS_TO_SAVE, Launch, environment_of, run_command
from t0repro.cloud.launchers.machines import Machine
from t0repro.errors import UserError
from t0repro.jobs.job import Job, LauncherState, Limits
from t0repro.jobs.launcher import Launcher
from t0repro.words import is_secret

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING"}
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
# Interruptions, not failures of the job: its nodes failed or went to another job.
_PREEMPTED = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"}


def make_launcher(machine: Machine) -> Launcher:
    """The launcher of auxiliary jobs."""
    return SlurmLauncher()


def start(launch: Launch, *, dry_run: bool) -> str:
    """Submits a command, or only shows its script.

    Returns:
      The job's number, or the script.
    """
    script = slurm_script(launch)
    if dry_run:
        return script.rstrip("\n")
    return run_command("sbatch", "--parsable", text=script, environment=launch.secrets)


class SlurmLauncher(Launcher):
    """Submits each job as a batch script that runs the worker; jobs are found by their names."""

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
          UserError: if sbatch refuses it.
        """
        worker = shlex.join([sys.executable, "-m", "t0repro.jobs.worker", job.write()])
        # The file for Slurm's own output; the job's output is in its log.
        log = os.devnull if job.address else str(job.folder / f"{job.name}.slurm.log")
        limits = _sbatch_options(job.name, log, job.limits)
        # sbatch hands its own environment to the job.
        run_command(
            *("sbatch", "--parsable", *limits, *job.options, f"--wrap={worker}"),
            environment=job.secrets,
        )

    def state(self, job: Job) -> LauncherState:
        """A job's state, from the queue, or from the accounts once it has left the queue."""
        queued = run_command("squeue", "--noheader", f"--name={job.name}", "--format=%T")
        states = queued.split()
        # A job that has ended leaves the queue; the accounts keep it.
        if not states:
            accounts = run_command(
                "sacct", "--noheader", "--allocations", f"--name={job.name}", "--format=State%30"
            )
            # Of several with one name, the latest.
            states = accounts.split("\n")[-1:] if accounts else []
        if not states:
            return job.unlisted_state
        state = states[-1].split()[0]  # "CANCELLED by 0" names who did it
        if state in _WAITING:
            return "waiting"
        if state in _PREEMPTED:
            return "preempted"
        return "running" if state in _RUNNING else "ended"

    def cancel(self, job: Job) -> None:
        """Cancels a job by its name."""
        run_command("scancel", f"--name={job.name}")


def slurm_script(launch: Launch) -> str:
    """A script for sbatch: `srun` starts the processes, and ends all when one fails.

    Raises:
      UserError: for an option or a variable that the script cannot have.
    """
    options = [
        *_sbatch_options(launch.name, f"{launch.name}-%j.log", launch.limits),
        f"--ntasks={launch.processes}",
        f"--signal=TERM@{SECONDS_TO_SAVE}",
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
            for name, text in environment_of(launch)
        ),
        f"srun --kill-on-bad-exit=1 --label {shlex.join(launch.command)}",
    ]
    return "\n".join(lines) + "\n"


def _sbatch_options(name: str, log: str, limits: Limits) -> list[str]:
    """The options that sbatch gets for any job: its name, its log and what each process may use."""
    flags = [f"--job-name={name}", f"--output={log}"]
    if limits.cpus:
        flags.append(f"--cpus-per-task={limits.cpus}")
    if limits.memory_gb is not None:
        flags.append(f"--mem={math.ceil(limits.memory_gb * 1000)}M")
    # Slurm counts minutes.
    if limits.seconds is not None:
        flags.append(f"--time={math.ceil(limits.seconds / 60)}")
    return flags


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
