"""Records of finished tasks, which `rank_eval` writes beside their files and the report reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RESULTS = "results"


def read_records(folder: str | os.PathLike[str], step: int) -> dict[str, dict[str, Any]]:
    """The records of the tasks that are finished at a step, by task; none where there are none."""
    records = {}
    for path in sorted((Path(folder) / RESULTS).glob(f"*_{step}.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        records[record["key"]["task"]] = record
    return records
