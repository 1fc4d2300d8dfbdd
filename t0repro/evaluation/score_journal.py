"""The journal of the scores of an evaluation's (input, choice) pairs.

Scores are written as they are computed: a killed evaluation loses seconds of work. A journal is
an append-only file of 32-byte records:

    digest    of the pair's tokens, 16 bytes
    score     float64, little-endian, natural log
    seconds   float32; time spent scoring the pair
    checksum  CRC-32 of the bytes before it

Its folder is named after everything else that determines a score: checkpoint, activation dtype
and code. Files beside it have a line for each thing that changed scores' last bits (`rounded_by`),
and for each kind of device that computed some (`devices`).
A truncated, edited or non-finite record is ignored, and its pair is scored again.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from t0repro.model.shapes import Float
from t0repro.storage import make_folder
from t0repro.storage.disk import name_in_errors

# Byte strings rather than V16, which numpy cannot sort.
DIGEST = np.dtype("S16")


_RECORD = np.dtype(
    [
        ("digest", DIGEST),
        ("score", "<f8"),
        ("seconds", "<f4"),
        ("checksum", "<u4"),
    ]
)


# The bytes that the checksum covers: all but its own.
_CHECKED = _RECORD.itemsize - 4


_SECONDS_BETWEEN_SYNCS = 5.0


_RECORDS_AT_ONCE = 1 << 16  # so that memory does not grow with the journal


class ScoreJournal:
    """One checkpoint's scores by pair, open for reading and appending.

    Args:
      path: the file; created with its folder if missing.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        make_folder(self._path.parent)
        self._file = open(self._path, "ab")  # noqa: SIM115 (closed by close())
        # A record that a killed run left half-written would misalign all that follow it.
        self._file.truncate(self._file.tell() // _RECORD.itemsize * _RECORD.itemsize)
        self._synced = time.monotonic()

    def look_up(self, digests: np.ndarray) -> Float[np.ndarray, "2 pairs"]:
        """Looks up score and seconds of each pair; the score is NaN if the pair is unknown.

        Args:
          digests: the pairs' digests, of dtype DIGEST.
        """
        columns = np.zeros((2, len(digests)))
        columns[0] = np.nan
        order = np.argsort(digests)
        for records in self._blocks() if len(digests) else ():
            # For each record, where its digest would sort; the comparison below decides if it is
            # there.
            place = np.searchsorted(digests, records["digest"], sorter=order)
            place = order[np.minimum(place, len(digests) - 1)]
            known = digests[place] == records["digest"]
            for row, name in zip(columns, ("score", "seconds"), strict=True):
                # Of several records of a pair, the last one in the file wins.
                row[place[known]] = records[name][known]
        return columns

    def add(self, digests: np.ndarray, scores: np.ndarray, seconds: float = 0.0) -> None:
        """Appends scores; they are synced to the disk every few seconds.

        Args:
          digests: the pairs' digests, of dtype DIGEST.
          scores: the pairs' log-likelihoods, natural log.
          seconds: time that each pair took.
        """
        records = np.zeros(len(digests), _RECORD)
        records["digest"] = digests
        records["score"] = scores
        records["seconds"] = seconds
        records["checksum"] = _checksums(records)
        # Flush at once, so that a killed process loses only batches that were still being computed.
        with name_in_errors(self._path):
            self._file.write(records.tobytes())
            self._file.flush()
            if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def close(self) -> None:
        """Syncs and closes the file."""
        with name_in_errors(self._path):
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    def _blocks(self) -> Iterator[np.ndarray]:
        """Yields blocks of intact records, in file order."""
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


def add_note(folder: Path, file: Literal["rounded_by", "devices"], line: str) -> None:
    """Notes, for as long as the scores of a journal's folder are kept, what decided last bits."""
    if line not in read_notes(folder, file):
        make_folder(folder)
        with open(folder / file, "a", encoding="utf-8") as opened:
            opened.write(f"{line}\n")


def read_notes(folder: Path, file: Literal["rounded_by", "devices"]) -> list[str]:
    """What was noted of some scores of a journal's folder."""
    path = folder / file
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _checksums(records: np.ndarray) -> np.ndarray:
    data, size = records.tobytes(), _RECORD.itemsize
    starts = range(0, len(data), size)
    return np.array([zlib.crc32(data[at : at + _CHECKED]) for at in starts], np.uint32)
