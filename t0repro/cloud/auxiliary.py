"""Auxiliary jobs as a command line configures them, alone or with a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dacite

from t0repro import storage
from t0repro.cloud.auxiliary_options import AuxiliaryOptions
from t0repro.cloud.launchers.machines import Machine, find_machine
from t0repro.cloud.launchers.table import JOB_LAUNCHERS, import_launcher
from t0repro.config.settings import shared_values
from t0repro.config.t5x.gin_files import T5xInputs
from t0repro.errors import UserError
from t0repro.jobs.commands import JobSettings, add_skip_missing, check, check_by_dry_run
from t0repro.jobs.controller import Controller, Policy
from t0repro.jobs.job import Limits
from t0repro.jobs.launcher import Launcher
from t0repro.progress import heard_by, say
from t0repro.storage import check_address


def _job_settings(options: AuxiliaryOptions, gin: T5xInputs) -> JobSettings:
    """The settings of the jobs.

    Args:
      options: the options of auxiliary jobs.
      gin: the gin files of the training and the modules that they may import, and the overrides
        for the jobs.
    """
    return JobSettings(
        **shared_values(options, JobSettings),
        **shared_values(gin, JobSettings),
        gin_file=options.auxiliary_job_gin_file,
        train_gin_files=gin.gin_files,
        final_steps=options.final_auxiliary_job_steps,
        build_target=options.auxiliary_job_build_target_path,
    )


def hand_on_skip_missing(options: AuxiliaryOptions) -> AuxiliaryOptions:
    """The options of jobs that have --skip_missing, as their training run has."""
    target = add_skip_missing(options.auxiliary_job_build_target_path)
    return dataclasses.replace(options, auxiliary_job_build_target_path=target)


def make_controller(
    model_dir: str | os.PathLike[str], options: AuxiliaryOptions, gin: T5xInputs
) -> Controller:
    """The controller that the options describe.

    Raises:
      UserError: if they contradict each other.
    """
    check_address(model_dir, "--model_dir")
    machine, launcher = _find_launcher(options)
    policy = Policy(
        max_parallel=options.max_parallel,
        poll_seconds=options.poll_seconds,
        max_failures=options.max_failures,
        limits=Limits(
            cpus=machine.cpus,
            memory_gb=machine.memory_gb,
            seconds=options.time_limit or machine.time_limit,
        ),
        environment=machine.environment,
        options=tuple(machine.options),
        metric=options.main_metric,
    )
    return Controller(Path(model_dir), _job_settings(options, gin), launcher, policy)


def _find_launcher(options: AuxiliaryOptions) -> tuple[Machine, Launcher]:
    """The machine of the jobs, and what runs them there.

    Raises:
      UserError: if there is none, or the machine's entry lacks what the launcher needs.
    """
    machine = find_machine(
        options.machines, options.auxiliary_job_platform, options.auxiliary_job_cell
    )
    name = options.launcher or machine.launcher
    if name not in JOB_LAUNCHERS:
        raise UserError(
            f"There is no launcher {name}.",
            where="--launcher",
            fix=f"Choose one of {', '.join(JOB_LAUNCHERS)}.",
        )
    return machine, import_launcher(name).make_launcher(machine)


def check_jobs(options: AuxiliaryOptions, gin: T5xInputs) -> AuxiliaryOptions:
    """Checks everything about the jobs that is known before the first checkpoint.

    Returns:
      The options without the mixtures of which --skip_missing leaves out every task.

    Raises:
      UserError: See `commands.check`, `commands.check_by_dry_run` and `_find_launcher`.
    """
    settings = _job_settings(options, gin)
    macros, _ = check(settings)
    machine, launcher = _find_launcher(options)
    # Jobs that run elsewhere may find their rows and caches only there, so of those only the gin
    # files are checked.
    if not launcher.on_this_machine:
        return options
    mixtures = check_by_dry_run(settings, macros, machine.environment)
    return dataclasses.replace(options, auxiliary_job_mixtures=",".join(mixtures))


@contextlib.contextmanager
def auxiliary_jobs_during_training(
    model_dir: str | os.PathLike[str], options: AuxiliaryOptions, gin: T5xInputs
) -> Iterator[None]:
    """Runs a controller in a separate process while the block trains in `model_dir`.

    When the block ends, the controller finishes what is left, and the block waits for it.

    Raises:
      UserError: at once, if a job could not work; at the end, if not every job succeeded.
    """
    # Check here too: the controller would find a mistake only after training has begun.
    check_address(model_dir, "--model_dir")
    options = check_jobs(options, gin)
    if not options.mixtures:
        say("there are no auxiliary jobs: nothing of their mixtures is on this machine")
        yield
        return
    asked = json.dumps([dataclasses.asdict(options), dataclasses.asdict(gin)], default=str)
    controller = subprocess.Popen(
        [sys.executable, "-m", __name__, os.fspath(model_dir), asked],
        # Shows the controller the end of training: the system closes it however training ends.
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for training; the controller ends when the pipe closes
    )
    assert controller.stdin is not None
    try:
        yield
    except BaseException:
        controller.terminate()  # its jobs end with it, and the next one restarts them
        raise
    finally:
        controller.stdin.close()
        say("waiting for the auxiliary jobs of the last checkpoints")
        code = controller.wait()
    if code:
        raise UserError(
            "Training ended well, but not every auxiliary job did.",
            where=os.fspath(model_dir),
            fix=f"See which by `t0repro aux status {os.fspath(model_dir)}`, and start the rest by"
            " `t0repro aux --once` with the same settings.",
        )


def _main(model_dir: str, asked: str) -> None:
    """The controller's process."""
    # JSON has neither tuples nor paths.
    cast = dacite.Config(cast=[tuple, Path])
    asked_options, asked_gin = json.loads(asked)
    options = dacite.from_dict(AuxiliaryOptions, asked_options, cast)
    gin = dacite.from_dict(T5xInputs, asked_gin, cast)

    def training_continues() -> bool:
        # The training run writes nothing here, so readable input means the end of the file.
        return not select.select([sys.stdin], [], [], 0)[0]

    def print_prefixed(text: str) -> None:
        print(f"auxiliary jobs: {text}", file=sys.stderr, flush=True)

    # Raised as SystemExit, so that the launcher is closed and ends its jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with heard_by(print_prefixed):
            done = make_controller(model_dir, options, gin).run(training_continues)
            # A model_dir in a bucket is a working copy here; this uploads the rest of it.
            storage.close_copies()
    except UserError as error:
        print_prefixed(str(error))
        done = False
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
