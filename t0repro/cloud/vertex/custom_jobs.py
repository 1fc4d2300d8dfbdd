"""Vertex AI's custom jobs: their state, waiting for them, their logs, and canceling them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

from t0repro.cloud.vertex.google import LOGGING, Place, cloud_errors, connect, find_overridden_host
from t0repro.progress import Waiting, say

State = Literal["waiting", "running", "succeeded", "failed", "canceled"]
# An unlisted state, such as one that Google adds later, counts as running.
_STATES: dict[str, State] = {
    "JOB_STATE_QUEUED": "waiting",
    "JOB_STATE_PENDING": "waiting",
    "JOB_STATE_SUCCEEDED": "succeeded",
    "JOB_STATE_PARTIALLY_SUCCEEDED": "succeeded",
    "JOB_STATE_FAILED": "failed",
    "JOB_STATE_EXPIRED": "failed",
    "JOB_STATE_CANCELLED": "canceled",
}
_ENDED = ("succeeded", "failed", "canceled")
_MOST_SECONDS_WITHOUT_ANSWER = 1800.0


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """A job as the service shows it at one moment.

    Attributes:
      name: its resource name.
      folder: the job's folder in staging.
      reason: why it failed, in the service's words; "" otherwise.
    """

    name: str
    display_name: str
    state: State
    reason: str
    folder: str
    created: Any

    @property
    def has_ended(self) -> bool:
        """Whether its state is final."""
        return self.state in _ENDED


def read_job(name: str, place: Place) -> JobStatus:
    """A job, by its resource name or its number.

    Raises:
      UserError: If there is none, or the service does not answer.
    """
    with cloud_errors("look at the job", where=name):
        return _job_status(connect(place).CustomJob.get(name))


def find_job(display_name: str, place: Place) -> JobStatus | None:
    """The latest job of a display name; None if there is none.

    Raises:
      UserError: If the service does not answer.
    """
    with cloud_errors("list the jobs", where=place.project):
        named = f'display_name="{display_name}"'
        # Names need not be unique, so callers that look for one job compare its folder as well.
        jobs = connect(place).CustomJob.list(filter=named, order_by="create_time desc")
    return _job_status(jobs[0]) if jobs else None


def cancel_job(name: str, place: Place) -> None:
    """Asks the service to end a job; it does so some time later.

    Raises:
      UserError: If there is none, or it has ended.
    """
    with cloud_errors("cancel the job", where=name):
        connect(place).CustomJob.get(name).cancel()


def wait_until_ended(name: str, place: Place, *, poll_seconds: float) -> JobStatus:
    """Polls a job until it has ended; tolerates lost connections for up to half an hour.

    Args:
      name: resource name or number.
      place: project and location.
      poll_seconds: seconds between polls.

    Raises:
      UserError: If the service does not answer for too long, or refuses access.
    """
    from google.api_core import exceptions

    # Not Google's own loop: it does not handle JOB_STATE_EXPIRED and would wait forever.
    waiting, silent_since = Waiting(), None
    while True:
        try:
            job = _job_status(connect(place).CustomJob.get(name))
        except (exceptions.ServerError, exceptions.RetryError, ConnectionError) as error:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _MOST_SECONDS_WITHOUT_ANSWER:
                # Raised again inside the block, which turns it into a UserError.
                with cloud_errors("look at the job, which continues", where=name):
                    raise
            say(f"the service does not answer, trying again: {' '.join(str(error).split())}")
        except Exception:
            with cloud_errors("look at the job, which continues", where=name):
                raise
        else:
            silent_since = None
            waiting.report(f"job {job.name.rpartition('/')[2]}: {job.state}")
            if job.has_ended:
                return job
        time.sleep(poll_seconds)


def _job_status(job: Any) -> JobStatus:
    resource = job.gca_resource
    state = _STATES.get(resource.state.name, "running")
    reason = " ".join(resource.error.message.split())
    if resource.state.name == "JOB_STATE_EXPIRED":
        reason = reason or "the machines did not become available in time"
    return JobStatus(
        name=resource.name,
        display_name=resource.display_name,
        state=state,
        reason=reason,
        folder=resource.job_spec.base_output_directory.output_uri_prefix,
        created=resource.create_time,
    )


def logs_of_job(name: str, place: Place, *, last: int | None = None) -> list[str]:
    """The lines that a job's containers and Vertex AI logged, oldest first, with their times.

    Args:
      name: resource name or number.
      place: project and location.
      last: at most this many, the latest; None for all.

    Raises:
      UserError: If there is no such job, or Cloud Logging refuses.
    """
    from google.cloud import logging

    job = read_job(name, place)
    endpoint = find_overridden_host(LOGGING)
    # Custom jobs still log under the resource type of Cloud ML Engine, Vertex AI's ancestor.
    query = f'resource.type="ml_job" AND resource.labels.job_id="{job.name.rpartition("/")[2]}"'
    with cloud_errors("read the job's log", where=name):
        client = logging.Client(
            project=place.project, client_options={"api_endpoint": endpoint} if endpoint else None
        )
        # 1,000 is the most that Cloud Logging sends for a request; its default is 50.
        entries = client.list_entries(
            filter_=query, order_by="timestamp desc", max_results=last, page_size=1000
        )
        # Request the latest first, so that the limit keeps those.
        return [_line(entry) for entry in entries][::-1]


def _line(entry: Any) -> str:
    payload = entry.payload
    text = payload.get("message", payload) if isinstance(payload, dict) else payload
    return f"{entry.timestamp:%Y-%m-%d %H:%M:%S} {str(text).rstrip()}"
