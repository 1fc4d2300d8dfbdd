"""Submits a job to Vertex AI and follows it to its recorded end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t0repro.cloud import experiments, job_files, xmanager
from t0repro.cloud.checks import Configured
from t0repro.cloud.experiments import Facts, Record, Tracking
from t0repro.cloud.google import (
    Look,
    Place,
    cloud_errors,
    connect,
    find_job,
    storage_client,
    wait_until_ended,
)
from t0repro.cloud.job_files import best_metrics, copy_results, split_address, uploading
from t0repro.cloud.spec import Arguments, JobSpec, Machines, address_of, read_arguments
from t0repro.errors import UserError

CONFIGURATION, ARCHITECTURE = "config.gin", "model-info.txt"  # as T5X names them


@dataclasses.dataclass(frozen=True)
class Request:
    """A user's request for a job, with the command line that it would have on this machine.

    Attributes:
      words: `--run_mode=MODE ...`, or `t5_mesh_transformer ...`.
      labels, service_account, network: see JobSpec.
    """

    display_name: str
    image_uri: str
    machines: Machines
    words: tuple[str, ...]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    service_account: str | None = None
    network: str | None = None

    @property
    def arguments(self) -> Arguments:
        """The command line, read."""
        return read_arguments(self.words)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A job whose files have destinations but are not copied yet."""

    spec: JobSpec
    staged: job_files.Staged


def prepare(request: Request, configured: Configured, place: Place) -> Prepared:
    """The specification of a job, and the files to stage; sends nothing.

    Args:
      request: the job.
      configured: the content of its gin files, from `checks.check` or `checks.read`.
      place: where to run it.

    Raises:
      UserError: If the gin files cannot be staged, or a label or the command line is wrong.
    """
    arguments = request.arguments
    if place.staging_bucket is None:
        raise UserError(
            "There is no bucket for the job's files.",
            where="--staging_bucket",
            fix="Give gs://BUCKET, in the job's region.",
        )
    folder = job_files.new_folder(place.staging_bucket, request.display_name)
    staged = job_files.stage(arguments, folder)
    if configured.text:
        staged.files[CONFIGURATION] = configured.text.encode()
    if configured.architecture:
        staged.files[ARCHITECTURE] = configured.architecture.encode()
    spec = JobSpec(
        display_name=request.display_name,
        image_uri=request.image_uri,
        machines=request.machines,
        arguments=staged.arguments,
        command=arguments.command,
        labels=request.labels,
        service_account=request.service_account,
        network=request.network,
    )
    return Prepared(spec, staged)


def create_custom_job(request: Request, configured: Configured, place: Place) -> Any:
    """Copies a job's gin files to staging and returns the job, not yet submitted.

    Returns:
      A google.cloud.aiplatform.CustomJob, to `submit`.

    Raises:
      UserError: If the bucket is missing or refuses, with nothing left in it.
    """
    prepared = prepare(request, configured, place)
    job_files.upload(prepared.staged, storage_client(place.project))
    return _custom_job(prepared, place)


def submit(
    request: Request,
    configured: Configured,
    place: Place,
    executor: xmanager.Executor | None = None,
) -> str:
    """Starts a job that is not tracked and returns its resource name.

    Args:
      request: the job.
      configured: the content of its gin files.
      place: where it is to run.
      executor: starts it as an experiment of XManager; on this machine, the experiment's number
        is returned instead.

    Raises:
      UserError: If anything refuses it; then nothing of it remains.
    """
    prepared, storage = prepare(request, configured, place), storage_client(place.project)
    if executor:
        xmanager.check(prepared.spec, executor)
    with _staged(prepared.staged, storage):
        if executor:
            return xmanager.launch(prepared.spec, executor, place)
        return _submitted(prepared, place)


def submit_and_track(
    request: Request, configured: Configured, tracking: Tracking, place: Place
) -> tuple[str, Record]:
    """Starts a job and creates its run in Vertex AI Experiments.

    Returns:
      The job's resource name, and what leads to its run; `ending.follow` does the rest.

    Raises:
      UserError: If anything refuses it; then no job, run or staged file remains.
    """
    # First, since it creates nothing: most refusals then leave nothing to delete.
    experiments.check(tracking, place)
    prepared, storage = prepare(request, configured, place), storage_client(place.project)
    staged = prepared.staged
    with (
        _staged(staged, storage),
        experiments.started(tracking, prepared.spec, _facts(configured, staged), place) as run,
    ):
        record = Record(
            experiment=tracking.experiment,
            run_name=tracking.run_name,
            execution=run.execution.resource_name,
            output=configured.output and address_of(configured.output),
            tensorboard=run.tensorboard,
        )
        # Before the job is created, so that no job refers to a missing file.
        job_files.write(storage, f"{staged.folder}/{experiments.RECORD}", record.to_json())
        name = _submitted(prepared, place)
    # Outside the block: the job runs now, and an error here must not undo what belongs to it.
    run.submitted(name)
    return name, record


@contextlib.contextmanager
def _staged(staged: job_files.Staged, storage: Any) -> Iterator[None]:
    """Copies files for a job that is submitted in the block; removes them if the block fails."""
    job_files.upload(staged, storage)
    try:
        yield
    except BaseException:
        with contextlib.suppress(UserError):  # the first error says more
            job_files.remove(storage, *job_files.split_address(staged.folder))
        raise


def _custom_job(prepared: Prepared, place: Place) -> Any:
    """The google.cloud.aiplatform.CustomJob of a specification; nothing is sent."""
    spec = prepared.spec
    return connect(place).CustomJob(
        display_name=spec.display_name,
        worker_pool_specs=spec.worker_pool_specs,
        # By this address a job leads to its staged files, and to what tracks it.
        base_output_dir=prepared.staged.folder,
        labels=dict(spec.labels),
        staging_bucket=place.staging_bucket,
    )


def _submitted(prepared: Prepared, place: Place) -> str:
    """Starts a job and returns its resource name."""
    from google.api_core import exceptions

    spec = prepared.spec
    with cloud_errors("create the job", where=spec.display_name):
        job = _custom_job(prepared, place)
        try:
            job.submit(service_account=spec.service_account, network=spec.network)
        except (exceptions.ServerError, exceptions.RetryError):
            # The job may exist although the answer was lost. No other has its folder.
            found = find_job(spec.display_name, place)
            if found is None or found.folder != prepared.staged.folder:
                raise
            return found.name
    return job.resource_name


def _facts(configured: Configured, staged: job_files.Staged) -> Facts:
    def staged_as(name: str) -> str | None:
        return f"{staged.folder}/{name}" if name in staged.files else None

    return Facts(
        configuration=staged_as(CONFIGURATION),
        architecture=staged_as(ARCHITECTURE),
        output=configured.output and address_of(configured.output),
        mixture=configured.mixture,
        split=configured.split,
    )


# ---- Follows a job to its end and records what came of it ----------------------------------------

# The end is recorded the same however late and by any command: all of it is read from the bucket.


def follow(
    name: str,
    record: Record | None,
    place: Place,
    *,
    poll_seconds: float,
) -> tuple[Look, dict[str, float]]:
    """Waits for a job's end, uploading its metrics meanwhile if it is tracked, and records the end.

    Args:
      name: the job's resource name.
      record: what leads to its run; None if it is not tracked.
      place: project and location.
      poll_seconds: seconds between polls of the job and its results.

    Returns:
      The job in its final state, and its summary metrics.
    """
    with contextlib.ExitStack() as beside:
        if record is not None and record.output and record.tensorboard:
            where = (record.output, record.experiment, record.run_name, record.tensorboard)
            # If the end is recorded, everything has been uploaded.
            if not experiments.reopened(record, place).ended:
                beside.enter_context(uploading(*where, place, every=poll_seconds))
        seen = wait_until_ended(name, place, poll_seconds=poll_seconds)
    # After the upload: if this process dies before the end is recorded, the next command that
    # follows the job does both again.
    return seen, {} if record is None else record_end(seen, record, place)


def record_end(seen: Look, record: Record, place: Place) -> dict[str, float]:
    """Promotes the metrics of a job that has ended and sets its run's final state.

    Doing it twice has the same effect as doing it once.

    Returns:
      The summary metrics; see `results.best_metrics`.
    """
    found = experiments.reopened(record, place)
    metrics: dict[str, float] = {}
    if record.output is not None:
        with tempfile.TemporaryDirectory(prefix="t0repro-vertex-") as folder:
            copy_results(storage_client(place.project), record.output, Path(folder))
            metrics = best_metrics(Path(folder))
    # Another follower may have recorded the end already.
    if not found.ended:
        found.metrics(metrics)
        if seen.reason:
            found.parameters({"failure": seen.reason})
        found.end(seen.state)
    return metrics


def record_of(seen: Look, place: Place) -> Record | None:
    """What leads from a job to its run; None if it is not tracked."""
    from google.api_core import exceptions

    bucket, prefix = split_address(seen.folder)
    blob = storage_client(place.project).bucket(bucket).blob(f"{prefix}/{experiments.RECORD}")
    with cloud_errors("read what tracks the job", where=seen.folder):
        try:
            return Record(**json.loads(blob.download_as_bytes()))
        except exceptions.NotFound:
            return None
