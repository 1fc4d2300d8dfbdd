"""Auxiliary jobs as configured on a command line, alone or beside a training run that it starts.

Their options are defined once here. `t0repro aux`, `t0repro train` and `t5_mesh_transformer` read
the names, types, defaults, bounds and help texts from here, so what runs jobs is imported late.
"""

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
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from t0repro import working_copies
from t0repro.errors import UserError
from t0repro.files import check_address
from t0repro.progress import heard_by

if TYPE_CHECKING:
    from t0repro.config.t5x.gin_files import T5xInputs
    from t0repro.jobs.commands import JobSettings
    from t0repro.jobs.controller import Controller


@dataclasses.dataclass(frozen=True)
class AuxiliaryOptions:
    """The options on T5X's page about auxiliary jobs and this project's own, named as flags."""

    HEADING: ClassVar = "Auxiliary jobs"

    auxiliary_job_mixtures: Annotated[
        str | None,
        typer.Option(
            "--auxiliary_job_mixtures",
            "--auxiliary_mixtures",
            help="Mixtures, separated by commas; one job for each.",
        ),
    ] = None
    auxiliary_job_gin_file: Annotated[
        str | None, typer.Option(help="The gin file of the jobs, in T5X's dialect.")
    ] = None
    replace_gin_file: Annotated[
        bool,
        typer.Option(
            "--replace_gin_file", help="Leave the training run's gin files out of the jobs."
        ),
    ] = False
    final_auxiliary_job_steps: Annotated[
        int, typer.Option(help="0 evaluates each checkpoint; N fine-tunes each for N steps.")
    ] = 0
    auxiliary_job_build_target_path: Annotated[
        str,
        typer.Option(
            "--auxiliary_job_build_target_path",
            "--auxiliary_job_build_target",
            help="eval, train, rank-eval (options may follow), or any command.",
        ),
    ] = "eval"
    auxiliary_job_platform: Annotated[
        str | None, typer.Option(help="An entry in the file given by --machines.")
    ] = None
    auxiliary_job_cell: Annotated[
        str | None, typer.Option(help="An entry in the file given by --machines.")
    ] = None
    machines: Annotated[
        Path | None, typer.Option(help="A YAML file that defines platforms and cells.")
    ] = None
    launcher: Annotated[
        str | None, typer.Option(help="Where jobs run: local, slurm, k8s or vertex.")
    ] = None
    max_parallel: Annotated[int, typer.Option(min=1, help="Maximum number of jobs at a time.")] = 1
    poll_seconds: Annotated[float, typer.Option(min=0.01, help="Seconds between polls.")] = 10.0
    max_failures: Annotated[
        int, typer.Option(min=1, help="Number of failures before giving up on a job.")
    ] = 3
    time_limit: Annotated[float | None, typer.Option(min=0, help="Maximum seconds for a job.")] = (
        None
    )
    main_metric: Annotated[
        str | None, typer.Option(help="The TensorBoard tag to show; by default an accuracy.")
    ] = None

    @property
    def are_given(self) -> bool:
        """Whether a training run should have auxiliary jobs: any option but --machines is set."""
        # Labels of this machine are looked up in that file too.
        return dataclasses.replace(self, machines=None) != AuxiliaryOptions()

    @property
    def mixtures(self) -> tuple[str, ...]:
        """The mixtures' names."""
        names = (name.strip() for name in (self.auxiliary_job_mixtures or "").split(","))
        return tuple(name for name in names if name)


def _job_settings(options: AuxiliaryOptions, gin: T5xInputs) -> JobSettings:
    """The settings of the jobs.

    Args:
      options: the options of auxiliary jobs.
      gin: the gin files of the training, and the overrides for the jobs.
    """
    from t0repro.jobs.commands import JobSettings

    return JobSettings(
        mixtures=options.mixtures,
        gin_file=options.auxiliary_job_gin_file,
        train_gin_files=gin.gin_files,
        replace_gin_file=options.replace_gin_file,
        gin_bindings=gin.gin_bindings,
        gin_search_paths=gin.gin_search_paths,
        final_steps=options.final_auxiliary_job_steps,
        build_target=options.auxiliary_job_build_target_path,
    )


def make_controller(
    model_dir: str | os.PathLike[str],
    options: AuxiliaryOptions,
    gin: T5xInputs,
) -> Controller:
    """The controller that the options describe.

    Raises:
      UserError: if they contradict each other.
    """
    from t0repro.cloud.engines import find_machine, make_launcher
    from t0repro.jobs.controller import Controller, Policy
    from t0repro.jobs.worker import Limits

    check_address(model_dir, "--model_dir")
    machine = find_machine(
        options.machines, options.auxiliary_job_platform, options.auxiliary_job_cell
    )
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
    engine = options.launcher or machine.launcher
    return Controller(
        Path(model_dir), _job_settings(options, gin), make_launcher(engine, machine), policy
    )


def check_jobs(options: AuxiliaryOptions, gin: T5xInputs) -> None:
    """Checks everything about the jobs that is known before the first checkpoint.

    Raises:
      UserError: See `commands.check`, `commands.check_by_dry_run` and `engines.make_launcher`.
    """
    from t0repro.cloud.engines import find_machine, make_launcher
    from t0repro.jobs.commands import check, check_by_dry_run

    settings = _job_settings(options, gin)
    macros, _ = check(settings)
    machine = find_machine(
        options.machines, options.auxiliary_job_platform, options.auxiliary_job_cell
    )
    engine = options.launcher or machine.launcher
    make_launcher(engine, machine)
    # Jobs that run elsewhere may find their rows and caches only there, so of those only the gin
    # files are checked.
    if engine == "local":
        check_by_dry_run(settings, macros, machine.environment)


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
    check_jobs(options, gin)
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
    import dacite

    from t0repro.config.t5x.gin_files import T5xInputs

    # JSON has neither tuples nor paths.
    cast = dacite.Config(cast=[tuple, Path])
    asked_options, asked_gin = json.loads(asked)
    options = dacite.from_dict(AuxiliaryOptions, asked_options, cast)
    gin = dacite.from_dict(T5xInputs, asked_gin, cast)

    def training_continues() -> bool:
        # The training run writes nothing here, so readable input means the end of the file.
        return not select.select([sys.stdin], [], [], 0)[0]

    def prefixed(text: str) -> None:
        print(f"auxiliary jobs: {text}", file=sys.stderr, flush=True)

    # Raised as SystemExit, so that the launcher is closed and ends its jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with heard_by(prefixed):
            done = make_controller(model_dir, options, gin).run(training_continues)
            # A model_dir in a bucket is a working copy here; this uploads the rest of it.
            working_copies.close_all()
    except UserError as error:
        prefixed(str(error))
        done = False
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
