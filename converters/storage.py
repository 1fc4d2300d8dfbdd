"""Reading files that are local or anywhere that fsspec reaches (gs://, s3://, https://, ...)."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import numpy as np

from t0repro.errors import UserError

_CHUNK_BYTES = 1 << 26


def is_remote(path: str) -> bool:
    """Whether a path is an address (`gs://...`); `file://` is local."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", path)) and not path.startswith("file://")


def local_path(path: str | os.PathLike[str]) -> str:
    """A path as a string, without `file://`."""
    return os.fspath(path).removeprefix("file://")


@cache
def _file_system(protocol: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"Addresses that begin with {protocol}:// cannot be read: {error}.",
            fix="Install the package that the message names, or copy the checkpoint here.",
        ) from None


def _at(path: str) -> tuple[Any, str]:
    return _file_system(path.partition("://")[0]), path


def is_file(path: str) -> bool:
    """Whether there is a file of this name."""
    if not is_remote(path):
        return os.path.isfile(path)
    system, path = _at(path)
    return system.isfile(path)


def is_directory(path: str) -> bool:
    """Whether there is a directory of this name."""
    if not is_remote(path):
        return os.path.isdir(path)
    system, path = _at(path)
    return system.isdir(path)


def names(path: str) -> list[str]:
    """The names in a directory; none if there is no such directory."""
    if not is_directory(path):
        return []
    if not is_remote(path):
        return sorted(os.listdir(path))
    system, path = _at(path)
    return sorted(entry.rstrip("/").rpartition("/")[2] for entry in system.ls(path, detail=False))


def join(path: str, name: str) -> str:
    """A name in a directory; an absolute name is itself."""
    if is_remote(name):
        return name
    return f"{path.rstrip('/')}/{name}" if is_remote(path) else os.path.join(path, name)


def size(path: str) -> int:
    """Bytes of a file.

    Raises:
      OSError: if there is none.
    """
    if not is_remote(path):
        return os.path.getsize(path)
    system, path = _at(path)
    return system.size(path)


def stamp(path: str) -> list[Any]:
    """What changes when a file is written to: its size and, where it is known, its time."""
    if is_remote(path):
        return [size(path)]
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def read(path: str) -> bytes:
    """A file's content.

    Raises:
      OSError: if it cannot be read.
    """
    return read_range(path, 0, None)


def read_into(path: str, start: int, array: np.ndarray) -> bool:
    """Fills an array with a file's bytes from `start` on; whether there were enough.

    Raises:
      OSError: if the file cannot be read.
    """
    room = memoryview(array.reshape(-1).view(np.uint8))
    system, path = _at(path) if is_remote(path) else (None, path)
    opened = system.open(path, "rb", block_size=1 << 24) if system else open(path, "rb", 0)
    with opened as file:
        file.seek(start)
        while room and (count := file.readinto(room[:_CHUNK_BYTES])):
            room = room[count:]
    return not room


def read_range(path: str, start: int, count: int | None) -> bytes:
    """Some bytes of a file, all from `start` on if `count` is None; fewer where it ends."""
    if not is_remote(path):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read() if count is None else file.read(count)
    system, path = _at(path)
    with system.open(path, "rb", block_size=1 << 24) as file:
        file.seek(start)
        return file.read() if count is None else file.read(count)
