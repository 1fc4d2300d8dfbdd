"""Examples of each task and split of the released P3: p3_sizes.csv beside this file.

The counts are those of google-research/FLAN at e9e4ec6e, flan/v2/constants_t0.py (Apache-2.0): what
is left after a template has dropped the rows that it has no prompt for.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).parent / "p3_sizes.csv"


@functools.cache
def p3_sizes() -> Mapping[str, Mapping[str, int]]:
    """Task -> split -> examples; tasks that P3 lacks, or whose size is not known, are not there."""
    sizes: dict[str, dict[str, int]] = {}
    with open(TABLE, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes.setdefault(row["task"], {})[row["split"]] = int(row["examples"])
    return sizes
