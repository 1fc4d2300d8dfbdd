"""Google Cloud: connections to its services, and their errors in words."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from t0repro.errors import UserError
from t0repro.storage.access import has_google_credentials

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
            api_endpoint=find_overridden_host(VERTEX),
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


def find_overridden_host(service: str) -> str | None:
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
        kind, fix = _explain(error)
        raise UserError(
            f"Could not {doing}: {kind}: {_message(error)}", where=where, fix=fix
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
    # RetryError, by which a client gives up, is not a GoogleAPICallError.
    except (exceptions.RetryError, requests.RequestException, ConnectionError) as error:
        raise UserError(
            f"Could not {doing}: the connection failed: {' '.join(str(error).split())}",
            where=where,
            fix="Check the network, then start the same command again.",
        ) from error


def _explain(error: Any) -> tuple[str, str]:
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


def _message(error: Any) -> str:
    """The service's message on one line, without the address that Cloud Storage puts before it."""
    return re.sub(r"^(GET|POST|PUT|DELETE|PATCH) \S+: ", "", " ".join(error.message.split()))
