"""Records of an evaluation's finished tasks, each with what determined its results.

An evaluation writes them, and the report reads them:

    <split>_eval/results/<task>_<step>.json   written last, when the task's files are complete

A record's key lists everything that determines its results: checkpoint, step, task, prompt text,
data, lengths, and the rendering and scoring code. A task counts as finished only for its record's
key, and only while its files match the digests in the record. A record whose checksum does not
match, because it was truncated or edited, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.storage import write_atomically

RESULTS = "results"


_CHECKSUM = "checksum"


def claim_path(out: Path, step: int) -> Path:
    """The file in rank-eval's folder that says what the results of a step belong to."""
    return out / "scores" / f"step_{step}.json"


def read_records(folder: str | os.PathLike[str], step: int) -> dict[str, dict[str, Any]]:
    """Reads the records of a step's tasks, by task; empty if there are none."""
    # Task names may end in digits, so check the file name's step against the record's.
    every = map(read_with_checksum, sorted((Path(folder) / RESULTS).glob(f"*_{step}.json")))
    records = {record["key"]["task"]: record for record in every if record is not None}
    return {task: record for task, record in records.items() if record["key"]["step"] == step}


def find_decoded_tasks(folder: str | os.PathLike[str]) -> set[str]:
    """Names of the folder's tasks that were decoded, whose files hold texts instead of scores."""
    found = map(read_with_checksum, (Path(folder) / RESULTS).glob("*.json"))
    return {each["key"]["task"] for each in found if each and each.get("mode") == "generate"}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes a task's record; its files must have been written before."""
    path = _path(folder, record["key"]["task"], record["key"]["step"])
    write_with_checksum(path, record)


def remove_record(folder: str | os.PathLike[str], task: str, step: int) -> None:
    """Removes a task's record, if any, because its files have been rewritten."""
    _path(Path(folder), task, step).unlink(missing_ok=True)


def is_finished(folder: Path, key: Mapping[str, Any], record: Mapping[str, Any] | None) -> bool:
    """Whether a task's record has this key and its files are unchanged."""
    return (
        record is not None
        # Convert through JSON like the record's key: tuples become lists.
        and record["key"] == json.loads(json.dumps(key))
        and not _find_changed_files(folder, record)
    )


def _find_changed_files(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Names of a task's files that are missing or changed since the record was written."""
    return [
        name for name, digest in record["files"].items() if file_digest(folder / name) != digest
    ]


def check_files(folder: Path, task: str, step: int) -> None:
    """Refuses a task whose files were changed since they were written.

    Files without a record, such as those of Mesh TensorFlow alone, are accepted as they are.

    Raises:
      UserError: naming the first changed file, or the record if it is damaged.
    """
    path = _path(folder, task, step)
    record = read_with_checksum(path)
    if record is None:
        # No record is not a fault: Mesh TensorFlow alone writes none. An unreadable one is damaged.
        changed = [f"{RESULTS}/{path.name}"] if path.exists() else []
    else:
        changed = _find_changed_files(folder, record)
    if changed:
        raise UserError(
            f"The file {changed[0]} is not what the evaluation of step {step} wrote.",
            where=str(folder),
            fix="Run that evaluation again: it redoes what was changed.",
        )


def digest_of_texts(texts: Iterable[str]) -> str:
    """Digest, 16 hex digits, of texts in their order."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


def _path(folder: Path, task: str, step: int) -> Path:
    return folder / RESULTS / f"{task}_{step}.json"


def write_with_checksum(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object that `read_with_checksum` reads."""
    # Convert to the form in which it is read back (tuples become lists), and checksum that.
    content = json.loads(json.dumps(content))
    write_atomically(path, json.dumps({**content, _CHECKSUM: _checksum(content)}))


def read_with_checksum(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if it is missing or altered."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    return record if record.pop(_CHECKSUM, None) == _checksum(record) else None


def _checksum(record: Mapping[str, Any]) -> str:
    return digest_of_texts([json.dumps(record, sort_keys=True)])


def file_digest(path: Path) -> str | None:
    """Digest of a file's content, as task_output.LineFile computes it; None if unreadable."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return None
