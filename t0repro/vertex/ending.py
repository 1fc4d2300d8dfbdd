"""Follows a job to its end and records what came of it.

Whoever records the end, and however late, records the same: everything is read from the bucket.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from t0repro.vertex import experiments
from t0repro.vertex.cloud import Place, cloud_errors, storage_client
from t0repro.vertex.experiments import ExperimentsRun, Record
from t0repro.vertex.jobs import Look, wait_until_ended
from t0repro.vertex.results import best_metrics, copy_results
from t0repro.vertex.staging import split_address
from t0repro.vertex.uploading import uploading


def follow(
    name: str,
    record: Record | None,
    place: Place,
    *,
    poll_seconds: float,
    say: Callable[[str], None],
) -> tuple[Look, dict[str, float]]:
    """Waits for a job's end, uploads its metrics meanwhile if it is tracked, and records the end.

    Args:
      name: the job's resource name.
      record: what leads to its run; None if it is not tracked.
      place: project and location.
      poll_seconds: between two looks at the job, and at its results.
      say: receives a line for each change.

    Returns:
      The job as it ended, and its summary metrics.
    """
    with contextlib.ExitStack() as beside:
        if record is not None and record.output and record.tensorboard and _goes_on(record, place):
            where = (record.output, record.experiment, record.run_name, record.tensorboard)
            beside.enter_context(uploading(*where, place, every=poll_seconds, say=say))
        seen = wait_until_ended(name, place, poll_seconds=poll_seconds, say=say)
    # After the upload: if this process dies before the end is recorded, whoever follows next does
    # both again.
    return seen, {} if record is None else record_end(seen, record, place)


def _goes_on(record: Record, place: Place) -> bool:
    """Whether the end of a job is still to be recorded."""
    return not experiments.reopened(record, place).ended


def record_end(seen: Look, record: Record, place: Place) -> dict[str, float]:
    """Promotes the metrics of a job that has ended and sets its run's final state.

    Doing it twice has the effect of doing it once.

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
        _tell(found, seen, metrics)
    return metrics


def _tell(tracker: ExperimentsRun, seen: Look, metrics: dict[str, float]) -> None:
    tracker.metrics(metrics)
    if seen.reason:
        tracker.parameters({"failure": seen.reason})
    tracker.end(seen.state)


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
