"""Scores on disk as soon as they are known, so that a killed evaluation loses seconds of work.

A journal is a file of records of 36 bytes, appended:

    digest    of the pair's tokens, 16 bytes
    score     float64, little-endian, natural logarithm
    seconds   float32; what scoring the pair took
    joules    float32; NaN where the device does not tell
    checksum  CRC-32 of the bytes before it

Its folder is named by everything that a score depends on beside the pair's tokens: the checkpoint,
the type of the activations and the code. A record that was cut, edited or is not finite is passed
over, so that its pair is scored again.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float

# Digests are compared as strings of bytes: numpy cannot sort those of type V16.
DIGEST = np.dtype("S16")
_RECORD = np.dtype(
    [
        ("digest", DIGEST),
        ("score", "<f8"),
        ("seconds", "<f4"),
        ("joules", "<f4"),
        ("checksum", "<u4"),
    ]
)
_CHECKED = _RECORD.itemsize - 4
_SECONDS_BETWEEN_SYNCS = 5.0
_RECORDS_AT_ONCE = 1 << 16  # so that memory does not grow with the journal


class Journal:
    """The scores of one checkpoint, by pair, open for more.

    Args:
      path: the file; created with its folder if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "ab")  # noqa: SIM115 (closed by close())
        # A record that a killed run left half written would shift all that follow it.
        self._file.truncate(self._file.tell() // _RECORD.itemsize * _RECORD.itemsize)
        self._synced = time.monotonic()

    def look_up(self, digests: np.ndarray) -> Float[np.ndarray, "3 pairs"]:
        """Score, seconds and joules of each pair; a pair that is not there has a NaN score.

        Args:
          digests: of the pairs, of type DIGEST.
        """
        found = np.zeros((3, len(digests)))
        found[0] = np.nan
        order = np.argsort(digests)
        for records in self._blocks() if len(digests) else ():
            place = np.searchsorted(digests, records["digest"], sorter=order)
            place = order[np.minimum(place, len(digests) - 1)]
            known = digests[place] == records["digest"]
            for row, name in zip(found, ("score", "seconds", "joules"), strict=True):
                row[place[known]] = records[name][known]
        return found

    def add(
        self,
        digests: np.ndarray,
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
        records["digest"] = digests
        records["score"] = scores
        records["seconds"] = seconds
        records["joules"] = np.nan if joules is None else joules
        records["checksum"] = _checksums(records)
        self._file.write(records.tobytes())
        self._file.flush()
        if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Syncs and closes the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _blocks(self) -> Iterator[np.ndarray]:
        """The records that can be believed, in the order of the file."""
        with open(self._path, "rb") as file:
            while True:
                data = file.read(_RECORDS_AT_ONCE * _RECORD.itemsize)
                whole = len(data) // _RECORD.itemsize
                if not whole:
                    return
                records = np.frombuffer(data, _RECORD, whole)
                intact = (records["checksum"] == _checksums(records)) & np.isfinite(
                    records["score"]
                )
                yield records[intact]


def _checksums(records: np.ndarray) -> np.ndarray:
    data, size = records.tobytes(), _RECORD.itemsize
    starts = range(0, len(data), size)
    return np.array([zlib.crc32(data[at : at + _CHECKED]) for at in starts], np.uint32)
