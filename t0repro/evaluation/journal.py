"""Scores on disk as soon as they are known, so that a killed evaluation loses seconds of work.

A journal is a file of records of 32 bytes, appended: the pair's digest (16), its score (float64,
little-endian), and what scoring it took, in seconds and in joules (float32, NaN where the device
does not tell), so that a run that goes on knows what it took in all. Its folder is named by
everything that a score depends on beside the pair's tokens: the checkpoint, the type of the
activations and the code. A record that a killed run left half-written at the end is dropped.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

_RECORD = np.dtype([("digest", "V16"), ("score", "<f8"), ("seconds", "<f4"), ("joules", "<f4")])
_SECONDS_BETWEEN_SYNCS = 5.0


class Entry(NamedTuple):
    """A pair's score, natural logarithm, and the seconds and joules that it took."""

    score: float
    seconds: float
    joules: float


def read_journal(path: str | os.PathLike[str]) -> dict[bytes, Entry]:
    """The entries of a journal by the pairs' digests; empty if there is none yet."""
    path = Path(path)
    whole = path.stat().st_size // _RECORD.itemsize if path.exists() else 0
    records = np.fromfile(path, _RECORD, whole) if whole else np.zeros(0, _RECORD)
    return {
        record["digest"].tobytes(): Entry(
            float(record["score"]), float(record["seconds"]), float(record["joules"])
        )
        for record in records
    }


class Journal:
    """The scores of one checkpoint, by pair, open for more.

    Args:
      path: the file; created with its folder if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.entries = read_journal(path)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close())
        self._file.truncate(self._file.tell() // _RECORD.itemsize * _RECORD.itemsize)
        self._synced = time.monotonic()

    def add(
        self,
        digests: list[bytes],
        scores: np.ndarray,
        seconds: float = 0.0,
        joules: float | None = None,
    ) -> None:
        """Appends scores; they are synced to the disk every few seconds.

        Args:
          digests: of the pairs.
          scores: of the pairs.
          seconds: that each of them took.
          joules: that each of them took; None where that is not known.
        """
        records = np.zeros(len(digests), _RECORD)
        records["digest"] = np.array(digests, "V16")
        records["score"] = scores
        records["seconds"] = seconds
        records["joules"] = np.nan if joules is None else joules
        self._file.write(records.tobytes())
        self._file.flush()
        each = np.nan if joules is None else joules
        for digest, score in zip(digests, scores, strict=True):
            self.entries[digest] = Entry(float(score), seconds, each)
        if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Syncs and closes the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
