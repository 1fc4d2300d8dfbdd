"""Records of finished tasks, which an evaluation writes beside their files and the report reads.

    <split>_eval/results/<task>_<step>.json   written last, when the task's files are whole

A record's key says what its results depend on: checkpoint, step, task, prompt text, data, lengths,
and the code that renders and that scores. A task is finished only for the key of its record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from t0repro.files import write_atomically

RESULTS = "results"


def read_records(folder: str | os.PathLike[str], step: int) -> dict[str, dict[str, Any]]:
    """The records of the tasks that are finished at a step, by task; none where there are none."""
    records = {}
    for path in sorted((Path(folder) / RESULTS).glob(f"*_{step}.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        records[record["key"]["task"]] = record
    return records


def decoded_tasks(folder: str | os.PathLike[str]) -> set[str]:
    """The tasks of a folder that were decoded, whose files hold texts in place of scores."""
    found = set()
    for path in (Path(folder) / RESULTS).glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("mode") == "generate":
            found.add(record["key"]["task"])
    return found


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes a task's record; its files must be there."""
    key = record["key"]
    path = folder / RESULTS / f"{key['task']}_{key['step']}.json"
    write_atomically(path, json.dumps(record))


def is_finished(folder: Path, key: Mapping[str, Any], record: Mapping[str, Any] | None) -> bool:
    """Whether a task's record is that of the key and its files are there."""
    files = (f"{key['task']}_targets", f"{key['task']}_{key['step']}_predictions")
    return (
        record is not None
        and record["key"] == json.loads(json.dumps(key))
        and all((folder / file).is_file() for file in files)
    )


def digest_of_texts(texts: Iterable[str]) -> str:
    """16 hexadecimal digits that stand for texts in their order."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
