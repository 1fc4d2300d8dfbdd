"""Submits a checked job to Vertex AI, with its gin files in the staging bucket."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from t0repro.cloud.vertex import experiments, staging
from t0repro.cloud.vertex.command_line import address_of, read_arguments
from t0repro.cloud.vertex.custom_jobs import find_job
from t0repro.cloud.vertex.experiments import Facts, Record, Tracking
from t0repro.cloud.vertex.google import Place, cloud_errors, connect, storage_client
from t0repro.cloud.vertex.job_config import JobConfig
from t0repro.cloud.vertex.spec import JobSpec
from t0repro.cloud.vertex.staging import StagedFiles
from t0repro.errors import UserError

CONFIGURATION, ARCHITECTURE = "config.gin", "model-info.txt"  # as T5X names them


@dataclasses.dataclass(frozen=True)
class PreparedJob:
    """A job whose files have destinations but are not copied yet."""

    spec: JobSpec
    staged: StagedFiles


def prepare(asked: JobSpec, config: JobConfig, place: Place) -> PreparedJob:
    """The specification of a job, and the files to stage; sends nothing.

    Args:
      asked: the job, whose arguments are the command line that it would have on this machine:
        `--run_mode=MODE ...`, or `t5_mesh_transformer ...`.
      config: the content of its gin files, from `checks.check_job`.
      place: where to run it.

    Raises:
      UserError: If the gin files cannot be staged, or the command line is wrong.
    """
    arguments = read_arguments(asked.arguments)
    if place.staging_bucket is None:
        raise UserError(
            "There is no bucket for the job's files.",
            where="--staging_bucket",
            fix="Give gs://BUCKET, in the job's region.",
        )
    folder = staging.new_folder(place.staging_bucket, asked.display_name)
    staged = staging.stage(arguments, folder)
    if config.text:
        staged.files[CONFIGURATION] = config.text.encode()
    if config.architecture:
        staged.files[ARCHITECTURE] = config.architecture.encode()
    spec = dataclasses.replace(asked, arguments=staged.arguments, command=arguments.command)
    return PreparedJob(spec, staged)


def submit(asked: JobSpec, config: JobConfig, place: Place) -> str:
    """Starts a job that is not tracked and returns its resource name.

    Raises:
      UserError: If anything refuses it; then nothing of it remains.
    """
    prepared = prepare(asked, config, place)
    with _stage_files(prepared.staged, storage_client(place.project)):
        return _submit_prepared(prepared, place)


def submit_and_track(
    asked: JobSpec, config: JobConfig, tracking: Tracking, place: Place
) -> tuple[str, Record]:
    """Starts a job and creates its run in Vertex AI Experiments.

    Returns:
      The job's resource name, and what leads to its run; `outcome.follow` does the rest.

    Raises:
      UserError: If anything refuses it; then no job, run or staged file remains.
    """
    # First, since it creates nothing: most refusals then leave nothing to delete.
    experiments.check_tracking(tracking, place)
    prepared, storage = prepare(asked, config, place), storage_client(place.project)
    staged = prepared.staged
    with (
        _stage_files(staged, storage),
        experiments.create_run(tracking, prepared.spec, _facts(config, staged), place) as run,
    ):
        record = Record(
            experiment=tracking.experiment,
            run_name=tracking.run_name,
            execution=run.execution.resource_name,
            output=config.output and address_of(config.output),
            tensorboard=run.tensorboard,
        )
        # Before the job is created, so that no job refers to a missing file.
        staging.write(storage, f"{staged.folder}/{experiments.RECORD}", record.to_json())
        name = _submit_prepared(prepared, place)
    # Outside the block: the job runs now, and an error here must not undo what belongs to it.
    run.record_job(name)
    return name, record


@contextlib.contextmanager
def _stage_files(staged: StagedFiles, storage: Any) -> Iterator[None]:
    """Copies files for a job that is submitted in the block; removes them if anything fails."""
    try:
        for name, data in staged.files.items():
            staging.write(storage, f"{staged.folder}/{name}", data)
        yield
    # Ctrl-C must not leave anything behind either.
    except BaseException:
        with contextlib.suppress(UserError):  # the first error says more
            staging.remove(storage, *staging.split_address(staged.folder))
        raise


def _submit_prepared(prepared: PreparedJob, place: Place) -> str:
    """Starts a job and returns its resource name."""
    from google.api_core import exceptions

    spec = prepared.spec
    with cloud_errors("create the job", where=spec.display_name):
        job = connect(place).CustomJob(
            display_name=spec.display_name,
            worker_pool_specs=spec.worker_pool_specs,
            # By this address a job leads to its staged files, and to what tracks it.
            base_output_dir=prepared.staged.folder,
            labels=dict(spec.labels),
            staging_bucket=place.staging_bucket,
        )
        try:
            job.submit(service_account=spec.service_account, network=spec.network)
        except (exceptions.ServerError, exceptions.RetryError):
            # The job may exist although the answer was lost. No other has its folder.
            created = find_job(spec.display_name, place)
            if created is None or created.folder != prepared.staged.folder:
                raise
            return created.name
    return job.resource_name


def _facts(config: JobConfig, staged: StagedFiles) -> Facts:
    def staged_address(name: str) -> str | None:
        return f"{staged.folder}/{name}" if name in staged.files else None

    return Facts(
        configuration=staged_address(CONFIGURATION),
        architecture=staged_address(ARCHITECTURE),
        output=config.output and address_of(config.output),
        mixture=config.mixture,
        split=config.split,
    )
