"""Records of finished tasks, which an evaluation writes beside their files and the report reads.

    <split>_eval/results/<task>_<step>.json   written last, when the task's files are whole

A record's key says what its results depend on: checkpoint, step, task, prompt text, data, lengths,
and the code that renders and that scores. A task is finished only for the key of its record, and
only while its files are those that were written with it. A record that was cut or edited (its
checksum tells) is none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.files import write_atomically

RESULTS = "results"
_CHECKSUM = "checksum"


def read_records(folder: str | os.PathLike[str], step: int) -> dict[str, dict[str, Any]]:
    """The records of the tasks that are finished at a step, by task; none where there are none."""
    found = map(_read, sorted((Path(folder) / RESULTS).glob(f"*_{step}.json")))
    records = {record["key"]["task"]: record for record in found if record is not None}
    return {task: record for task, record in records.items() if record["key"]["step"] == step}


def decoded_tasks(folder: str | os.PathLike[str]) -> set[str]:
    """The tasks of a folder that were decoded, whose files hold texts in place of scores."""
    found = map(_read, (Path(folder) / RESULTS).glob("*.json"))
    return {each["key"]["task"] for each in found if each and each.get("mode") == "generate"}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes a task's record; its files must be there."""
    path = _path(folder, record["key"]["task"], record["key"]["step"])
    content = json.loads(json.dumps(record))
    write_atomically(path, json.dumps({**content, _CHECKSUM: _checksum(content)}))


def remove_record(folder: str | os.PathLike[str], task: str, step: int) -> None:
    """Removes a task's record, if there is one: its files have been written by something else."""
    _path(Path(folder), task, step).unlink(missing_ok=True)


def is_finished(folder: Path, key: Mapping[str, Any], record: Mapping[str, Any] | None) -> bool:
    """Whether a task's record is that of the key and its files are those of the record."""
    return (
        record is not None
        and record["key"] == json.loads(json.dumps(key))
        and not changed_files(folder, record)
    )


def changed_files(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """The files of a task that are gone, or not what they were when the record was written."""
    return [
        name for name, digest in record["files"].items() if file_digest(folder / name) != digest
    ]


def check_files(folder: Path, task: str, step: int) -> None:
    """Refuses files of a task that were changed since they were written.

    Raises:
      UserError: naming the first of them. Files without a record, as Mesh TensorFlow writes them,
        are taken as they are.
    """
    record = _read(_path(folder, task, step))
    changed = changed_files(folder, record) if record else []
    if changed:
        raise UserError(
            f"The file {changed[0]} is not what the evaluation of step {step} wrote.",
            where=str(folder),
            fix="Run that evaluation again: it redoes what was changed.",
        )


def digest_of_texts(texts: Iterable[str]) -> str:
    """16 hexadecimal digits that stand for texts in their order."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


def _path(folder: Path, task: str, step: int) -> Path:
    return folder / RESULTS / f"{task}_{step}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """A record; None where there is none, or not the one that was written."""
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
    """The digest of a file's content, as task_output.LineFile computes it."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, _blake2b).hexdigest()
    except OSError:
        return None


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=8)
