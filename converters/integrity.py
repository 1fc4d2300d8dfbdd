"""`integrity.json`: length and CRC-32 of every other file of a JAX checkpoint, written last.

Orbax keeps no checksums, and TensorStore reads a missing chunk as zeros. With this list, a file
that is missing, truncated or changed is reported before any of its values are used.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from t0repro.converters import storage
from t0repro.errors import UserError
from t0repro.files import write_atomically

INTEGRITY = "integrity.json"
_BLOCK_BYTES = 1 << 22


class Written(TypedDict):
    """What was written to a file."""

    bytes: int
    crc32: int


def damaged(path: os.PathLike[str] | str, reason: str) -> UserError:
    """Returns the error for a file that differs from what was written."""
    return UserError(
        f"A file of the checkpoint is damaged: {reason}.",
        where=os.fspath(path),
        fix="Copy the file again, or choose another checkpoint.",
    )


def missing_file(path: str) -> UserError:
    """Returns the error for a file that should be there."""
    return UserError(
        "A file of the checkpoint is missing.",
        where=path,
        fix="Copy the whole directory again, or choose another checkpoint.",
    )


def describe_files(directory: Path) -> dict[str, Written]:
    """Returns length and CRC-32 of every file below a directory, by relative path."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {
        file.relative_to(directory).as_posix(): {
            "bytes": file.stat().st_size,
            "crc32": _crc32(file),
        }
        for file in files
    }


def write_integrity(directory: Path, files: dict[str, Written]) -> None:
    """Writes the list of a directory's files, which marks the checkpoint as complete."""
    listing = json.dumps({"files": dict(sorted(files.items()))}, indent=1)
    write_atomically(directory / INTEGRITY, listing)


def read_integrity(directory: str) -> dict[str, Written]:
    """Reads a directory's list, empty if it has none, and checks that no file is cut or missing.

    Raises:
      UserError: Naming a file that is missing or has the wrong length, or a damaged list.
    """
    listing = storage.join(directory, INTEGRITY)
    if not storage.is_file(listing):
        return {}
    files = _parse(listing)
    for name, written in files.items():
        file = storage.join(directory, name)
        if not storage.is_file(file):
            raise missing_file(file)
        if (size := storage.size(file)) != written["bytes"]:
            raise damaged(file, f"it has {size:,} bytes, but {written['bytes']:,} were written")
    return files


def read_checked(directory: str, name: str, files: Mapping[str, Written]) -> bytes:
    """Reads a small file, and compares it with its CRC-32 if it is listed.

    Raises:
      UserError: If it differs.
    """
    content = storage.read(file := storage.join(directory, name))
    if name in files and zlib.crc32(content) != files[name]["crc32"]:
        raise damaged(file, "its CRC-32 differs from what was written")
    return content


def check_contents(directory: str | os.PathLike[str], files: dict[str, Written]) -> None:
    """Compares every listed file of a local directory with its CRC-32.

    Raises:
      UserError: Naming the file that differs.
    """
    for name, written in files.items():
        file = Path(directory, name)
        if _crc32(file) != written["crc32"]:
            raise damaged(file, "its CRC-32 differs from what was written")


def _parse(listing: str) -> dict[str, Written]:
    try:
        files = json.loads(storage.read(listing))["files"]
        parsed: dict[str, Written] = {
            name: {"bytes": int(written["bytes"]), "crc32": int(written["crc32"])}
            for name, written in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(listing, "it is not a list of files") from None
    # A listing never points out of its own directory.
    if outside := [name for name in parsed if not storage.is_inside(name)]:
        raise damaged(listing, f"it names {outside[0]!r}, which is not in the checkpoint")
    return parsed


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
