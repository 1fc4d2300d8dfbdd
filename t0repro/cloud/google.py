"""Google Cloud: connections to its services, their errors in words, and Vertex AI's custom jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

from t0repro.buckets import has_google_credentials
from t0repro.errors import UserError
from t0repro.progress import say

# The names of services in gcloud's own variables for other endpoints, as private networks need.
VERTEX, LOGGING = "AIPLATFORM", "LOGGING"
_LOGIN = "Log in with `gcloud auth application-default login`."


@dataclasses.dataclass(frozen=True)
class Place:
    """Where jobs run and files are staged.

    Attributes:
      location: a region, such as europe-west4.
      staging_bucket: `gs://BUCKET` or a folder in it.
    """

    project: str
    location: str
    staging_bucket: str | None = None


def connect(place: Place) -> Any:
    """The module google.cloud.aiplatform, set up for a place.

    Raises:
      UserError: If it is not installed, or the location is not one of Vertex AI's regions.
    """
    try:
        from google.cloud import aiplatform
    except ImportError as error:
        raise UserError(
            f"Google's client for Vertex AI is not installed: {error}.",
            fix="Install the extra vertex: EXTRAS=vertex bash scripts/setup.sh.",
        ) from error
    _quiet()
    try:
        aiplatform.init(
            project=place.project,
            location=place.location,
            staging_bucket=place.staging_bucket,
            api_endpoint=overridden(VERTEX),
        )
    except ValueError as error:
        raise UserError(
            f"{place.location} is not a region of Vertex AI.",
            where="--location",
            fix="Give a region, such as us-central1 or europe-west4.",
        ) from error
    return aiplatform


def _quiet() -> None:
    """Makes Google's client log errors only.

    It logs to standard output, where a program reads --json: each request, and warnings about
    arguments that are given on purpose. In a terminal it also prints its notebooks' buttons as
    `<IPython.core.display.HTML object>` as soon as anything has imported IPython.
    """
    from google.cloud.aiplatform.utils import _ipython_utils

    _ipython_utils.is_ipython_available = _is_notebook
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("google.cloud.aiplatform") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.ERROR)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def overridden(service: str) -> str | None:
    """The host that gcloud's variable gives for a service in place of Google's own, if any."""
    address = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}", "")
    # The variable may hold a whole address; the clients take a host.
    return re.sub("^https://|/$", "", address) or None


def check_login() -> None:
    """Raises UserError on a machine without credentials for Google Cloud; nothing is sent."""
    import google.auth

    # Without a file to read, Google's library would query the network for seconds.
    if not (os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or has_google_credentials()):
        raise UserError("This machine has no Google Cloud credentials.", fix=_LOGIN)
    with cloud_errors("read the credentials"):
        google.auth.default()


def storage_client(project: str) -> Any:
    """A client of Cloud Storage."""
    from google.cloud import storage

    with cloud_errors("open Cloud Storage"):
        return storage.Client(project=project)


@contextlib.contextmanager
def cloud_errors(doing: str, where: str | None = None) -> Iterator[None]:
    """Turns what Google's clients raise into a UserError.

    Args:
      doing: the requested action, after "could not": "create the job".
      where: the resource or flag concerned.

    Raises:
      UserError: for any error of a service, of the credentials or of the connection.
    """
    import google.auth.exceptions
    import requests
    from google.api_core import exceptions

    try:
        yield
    except exceptions.GoogleAPICallError as error:
        kind, fix = _explained(error)
        raise UserError(
            f"Could not {doing}: {kind}: {_said(error)}", where=where, fix=fix
        ) from error
    except google.auth.exceptions.GoogleAuthError as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"Could not {doing}: no credentials that Google accepts: {said}",
            where=where,
            fix=_LOGIN,
        ) from error
    except ValueError as error:
        # The clients themselves refuse an impossible resource name, such as one with a space; any
        # other ValueError is a fault of ours.
        if "not a valid resource id" not in str(error):
            raise
        raise UserError(
            f"Could not {doing}: nothing there can have this name: {error}",
            where=where,
            fix="Give its number, or its name of letters, digits and dashes; its display"
            " name is neither.",
        ) from error
    # RetryError, by which a client gives up, is no GoogleAPICallError.
    except (exceptions.RetryError, requests.RequestException, ConnectionError) as error:
        raise UserError(
            f"Could not {doing}: the connection failed: {' '.join(str(error).split())}",
            where=where,
            fix="Look at the network, then start the same command again.",
        ) from error


def _explained(error: Any) -> tuple[str, str]:
    """The kind of a service's error, and what to do about it."""
    from google.api_core import exceptions

    # In this order: Unauthenticated and the quota's are subclasses of more general ones.
    kinds = (
        (exceptions.Unauthorized, "not logged in", _LOGIN),
        (
            exceptions.Forbidden,
            "permission denied",
            "Have an administrator grant the role: roles/aiplatform.user for Vertex AI,"
            " roles/storage.objectAdmin and roles/storage.legacyBucketReader for the bucket.",
        ),
        (
            exceptions.TooManyRequests,
            "the quota is used up",
            "Wait for other jobs to end, ask for more on the console's page of quotas, or choose"
            " another --accelerator_type, a smaller --accelerator_count or another --location.",
        ),
        (exceptions.NotFound, "it does not exist", "Look at its name, project and location."),
        (exceptions.Conflict, "it exists already", "Choose another name."),
        (exceptions.ClientError, "the request is refused", "Correct what the message names."),
    )
    for kind, words, fix in kinds:
        if isinstance(error, kind):
            return words, fix
    return "the service failed", "Start the same command again in a few minutes."


def _said(error: Any) -> str:
    """The service's message on one line, without the address that Cloud Storage puts before it."""
    return re.sub(r"^(GET|POST|PUT|DELETE|PATCH) \S+: ", "", " ".join(error.message.split()))


# ---- Custom jobs: their state, waiting for them, their logs, and cancelling them -----------------

State = Literal["waiting", "running", "succeeded", "failed", "cancelled"]
# An unlisted state, such as one that Google adds later, counts as running.
_STATES: dict[str, State] = {
    "JOB_STATE_QUEUED": "waiting",
    "JOB_STATE_PENDING": "waiting",
    "JOB_STATE_SUCCEEDED": "succeeded",
    "JOB_STATE_PARTIALLY_SUCCEEDED": "succeeded",
    "JOB_STATE_FAILED": "failed",
    "JOB_STATE_EXPIRED": "failed",
    "JOB_STATE_CANCELLED": "cancelled",
}
_ENDED = ("succeeded", "failed", "cancelled")
_MOST_SECONDS_WITHOUT_ANSWER = 1800.0


@dataclasses.dataclass(frozen=True)
class Look:
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
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in _ENDED


def look_at_job(name: str, place: Place) -> Look:
    """A job, by its resource name or its number.

    Raises:
      UserError: If there is none, or the service does not answer.
    """
    with cloud_errors("look at the job", where=name):
        return _seen(connect(place).CustomJob.get(name))


def find_job(display_name: str, place: Place) -> Look | None:
    """The latest job of a display name; None if there is none.

    Raises:
      UserError: If the service does not answer.
    """
    with cloud_errors("list the jobs", where=place.project):
        named = f'display_name="{display_name}"'
        # Names need not be unique, so callers that look for one job compare its folder as well.
        found = connect(place).CustomJob.list(filter=named, order_by="create_time desc")
    return _seen(found[0]) if found else None


def cancel_job(name: str, place: Place) -> None:
    """Asks the service to end a job; it does so some time later.

    Raises:
      UserError: If there is none, or it has ended.
    """
    with cloud_errors("cancel the job", where=name):
        connect(place).CustomJob.get(name).cancel()


def wait_until_ended(
    name: str,
    place: Place,
    *,
    poll_seconds: float,
) -> Look:
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
    said, silent_since = "", None
    while True:
        try:
            now = _seen(connect(place).CustomJob.get(name))
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
            if now.state != said:
                say(f"job {now.name.rpartition('/')[2]}: {now.state}")
                said = now.state
            if now.ended:
                return now
        time.sleep(poll_seconds)


def _seen(job: Any) -> Look:
    resource = job.gca_resource
    state = _STATES.get(resource.state.name, "running")
    reason = " ".join(resource.error.message.split())
    if resource.state.name == "JOB_STATE_EXPIRED":
        reason = reason or "the machines did not become available in time"
    return Look(
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

    seen = look_at_job(name, place)
    endpoint = overridden(LOGGING)
    # Custom jobs still log under the resource type of Cloud ML Engine, Vertex AI's ancestor.
    query = f'resource.type="ml_job" AND resource.labels.job_id="{seen.name.rpartition("/")[2]}"'
    with cloud_errors("read the job's log", where=name):
        client = logging.Client(
            project=place.project, client_options={"api_endpoint": endpoint} if endpoint else None
        )
        # 1,000 is the most that Cloud Logging sends for a request; its default is 50.
        found = client.list_entries(
            filter_=query, order_by="timestamp desc", max_results=last, page_size=1000
        )
        # Request the latest first, so that the limit keeps those.
        return [_line(entry) for entry in found][::-1]


def _line(entry: Any) -> str:
    payload = entry.payload
    text = payload.get("message", payload) if isinstance(payload, dict) else payload
    return f"{entry.timestamp:%Y-%m-%d %H:%M:%S} {str(text).rstrip()}"
