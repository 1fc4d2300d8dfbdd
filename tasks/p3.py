"""The released P3: T0's tasks as their authors cached them, fetched from the Hugging Face hub.

    t0repro tasks fetch-p3 --tasks 'super_glue_rte_*' --to p3
    t5_mesh_transformer --module_import=t0repro.tasks.t0 --additional_task_cache_dirs=p3 ...

The branch `main` has contained Parquet since 2024. Before, `data/<task>/` was SeqIO's cache itself:
COMPLETED, info.<split>.json, stats.<split>.json and <split>.tfrecord-00000-of-00001.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from t0repro.errors import UserError, nearest_names
from t0repro.hub_files import HubFile, HubRepository, check_room
from t0repro.progress import byte_progress, count_progress
from t0repro.storage import explain_errors, lock_folder, make_folder, write_atomically
from t0repro.storage.disk import sync
from t0repro.tasks.catalog import p3_sizes, rounds_of, t0_datasets
from t0repro.tasks.prompt_cache.provenance import P3_SOURCE
from t0repro.tasks.prompt_cache.records import read_records
from t0repro.tasks.task import SCORE_EVAL_SUFFIX
from t0repro.tasks.templates import load_template, task_name, template_datasets, template_names

REPOSITORY = "bigscience/P3"
# The last commit in the form of SeqIO's cache, of 25 January 2023.
REVISION = "eebf82105ad8b692635572bcb5ba58e1b6d3c473"
UNFINISHED = ".p3_unfinished"
"""Folder, inside the destination, for incomplete tasks."""
MARKER = "COMPLETED"


@dataclasses.dataclass(frozen=True)
class Fetched:
    """The outcome of a fetch.

    Attributes:
      fetched: Tasks that were fetched.
      present: Tasks that were already there and complete.
      absent: Tasks that P3 does not have.
      bytes: Total size of the fetched tasks' files.
    """

    fetched: list[str]
    present: list[str]
    absent: list[str]
    bytes: int


@functools.cache
def known_names() -> tuple[str, ...]:
    """T0's tasks and their twins, and all other names known to be in P3, sorted."""
    prompted = set(template_datasets())
    names = list(p3_sizes())
    for entry in t0_datasets():
        if (entry.dataset, entry.subset) not in prompted:
            continue
        for template in template_names(entry.dataset, entry.subset):
            chosen = load_template(entry.dataset, entry.subset, template)
            for suffix in rounds_of(entry.dataset) or ("",):
                name = task_name(entry.dataset, entry.subset, template) + suffix
                names.append(name)
                if chosen.answer_choices:
                    names.append(name + SCORE_EVAL_SUFFIX)
    return tuple(sorted(set(names)))


def match_names(patterns: Sequence[str]) -> list[str]:
    """T0's task names that match any pattern of `*`, `?` and `[...]`, sorted, without duplicates.

    Raises:
      UserError: If a pattern matches none; lists the nearest names.
    """
    found: set[str] = set()
    for pattern in patterns:
        # These are shell patterns, while seqio_cache_tasks takes regular expressions.
        names = fnmatch.filter(known_names(), pattern)
        if not names:
            stem = re.sub(r"[*?\[\]]+", "", pattern)
            raise UserError(
                f"None of T0's tasks matches {pattern!r}.",
                where="--tasks",
                fix=f"Nearest: {nearest_names(stem, known_names())};"
                " 't0repro tasks ls' lists them all.",
            )
        found.update(names)
    if not found:
        raise UserError("No task is named.", where="--tasks", fix="Give a pattern: 'ag_news_*'.")
    return sorted(found)


def fetch(patterns: Sequence[str], to: Path, repository: HubRepository) -> Fetched:
    """Fetches the matching tasks into `to`, a folder for `--additional_task_cache_dirs`.

    A task's folder appears once all of it has arrived and been checked. After an interruption, the
    next fetch resumes at the same byte. Complete tasks are left alone and need no network.

    Args:
      patterns: Patterns of task names, as for `match_names`.
      to: The folder to fetch to; created if it does not exist.
      repository: P3 on the hub, or on a mirror.

    Raises:
      UserError: If no name matches, the hub cannot be reached, a checksum is wrong, the disk is
        full, or another fetch is writing to the folder.
    """
    names = match_names(patterns)
    with lock_folder(to, "fetching P3"):
        present = [name for name in names if _is_complete(to / name)]
        wanted = [name for name in names if name not in set(present)]
        # Skip complete tasks, so that a finished fetch works offline.
        listed = _list(wanted, repository)
        absent = [name for name, files in listed.items() if files is None]
        if absent and len(absent) == len(names):
            raise UserError(
                f"P3 does not hold {', '.join(absent[:5])}{' ...' if absent[5:] else ''}.",
                where=f"{repository.base_url}, {repository.name} at {repository.revision}",
                fix="Make the task from its dataset: seqio_cache_tasks"
                " --module_import=t0repro.tasks.t0. P3 was released without 92 of T0's tasks,"
                " Story Cloze among them.",
            )
        sizes = {name: _check_listing(name, files) for name, files in listed.items() if files}
        total = sum(file.size for files in sizes.values() for file in files)
        held = [path for name in sizes for path in (to / UNFINISHED / name).glob("*")]
        check_room(to, total, held, "Choose fewer tasks, or another folder.")
        with byte_progress("fetching P3", total) as advance, explain_errors(to):
            for name, files in sizes.items():
                _fetch_task(name, files, to, repository, advance)
    return Fetched(list(sizes), present, absent, total)


def _list(names: Sequence[str], repository: HubRepository) -> dict[str, list[HubFile] | None]:
    """Task -> its files on the hub, or None; makes one request per task: hundreds take minutes."""
    listed = {}
    with count_progress(len(names), "listing", "task", "listed") as advance:
        for name in names:
            listed[name] = repository.files(f"data/{name}")
            advance(1)
    return listed


def _is_complete(folder: Path) -> bool:
    if (folder / MARKER).is_file():
        return True
    if folder.exists():
        raise UserError(
            "Something with the task's name is there, without the marker of a complete cache.",
            where=str(folder),
            fix="Remove it, or fetch to another folder.",
        )
    return False


def _check_listing(name: str, files: Sequence[HubFile]) -> list[HubFile]:
    """The files without the marker, after checking that no shard or info file is missing."""
    # The marker is written here, last; the others must all be listed.
    names = {file.name for file in files}
    problems = [] if MARKER in names else ["COMPLETED is missing"]
    shards = [re.fullmatch(r"(.+)\.tfrecord-(\d+)-of-(\d+)", name) for name in names]
    # The number of shards is in the name of each.
    splits = {match[1]: int(match[3]) for match in shards if match}
    if not splits:
        problems.append("there is no split")
    for split, count in splits.items():
        needed = [f"{split}.tfrecord-{shard:05d}-of-{count:05d}" for shard in range(count)]
        needed += [f"info.{split}.json", f"stats.{split}.json"]
        problems += [f"{file} is missing" for file in needed if file not in names]
    # A mirror's listing must not lead out of the task's folder.
    strange = [file for file in names if "/" in file or file in ("", ".", "..")]
    if problems or strange:
        raise UserError(
            f"The hub's listing of {name} is incomplete: {'; '.join(problems or strange)}.",
            where=f"{REPOSITORY}, data/{name}",
            fix="Give the address of the hub, or of a whole mirror of it, as --base_url.",
        )
    return [file for file in files if file.name != MARKER]


def _fetch_task(
    name: str,
    files: Sequence[HubFile],
    to: Path,
    repository: HubRepository,
    advance: Callable[[int], None],
) -> None:
    folder = to / UNFINISHED / name
    make_folder(folder)
    wanted = {file.name for file in files}
    for path in folder.iterdir():
        if path.name not in wanted:  # left over from a different listing
            path.unlink()
    for file in files:
        repository.download(file, folder / file.name, advance)
    source = {
        "repository": repository.name,
        "revision": repository.revision,
        "fetched_from": repository.base_url,
        "records": {
            file.name: sum(1 for _ in read_records(folder / file.name))  # each is checked
            for file in files
            if ".tfrecord-" in file.name
        },
        "files": {
            file.name: {"bytes": file.size, "sha256": file.sha256, "git_blob": file.blob}
            for file in files
        },
    }
    write_atomically(folder / P3_SOURCE, json.dumps(source, indent=1) + "\n")
    # Write everything else to disk first, then the marker, then rename: a folder with the task's
    # name is then complete even after a power failure.
    for file in files:
        sync(folder / file.name)
    write_atomically(folder / MARKER, b"")
    os.rename(folder, to / name)
    with contextlib.suppress(OSError):  # not empty: other tasks are still incomplete
        (to / UNFINISHED).rmdir()
