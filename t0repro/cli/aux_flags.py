"""The flags of auxiliary jobs on t5_mesh_transformer, named as on `t0repro aux`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

_TEXTS = {
    "auxiliary_job_mixtures": "Mixtures, joined by commas: for each new checkpoint a job for each.",
    "auxiliary_job_gin_file": "The T5X gin file of the jobs.",
    "auxiliary_job_build_target_path": "What a job runs: eval, train, rank-eval (options may"
    " follow), or any command.",
    "auxiliary_job_platform": "An entry of the file of machines.",
    "auxiliary_job_cell": "An entry of the file of machines.",
    "machines": "A YAML file: what platforms and cells stand for.",
    "launcher": "Where jobs run: local, slurm or k8s.",
}


def define() -> None:
    """Defines the flags; those left out make no job."""
    for name, text in _TEXTS.items():
        flags.DEFINE_string(name, None, text)
    flags.DEFINE_boolean("replace_gin_file", True, "Taken for granted: a job reads its own file.")
    flags.DEFINE_integer(
        "final_auxiliary_job_steps", 0, "0 evaluates each checkpoint; N fine-tunes each N steps."
    )
    flags.DEFINE_integer("max_parallel", 1, "The most jobs at a time.", lower_bound=1)
    flags.DEFINE_float("poll_seconds", 10.0, "Seconds between two looks.", lower_bound=0.01)


@contextlib.contextmanager
def jobs_beside(options: Any) -> Iterator[None]:
    """Runs the auxiliary jobs that the flags ask for while the block trains.

    Raises:
      UserError: see `beside.auxiliary_jobs_beside`.
    """
    if not any(options[name].present for name in _TEXTS):
        yield
        return
    from t0repro.jobs.beside import AuxiliaryOptions, auxiliary_jobs_beside

    jobs = AuxiliaryOptions(
        mixtures=options.auxiliary_job_mixtures,
        gin_file=options.auxiliary_job_gin_file,
        # The training's own gin files are Mesh TensorFlow's; a job reads T5X's.
        replace_gin_file=True,
        final_steps=options.final_auxiliary_job_steps,
        build_target=options.auxiliary_job_build_target_path or "eval",
        platform=options.auxiliary_job_platform,
        cell=options.auxiliary_job_cell,
        machines=Path(options.machines) if options.machines else None,
        launcher=options.launcher,
        max_parallel=options.max_parallel,
        poll_seconds=options.poll_seconds,
    )
    with auxiliary_jobs_beside(options.model_dir, jobs):
        yield
