"""Which addresses this machine can open: their schemes, the stores' libraries and credentials.

Nothing here touches the network.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from t0repro.errors import UserError

# memory:// lives as long as its process; tests use it.
SCHEMES = ("gs", "s3", "memory")

_LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}
_MACHINE = Path("/sys/class/dmi/id/product_name")  # the machine's name in its firmware
_VENDOR = Path("/sys/class/dmi/id/sys_vendor")

_another_machines = False


@contextlib.contextmanager
def addresses_of_another_machine() -> Iterator[None]:
    """Within the block, `check` looks only at an address's spelling: this machine opens none."""
    global _another_machines
    _another_machines = True
    try:
        yield
    finally:
        _another_machines = False


def check(address: str, where: str | None = None) -> None:
    """Raises UserError for an address that this machine cannot open.

    Args:
      address: The address, spelled in full.
      where: The option or gin binding that names it, for the message.

    Raises:
      UserError: For an unknown scheme, or without the scheme's library or credentials.
    """
    scheme, _, name = address.partition("://")
    if scheme not in SCHEMES:
        raise UserError(
            f"{address} cannot be opened: {scheme}:// is not a known scheme.",
            where=where,
            fix=f"Give a local path or an address: {', '.join(f'{s}://' for s in SCHEMES[:2])}.",
        )
    if not name:
        raise UserError(f"{address} names no bucket.", where=where, fix="Write scheme://bucket/x.")
    if _another_machines:
        return
    library = _LIBRARIES.get(scheme)
    if library is not None and importlib.util.find_spec(library) is None:
        raise UserError(
            f"{address} cannot be opened: {library} is not installed.",
            where=where,
            fix=f"EXTRAS={scheme} bash scripts/setup.sh, or: pip install {library}.",
        )
    check_credentials(address, where)


def check_credentials(address: str, where: str | None) -> None:
    """Raises UserError for an address on a machine without its store's credentials.

    The stores' libraries would look for them over the network and retry for minutes. Credentials
    are a file or a variable, or belong to a machine of the store's owner.
    """
    if address.startswith("gs://") and not has_google_credentials():
        variable = "GOOGLE_APPLICATION_CREDENTIALS"
        store, login = "Google Cloud", "gcloud auth application-default login"
    elif address.startswith("s3://") and not _has_amazon_credentials():
        variable, store, login = "AWS_SHARED_CREDENTIALS_FILE", "AWS", "aws configure"
    else:
        return
    named = os.environ.get(variable)
    reason = f" {variable} is {named}, which is not a file." if named else ""
    raise UserError(
        f"{address} cannot be opened: this machine has no {store} credentials.{reason}",
        where=where,
        fix=f"Run `{login}`, or give a local path.",
    )


def has_google_credentials() -> bool:
    """Whether there is a credentials file or an emulator, or this is one of Google's machines."""
    # The first names a metadata server, which is where Google's machines get their credentials; the
    # last may say that a public bucket needs none.
    variables = ("GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST", "FSSPEC_GCS_TOKEN")
    if any(os.environ.get(name) for name in variables):
        return True
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    files = [
        os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"),
        Path(folder) / "application_default_credentials.json",
    ]
    return any(file and Path(file).is_file() for file in files) or "Google" in _text(_MACHINE)


def _has_amazon_credentials() -> bool:
    variables = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "FSSPEC_S3_KEY")
    containers = (
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "FSSPEC_S3_ANON",
    )
    if any(os.environ.get(name) for name in variables + containers):
        return True
    home = Path.home() / ".aws"
    files = [
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
        Path(os.environ.get("AWS_CONFIG_FILE") or home / "config"),
    ]
    return any(file.is_file() for file in files) or "Amazon" in _text(_VENDOR)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def google_storage() -> str:
    """Where public files of Google's storage are; its own clients' variable names an emulator."""
    return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"


def store_error(error: Exception, address: str) -> UserError:
    """A UserError in place of what a store's library, or one on top of it, raised."""
    return UserError(
        f"The store did not answer as it should: {error}",
        where=address,
        fix="Check the connection and the permissions, then start the same command again.",
    )
