"""The flags of auxiliary jobs on t5_mesh_transformer, as `t0repro.jobs.options` defines them."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from absl import flags

from t0repro.files import input_path
from t0repro.jobs.options import AuxiliaryOptions

# The training run's gin files are Mesh TensorFlow's, a job's are T5X's: they are never joined.
_TAKEN_FOR_GRANTED = "replace_gin_file"


def define() -> None:
    """Defines the flags; without any of them there are no jobs."""
    types = typing.get_type_hints(AuxiliaryOptions, include_extras=True)
    for name, default in dataclasses.asdict(AuxiliaryOptions()).items():
        type_, option = typing.get_args(types[name])
        kinds = typing.get_args(type_) or (type_,)  # str | None
        if name == _TAKEN_FOR_GRANTED:
            flags.DEFINE_boolean(name, True, "Taken for granted: a job reads its own file.")
        elif int in kinds:
            flags.DEFINE_integer(name, default, option.help, lower_bound=option.min)
        elif float in kinds:
            flags.DEFINE_float(name, default, option.help, lower_bound=option.min)
        else:
            flags.DEFINE_string(name, default, option.help)


@contextlib.contextmanager
def jobs_beside(options: Any) -> Iterator[None]:
    """Runs the auxiliary jobs that the flags ask for while the block trains.

    Raises:
      UserError: see `beside.auxiliary_jobs_beside`.
    """
    names = [field.name for field in dataclasses.fields(AuxiliaryOptions)]
    if not any(options[name].present for name in names):
        yield
        return
    from t0repro.cloud.auxiliary import auxiliary_jobs_beside
    from t0repro.config.t5x.gin_files import T5xInputs

    jobs = AuxiliaryOptions(**{name: getattr(options, name) for name in names})
    machines = input_path(options.machines, "--machines") if options.machines else None
    jobs = dataclasses.replace(jobs, machines=machines, replace_gin_file=True)
    with auxiliary_jobs_beside(options.model_dir, jobs, T5xInputs("train")):
        yield
