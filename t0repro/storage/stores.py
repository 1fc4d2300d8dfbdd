"""Stores of objects: how the libraries that reach one (fsspec, epath, TensorStore) are set up.

fsspec does the work, with gcsfs for gs:// and s3fs for s3://.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, cast

from t0repro.errors import UserError
from t0repro.storage.access import check_credentials

_CONNECT_SECONDS = 2.0  # a lost first packet is sent again after one
_SILENT_SECONDS = 60  # without a byte, after which a request is sent again
_STORES = {"gs": "Google Cloud Storage", "s3": "S3"}

# Has epath, which Orbax uses, go through fsspec too, rather than through TensorFlow's own clients;
# epath asks once.
os.environ.setdefault("EPATH_USE_TF", "false")
# TensorStore would wait for an answer for ever. It sends a request up to 32 more times.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_SILENT_SECONDS))


def store_of(address: str) -> Any:
    """The file system of fsspec's that an address is in; its methods take the address.

    Raises:
      UserError: Without the store's library or credentials.
    """
    check_credentials(address, None)
    return file_system(address.partition("://")[0].lower())


@functools.cache
def file_system(scheme: str) -> Any:
    """Fsspec's file system for a scheme; it keeps connections, and no listings.

    Raises:
      UserError: If fsspec does not know the scheme or lacks its library.
    """
    import fsspec

    # They log the traceback of each attempt that failed; the error of the last one says it all.
    for library in ("fsspec", "gcsfs"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST") if scheme == "gs" else None
    # By default gcsfs asks by gRPC what kind of bucket it is, which emulators do not answer.
    options: dict[str, Any] = {"token": "anon"} if emulator else {}
    if emulator:
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        _configure(scheme)
        # The cache of file systems would outlive the variables that say where the store is.
        system = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"Addresses that begin with {scheme}:// cannot be opened: {error}.",
            fix="Install the package that the message names, or copy the files here.",
        ) from None
    if scheme in _STORES:
        server = system.base if scheme == "gs" else system.s3.meta.endpoint_url
        _check_reachable(_STORES[scheme], server)
    return system


def _check_reachable(store: str, server: str) -> None:
    """Raises UserError if no connection can be made; gcsfs tries for 40 s, s3fs for 10 s."""
    url = urllib.parse.urlsplit(server)
    if urllib.request.getproxies():  # they reach what this machine does not
        return
    port = url.port or {"http": 80}.get(url.scheme, 443)
    try:
        socket.create_connection((url.hostname, port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"{store} cannot be reached: {error}.",
            where=f"{url.scheme}://{url.netloc}",
            fix="Check the connection, or give a local path.",
        ) from None


def use_emulator() -> None:
    """Has TensorStore find the emulator that the other libraries find by STORAGE_EMULATOR_HOST."""
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        os.environ.setdefault("FSSPEC_GCS_TOKEN", "anon")


def _configure(scheme: str) -> None:
    """Sets how fsspec makes a scheme's file systems, ours and those that epath asks it for.

    They keep no listings, which would hide what TensorStore or another process has written or
    removed since. gcsfs too would wait for an answer for ever; it sends a request up to 5 more
    times.
    """
    import fsspec.config

    ours: dict[str, Any] = {"use_listings_cache": False}
    # Without gcsfs, fsspec's own message names what is missing.
    if scheme == "gs" and importlib.util.find_spec("gcsfs"):
        import aiohttp

        ours["requests_timeout"] = aiohttp.ClientTimeout(sock_read=_SILENT_SECONDS)
    fsspec.config.conf[scheme] = {**ours, **fsspec.config.conf.get(scheme, {})}


def path_object(address: str) -> Path:
    """An address as epath's path object, which has pathlib's methods; Orbax takes it."""
    scheme = address.partition("://")[0]
    if scheme == "memory":
        raise UserError(
            f"{address} cannot hold checkpoints.",
            fix="Give a local path or an address: gs://, s3://.",
        )
    use_emulator()
    from etils import epath

    _configure(scheme)
    return cast(Path, epath.Path(address))


def tensorstore_spec(address: str) -> dict[str, Any] | None:
    """How TensorStore opens a directory itself; None for an address that it cannot open."""
    scheme, _, place = address.partition("://")
    bucket, _, name = place.partition("/")
    spec: dict[str, Any] = {"bucket": bucket, "path": f"{name}/"}
    retries = {"max_retries": 6}  # about as many as gcsfs; its default of 32 takes a quarter hour
    system = store_of(address)
    if scheme == "gs":
        use_emulator()
        return {"driver": "gcs", **spec, "gcs_request_retries": retries}
    if scheme != "s3" or system.key is not None:  # a key of fsspec's own settings
        return None
    server = system.s3.meta
    spec |= {"driver": "s3", "s3_request_retries": retries}
    # Given an endpoint, TensorStore does not look up the region, which it needs to sign requests.
    if ".amazonaws.com" not in server.endpoint_url:
        spec |= {"endpoint": server.endpoint_url, "aws_region": server.region_name or "us-east-1"}
    if system.anon:
        spec["aws_credentials"] = {"type": "anonymous"}
    return spec
