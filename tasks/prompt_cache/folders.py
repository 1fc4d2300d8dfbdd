"""The cache folder: one run writes it at a time, and later runs check it before use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from t0repro.errors import UserError
from t0repro.storage import lock_folder, make_folder, write_atomically
from t0repro.storage.disk import sync

MARKER = "COMPLETED"
PROVENANCE = "provenance.json"
STAGING = ".t0repro-cache"
SKIPPED = "skipped.json"
"""Task -> split -> why --skip_missing left it out. `scripts/train.sh` looks for this name too."""

# Files allowed in a task's folder; names that begin with beam-temp- are Beam's temporary files.
CACHE_FILE = re.compile(
    r".+\.tfrecord-\d+-of-\d+|(info|stats)\..+\.json|provenance\.json|COMPLETED|beam-temp-.+"
)


@contextlib.contextmanager
def lock_cache(folder: Path) -> Iterator[Path]:
    """Holds the cache folder for one run; yields its empty staging folder.

    Only the holder of the lock creates, empties or removes the staging folder; a run that is
    refused does not touch it.

    Raises:
      UserError: If another run holds the folder; names that run.
    """
    with lock_folder(folder, "caching", fix="Wait for it, or give another --cache_dir."):
        staging = folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)  # left by a run that was killed
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def remove_interrupted(folder: Path, task: str) -> bool:
    """Removes an interrupted seqio_cache_tasks' files from a task's folder.

    SeqIO writes COMPLETED last, so such files are never read. But SeqIO finds its files by a
    pattern that ends in the number of shards, so it would mistake leftover shards for part of a
    later cache with as many shards.

    Returns:
      Whether there was anything to remove.

    Raises:
      UserError: If the folder contains a file that does not belong in a cache.
    """
    # Complete or empty: not an interrupted cache.
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

    A new task's folder is renamed in one step. Splits are added to a complete task file by file,
    the info file last: SeqIO reads it first, and later runs consider a split without it as not
    cached.

    Args:
      staged: The staged task.
      folder: Where the task goes in the cache.
      splits: The staged splits.
    """
    _check_shards(staged, splits)
    if not folder.exists():
        write_atomically(staged / MARKER, "tfrecord")  # as seqio_cache_tasks
        make_folder(folder.parent)
        # The staged files must be in their folder on the disk before the folder gets its final
        # name.
        sync(staged)
        os.rename(staged, folder)
        sync(folder.parent)
        return
    for split in splits:
        # Left over from a run killed between the renames below.
        for stray in folder.glob(f"{split}.tfrecord-*"):
            stray.unlink()
        for path in sorted(staged.glob(f"{split}.tfrecord-*")):
            os.rename(path, folder / path.name)
        for name in (f"stats.{split}.json", PROVENANCE, f"info.{split}.json"):
            if (staged / name).exists():
                # Sync before the next rename, which marks these files as complete.
                sync(folder)
                os.rename(staged / name, folder / name)
    sync(folder)
    shutil.rmtree(staged)


def record_skipped(folder: Path, skipped: Mapping[str, Mapping[str, str]]) -> None:
    """Keeps what --skip_missing left out, less what has been cached since."""
    left: dict[str, Mapping[str, str]] = {}
    for task, splits in (read_skipped(folder) | dict(skipped)).items():
        cached = list_cached_splits(folder / cache_name(task)) or ()
        if still := {split: why for split, why in splits.items() if split not in cached}:
            left[task] = still
    if left:
        write_atomically(folder / SKIPPED, json.dumps(left, indent=1) + "\n")
    else:
        (folder / SKIPPED).unlink(missing_ok=True)


def read_skipped(folder: str | os.PathLike[str]) -> dict[str, dict[str, str]]:
    """Task -> split -> why --skip_missing left it out of a folder of caches."""
    try:
        return json.loads(Path(folder, SKIPPED).read_text())
    except FileNotFoundError:
        return {}


def cache_name(task: str) -> str:
    """A task's folder below a folder of caches, as SeqIO names it."""
    return task.replace(":", "/")


def list_cached_splits(folder: Path) -> Sequence[str] | None:
    """The splits in a task's complete cache, or None if there is no such cache."""
    if not (folder / MARKER).is_file():
        return None
    return [path.name[len("info.") : -len(".json")] for path in folder.glob("info.*.json")]


def shard_names(split: str, num_shards: int) -> list[str]:
    """SeqIO's names for the files of a cached split."""
    return [f"{split}.tfrecord-{shard:05d}-of-{num_shards:05d}" for shard in range(num_shards)]


def _check_shards(staged: Path, splits: Sequence[str]) -> None:
    """Raises UserError if a shard is missing from the staging folder, before any is moved."""
    for split in splits:
        number = json.loads((staged / f"info.{split}.json").read_text())["num_shards"]
        missing = [name for name in shard_names(split, number) if not (staged / name).is_file()]
        if missing:
            raise UserError(
                f"{len(missing)} shards of split {split!r} are gone from the staging folder.",
                where=str(staged / missing[0]),
                fix="Run the same command again, and let nothing else write there.",
            )
