"""Runs auxiliary jobs' commands with --dry_run, before the first checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from t0repro.errors import UserError
from t0repro.jobs import commands
from t0repro.jobs.commands import JobSettings
from t0repro.jobs.worker import INTERPRETER
from t0repro.runs.preflight import NO_CHECKPOINT_YET


def check_by_dry_run(
    settings: JobSettings, macros: frozenset[str], environment: Mapping[str, str]
) -> None:
    """Checks tasks, splits, caches, vocabularies and lengths, each mixture as its job would.

    A process of its own for each, since registering the jobs' tasks here could clash with the
    training run's.

    Args:
      settings: What the jobs do; a command of the user's own is not run.
      macros: What `commands.check` returned.
      environment: Variables for the jobs.

    Raises:
      UserError: With what the job would end with.
    """
    if settings.run_mode is None and settings.target != "rank-eval":
        return
    for mixture in settings.mixtures:
        values: dict[str, str | int] = {
            commands.MODEL_DIR: "model_dir",
            commands.MIXTURE: mixture,
            commands.CHECKPOINT: "checkpoint",
            commands.TRAIN_STEPS: settings.final_steps,
            commands.OUTPUT: "output",
        }
        words = [*settings.command(values, macros), "--dry_run"]
        done = subprocess.run(
            [sys.executable if word == INTERPRETER else word for word in words],
            env={**os.environ, **environment, NO_CHECKPOINT_YET: "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"The jobs for {mixture} would fail. {_message(done.stderr)}")


def _message(said: str) -> str:
    """A command's own error, with its where and to do, out of all that it said."""
    _, mark, message = said.rpartition("\nt0repro: ")
    return (message if mark else said).strip()
