"""A job's files in Cloud Storage: gin files, staged under names that cannot collide.

Each job has its own folder, named by the display name, the time and a random part. In it, the files
of the command line are numbered, so that equal names do not collide; files that they include keep
their path, under which gin looks for them:

    gs://BUCKET/t0repro/NAME-20261122-074500-3f9a/
      gin/0-model.gin  gin/1-run.gin      what --gin_file names
      include/shared/data.gin             what these files include
      config.gin                          the whole configuration, as gin writes it
      job.json                            what tracks the job
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from t0repro.cloud.vertex.command_line import Arguments, replace_gin_files
from t0repro.cloud.vertex.google import cloud_errors
from t0repro.cloud.vertex.spec import MOUNT
from t0repro.config.gin.statements import IncludeStatement, parse_statements
from t0repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class StagedFiles:
    """The files to copy for a job.

    Attributes:
      folder: `gs://...`, of this job alone.
      files: path below the folder -> contents.
      arguments: the job's arguments with the files' paths in the container.
    """

    folder: str
    files: dict[str, bytes]
    arguments: tuple[str, ...]


def new_folder(staging_bucket: str, display_name: str) -> str:
    """An address below the staging bucket that no other job uses."""
    if not re.fullmatch(r"gs://[^/]+(/.*)?", staging_bucket):
        raise UserError(
            f"{staging_bucket} is not a bucket.", where="--staging_bucket", fix="Give gs://BUCKET."
        )
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", display_name).strip("-") or "job"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{staging_bucket.rstrip('/')}/t0repro/{name}-{stamp}-{secrets.token_hex(4)}"


def mount_path(address: str) -> str:
    """The path in a container of an address: `/gcs/BUCKET/x` for `gs://BUCKET/x`."""
    return re.sub("^gs://", f"{MOUNT}/", address)


def stage(arguments: Arguments, folder: str) -> StagedFiles:
    """Plans the copies of a command's gin files.

    Files that come with this package, with t5 or with Mesh TensorFlow, and those that are in Cloud
    Storage already, are not copied.

    Args:
      arguments: the command line.
      folder: the job's own, `gs://...`.

    Raises:
      UserError: If a gin file includes another by a path that the container cannot have.
    """
    files: dict[str, bytes] = {}
    places: dict[str, str] = {}
    for name in (*arguments.gin_files, *arguments.auxiliary_gin_files):
        local = _local(name, arguments.search_paths)
        if name.startswith("gs://"):
            places[name] = mount_path(name)
        elif local is not None:
            staged = f"gin/{len(files)}-{local.name}"
            files[staged], places[name] = local.read_bytes(), f"{mount_path(folder)}/{staged}"
    included: dict[str, bytes] = {}
    for name in places:
        local = _local(name, arguments.search_paths)
        if local is not None:
            _add_included(local, arguments.search_paths, included)
    # Numbers are given to the command line's files alone, so `include` may hold any names.
    files |= {f"include/{name}": data for name, data in included.items()}
    search = f"{mount_path(folder)}/include" if included else None
    return StagedFiles(folder, files, replace_gin_files(arguments, places, search))


def _local(name: str, search_paths: Sequence[str]) -> Path | None:
    """The local file that gin opens for a name; None if it is not in a folder of the user's."""
    # Search as gin does: for the name itself first, then in each folder.
    candidates = [Path(folder, name) for folder in ("", *search_paths)]
    return next((path for path in candidates if path.is_file()), None)


def _add_included(path: Path, search_paths: Sequence[str], files: dict[str, bytes]) -> None:
    """Adds the local files that a gin file includes, recursively, by their names."""
    for name in _includes(path):
        local = _local(name, search_paths)
        if local is None or name in files:
            continue
        if os.path.isabs(name) or ".." in PurePosixPath(name).parts:
            raise UserError(
                f"The job's container has no {name}, which the gin file includes.",
                where=str(path),
                fix="Include it by a path below a folder of --gin_search_paths"
                " (--gin_location_prefix with t5_mesh_transformer).",
            )
        files[name] = local.read_bytes()
        _add_included(local, search_paths, files)


def _includes(path: Path) -> Iterator[str]:
    """The files in a gin file's `include` lines."""
    try:
        statements = parse_statements(path.read_text(), path)
    except SyntaxError:
        return  # the configuration's check reports it, with its place
    for statement in statements:
        if isinstance(statement, IncludeStatement):
            # `a/../x.gin` is x.gin: only a path that leads out of the folder is refused.
            yield posixpath.normpath(statement.filename) if statement.filename else ""


def write(client: Any, address: str, data: bytes) -> None:
    """Writes one object.

    Raises:
      UserError: If the bucket is missing, or refuses.
    """
    from google.cloud.storage.retry import DEFAULT_RETRY

    bucket, name = split_address(address)
    with cloud_errors("copy a file to Cloud Storage", where=address):
        # Writing the same bytes twice is harmless, so retry after a lost connection.
        client.bucket(bucket).blob(name).upload_from_string(data, retry=DEFAULT_RETRY)


def remove(client: Any, bucket: str, prefix: str) -> None:
    """Deletes what is below a job's own folder."""
    from google.api_core import exceptions

    with cloud_errors("remove staged files", where=f"gs://{bucket}/{prefix}"):
        for blob in client.list_blobs(bucket, prefix=f"{prefix}/"):
            with contextlib.suppress(exceptions.NotFound):
                blob.delete()


def split_address(address: str) -> tuple[str, str]:
    """`gs://bucket/a/b` -> ("bucket", "a/b")."""
    bucket, _, name = address.removeprefix("gs://").partition("/")
    return bucket, name.rstrip("/")
