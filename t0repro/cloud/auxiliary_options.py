"""The options of auxiliary jobs, defined once.

`t0repro aux`, `t0repro train` and `t5_mesh_transformer` read the names, types, defaults, bounds and
help texts from here, so this module imports nothing that runs jobs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from t0repro.cloud.launchers.table import JOB_LAUNCHERS


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
        str | None, typer.Option(help=f"Where jobs run: {', '.join(JOB_LAUNCHERS)}.")
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
