"""Rows spooled to files, from which workers read any of them."""

from __future__ import annotations

import dataclasses
import io
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from t0repro.tasks.row_codec import decode_row, encode_row


@dataclasses.dataclass(frozen=True)
class Spool:
    """The files of a split's rows: `<base>.rows`, with their offsets and numbers in the source."""

    base: str
    count: int

    def open(self) -> SpoolReader:
        """Opens the rows for reading."""
        return SpoolReader(self)

    def remove(self) -> None:
        """Removes the files."""
        for suffix in (".rows", ".offsets.npy", ".numbers.npy", ".ordinals.npy"):
            Path(self.base + suffix).unlink(missing_ok=True)


def write_spool(rows: Iterable[tuple[int, dict[str, Any]]], base: Path) -> Spool:
    """Writes (number in the source, row) pairs; needs 16 bytes of memory per row."""
    offsets, numbers = array("Q", [0]), array("Q")
    with open(f"{base}.rows", "wb", buffering=1 << 20) as file:
        for number, row in rows:
            data = encode_row(row)
            file.write(data)
            offsets.append(offsets[-1] + len(data))
            numbers.append(number)
    save_array(Path(f"{base}.offsets.npy"), np.frombuffer(offsets, np.uint64))
    save_array(Path(f"{base}.numbers.npy"), np.frombuffer(numbers, np.uint64))
    return Spool(str(base), len(numbers))


def save_array(path: Path, values: np.ndarray) -> None:
    """Writes an array like np.save, but raises the system's own error on failure.

    On a full disk, NumPy's own file writing raises an OSError without an error number.
    """
    whole = io.BytesIO()
    np.save(whole, values)
    path.write_bytes(whole.getbuffer())


class SpoolReader:
    """Reads rows by their place in the spool; a context manager."""

    def __init__(self, spool: Spool):
        # Map it rather than load it: a worker with a few shards needs only part of it.
        self._offsets = np.load(f"{spool.base}.offsets.npy", mmap_mode="r", allow_pickle=False)
        empty = np.zeros(0, np.uint64)  # which cannot be mapped
        numbers = f"{spool.base}.numbers.npy"
        self._numbers = (
            np.load(numbers, mmap_mode="r", allow_pickle=False) if spool.count else empty
        )
        self._file = os.open(f"{spool.base}.rows", os.O_RDONLY)

    def __enter__(self) -> SpoolReader:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def rows(self, places: np.ndarray) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields (place, number in the source, row) for each place, in the order given."""
        for place in places.tolist():
            start, end = int(self._offsets[place]), int(self._offsets[place + 1])
            # Read, not mapped: mapped pages would count toward this process's memory.
            row = decode_row(os.pread(self._file, end - start, start))
            yield place, int(self._numbers[place]), row
