"""Where a task's splits come from."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Split:
    """Where a task's split comes from.

    Attributes:
      file: the split's name on disk, for instance `dev_r1`.
      max_rows: take only so many rows, evenly spaced, since some files are sorted by label; None
        takes all.
    """

    file: str
    max_rows: int | None = None
