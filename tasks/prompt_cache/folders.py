"""The cache folder: one run at a time, tasks staged beside it and put in place whole.

<output_cache_dir>/
  .t0repro-cache/        this run's staging: rows, and tasks not finished; removed at its end
  <task>/                <split>.tfrecord-*, info.<split>.json, stats.<split>.json,
                         provenance.json, COMPLETED
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from t0repro.errors import UserError
from t0repro.files import sync_directory, write_atomically

MARKER = "COMPLETED"
PROVENANCE = "provenance.json"
STAGING = ".t0repro-cache"

# What a cache's folder may hold; Beam's temporary files begin with the last.
CACHE_FILE = re.compile(
    r".+\.tfrecord-\d+-of-\d+|(info|stats)\..+\.json|provenance\.json|COMPLETED|beam-temp-.+"
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Holds the cache folder for one run; yields its empty staging folder.

    The system lets go of the lock when the process ends, however it ends.

    Raises:
      UserError: if another run holds it; that run is named.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(
            f"The cache folder cannot be made: {error.strerror}.",
            where=str(folder),
            fix="Give another --output_cache_dir.",
        ) from error
    staging = folder / STAGING
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another run is caching into this folder{_holder(staging)}.",
                where=str(folder),
                fix="Wait for it, or give another --output_cache_dir.",
            ) from error
        shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
        staging.mkdir()
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        (staging / "owner.json").write_text(json.dumps(owner))
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(handle)


def _holder(staging: Path) -> str:
    try:
        owner = json.loads((staging / "owner.json").read_text())
    except (OSError, ValueError):  # it has only begun
        return ""
    return f": process {owner['pid']} on {owner['host']}"


def remove_interrupted(folder: Path, task: str) -> bool:
    """Removes what an interrupted seqio_cache_tasks left in a task's folder; True if it did.

    SeqIO writes COMPLETED last, so the rest is never read; but shards of another number would be
    taken for part of a later cache, whose files are found by a pattern that ends in that number.

    Raises:
      UserError: if the folder holds a file that no cache has.
    """
    if not folder.is_dir() or (folder / MARKER).is_file():
        return False
    foreign = [path.name for path in folder.iterdir() if not CACHE_FILE.fullmatch(path.name)]
    if foreign:
        raise UserError(
            f"The folder of {task} holds files that are not a cache's: {foreign[:3]}.",
            where=str(folder),
            fix="Choose another cache folder, or move these files away.",
        )
    shutil.rmtree(folder)
    return True


def put_in_place(staged: Path, folder: Path, splits: Sequence[str]) -> None:
    """Makes a staged task, or the splits to add to a complete one, part of the cache.

    A new task's folder is renamed whole. Splits are added to a complete task file by file, the
    info file last: SeqIO begins with it, and a later run takes a split without it as not cached.
    """
    if not folder.exists():
        write_atomically(staged / MARKER, "tfrecord")  # as seqio_cache_tasks
        folder.parent.mkdir(parents=True, exist_ok=True)
        sync_directory(staged)
        os.rename(staged, folder)
        sync_directory(folder.parent)
        return
    for split in splits:
        for stray in folder.glob(f"{split}.tfrecord-*"):
            stray.unlink()
        for path in sorted(staged.glob(f"{split}.tfrecord-*")):
            os.rename(path, folder / path.name)
        for name in (f"stats.{split}.json", PROVENANCE, f"info.{split}.json"):
            if (staged / name).exists():
                sync_directory(folder)
                os.rename(staged / name, folder / name)
    sync_directory(folder)
    shutil.rmtree(staged)
