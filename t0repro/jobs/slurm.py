"""Runs jobs through Slurm's commands: sbatch, squeue, sacct and scancel."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping

from t0repro.errors import UserError
from t0repro.jobs.launcher import EngineState, Job
from t0repro.jobs.worker import Limits

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING"}
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
# The job did nothing wrong: its nodes were given to another one, or failed.
_PREEMPTED = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"}


class SlurmLauncher:
    """Submits each job as a batch script that runs the worker; jobs are found by their names."""

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
          UserError: if sbatch refuses it.
        """
        worker = shlex.join([sys.executable, "-m", "t0repro.jobs.worker", str(job.write())])
        log = str(job.folder / f"{job.name}.slurm.log")
        limits = options(job.name, log, job.limits)
        # sbatch hands its own environment to the job.
        run_engine(
            *("sbatch", "--parsable", *limits, *job.options, f"--wrap={worker}"),
            environment=job.secrets,
        )

    def state(self, job: Job) -> EngineState:
        """Where a job is, from the queue, or from the accounts if it has left that."""
        queued = run_engine("squeue", "--noheader", f"--name={job.name}", "--format=%T")
        states = queued.split()
        # A job that has ended leaves the queue; the accounts remember it.
        if not states:
            accounts = run_engine(
                "sacct", "--noheader", "--allocations", f"--name={job.name}", "--format=State%30"
            )
            # Of several with one name, the latest.
            states = accounts.split("\n")[-1:] if accounts else []
        if not states:
            return "ended" if job.ending is not None else "unknown"
        state = states[-1].split()[0]  # "CANCELLED by 0" names who did it
        if state in _WAITING:
            return "waiting"
        if state in _PREEMPTED:
            return "preempted"
        return "running" if state in _RUNNING else "ended"

    def cancel(self, job: Job) -> None:
        """Cancels a job by its name."""
        run_engine("scancel", f"--name={job.name}")

    def close(self) -> None:
        """Leaves the jobs to the engine; the next controller finds them by their names."""


def options(name: str, log: str, limits: Limits) -> list[str]:
    """The options that sbatch gets for any job: its name, its log and what each process may use."""
    told = [f"--job-name={name}", f"--output={log}"]
    if limits.cpus:
        told.append(f"--cpus-per-task={limits.cpus}")
    if limits.memory_gb is not None:
        told.append(f"--mem={math.ceil(limits.memory_gb * 1000)}M")
    # Slurm counts minutes.
    if limits.seconds is not None:
        told.append(f"--time={math.ceil(limits.seconds / 60)}")
    return told


def run_engine(
    *command: str, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """What an engine's command prints, without surrounding whitespace.

    Args:
      *command: Its words.
      text: Its standard input.
      environment: Variables that are added to this process's own.

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
            fix="Start this on a machine that can submit jobs, or choose another engine.",
        ) from error
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().split("\n")[0]
        raise UserError(
            f"{command[0]} failed: {complaint or f'exit code {done.returncode}'}",
            where=shlex.join(command),
        )
    return done.stdout.strip()
