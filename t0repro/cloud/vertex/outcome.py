"""Follows a job to its end and records the outcome.

The end is recorded the same however late and by any command: all of it is read from the bucket.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from t0repro.cloud.vertex import experiments
from t0repro.cloud.vertex.custom_jobs import JobStatus, wait_until_ended
from t0repro.cloud.vertex.experiments import Record
from t0repro.cloud.vertex.google import Place, cloud_errors, storage_client
from t0repro.cloud.vertex.results import best_metrics, copy_results
from t0repro.cloud.vertex.staging import split_address
from t0repro.cloud.vertex.tensorboard import upload_in_background


def follow(
    name: str,
    record: Record | None,
    place: Place,
    *,
    poll_seconds: float,
) -> tuple[JobStatus, dict[str, float]]:
    """Waits for a job's end, uploading its metrics meanwhile if it is tracked, and records the end.

    Args:
      name: the job's resource name.
      record: what leads to its run; None if it is not tracked.
      place: project and location.
      poll_seconds: seconds between polls of the job and its results.

    Returns:
      The job in its final state, and its summary metrics.
    """
    with contextlib.ExitStack() as uploads:
        if record is not None and record.output and record.tensorboard:
            # If the end is recorded, everything has been uploaded.
            if not experiments.open_run(record, place).has_ended:
                names = (record.output, record.experiment, record.run_name, record.tensorboard)
                uploads.enter_context(upload_in_background(*names, place, every=poll_seconds))
        job = wait_until_ended(name, place, poll_seconds=poll_seconds)
    # After the upload: if this process dies before the end is recorded, the next command that
    # follows the job does both again.
    return job, {} if record is None else record_end(job, record, place)


def record_end(job: JobStatus, record: Record, place: Place) -> dict[str, float]:
    """Promotes the metrics of a job that has ended and sets its run's final state.

    Doing it twice has the same effect as doing it once.

    Returns:
      The summary metrics; see `results.best_metrics`.
    """
    run = experiments.open_run(record, place)
    metrics: dict[str, float] = {}
    if record.output is not None:
        with tempfile.TemporaryDirectory(prefix="t0repro-vertex-") as folder:
            copy_results(storage_client(place.project), record.output, Path(folder))
            metrics = best_metrics(Path(folder))
    # Another follower may have recorded the end already.
    if not run.has_ended:
        run.log_metrics(metrics)
        if job.reason:
            run.log_parameters({"failure": job.reason})
        run.record_end(job.state)
    return metrics


def read_record(job: JobStatus, place: Place) -> Record | None:
    """What leads from a job to its run; None if it is not tracked."""
    from google.api_core import exceptions

    bucket, prefix = split_address(job.folder)
    blob = storage_client(place.project).bucket(bucket).blob(f"{prefix}/{experiments.RECORD}")
    with cloud_errors("read what tracks the job", where=job.folder):
        try:
            return Record(**json.loads(blob.download_as_bytes()))
        except exceptions.NotFound:
            return None
