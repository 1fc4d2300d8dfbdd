"""Scores on disk as soon as they are known, so that a killed evaluation loses seconds of work.

A journal is a file of records of 24 bytes, appended: the pair's digest (16) and its score (float64,
little-endian). Its folder is named by everything that a score depends on beside the pair's tokens:
the checkpoint, the type of the activations and the code. A record that a killed run left
half-written at the end is dropped.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

_RECORD = np.dtype([("digest", "V16"), ("score", "<f8")])
_SECONDS_BETWEEN_SYNCS = 5.0


def read_journal(path: str | os.PathLike[str]) -> dict[bytes, float]:
    """The scores of a journal by the pairs' digests; empty if there is none yet."""
    path = Path(path)
    whole = path.stat().st_size // _RECORD.itemsize if path.exists() else 0
    records = np.fromfile(path, _RECORD, whole) if whole else np.zeros(0, _RECORD)
    return {
        digest.tobytes(): float(score)
        for digest, score in zip(records["digest"], records["score"], strict=True)
    }


class Journal:
    """The scores of one checkpoint, by pair, open for more.

    Args:
      path: the file; created with its folder if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.scores = read_journal(path)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close())
        self._file.truncate(self._file.tell() // _RECORD.itemsize * _RECORD.itemsize)
        self._synced = time.monotonic()

    def add(self, digests: list[bytes], scores: np.ndarray) -> None:
        """Appends scores; they are synced to the disk every few seconds."""
        records = np.zeros(len(digests), _RECORD)
        records["digest"] = np.array(digests, "V16")
        records["score"] = scores
        self._file.write(records.tobytes())
        self._file.flush()
        self.scores.update(zip(digests, map(float, scores), strict=True))
        if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Syncs and closes the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
