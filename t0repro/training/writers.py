"""Where metrics go: lines of JSON and TensorBoard event files.

EventFile has the methods `write_scalars`, `flush` and `close` of clu.metric_writers.MetricWriter,
so that any writer of clu's can stand beside it. It does not derive from it: importing
clu.metric_writers imports TensorFlow, which the JAX core must not. For the same reason the format,
events as Protocol Buffers in TFRecord framing, is written here, in a few lines.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from t0repro.files import write_atomically


@runtime_checkable
class Writer(Protocol):
    """The part of clu.metric_writers.MetricWriter that is used here."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the values of one step."""

    def flush(self) -> None:
        """Makes what was written visible to readers."""

    def close(self) -> None:
        """Flushes and releases the file."""


class JsonLines:
    """Appends one JSON object a line, each whole on disk as soon as it is written.

    Args:
      path: the file.
      start_step: training lines of later steps are dropped: a run that was interrupted after its
        last checkpoint does those steps again. None keeps every line.
    """

    def __init__(self, path: str | os.PathLike[str], start_step: int | None = None):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and start_step is not None:
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if _is_until(line, start_step)]
            if kept != lines:
                write_atomically(path, "".join(kept))
        self._file = open(path, "a")  # noqa: SIM115 (closed by close())

    def write(self, row: Mapping[str, object]) -> None:
        """Writes one line."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _is_until(line: str, step: int) -> bool:
    """Whether a line is whole and belongs to no later step than this."""
    try:
        row = json.loads(line)
        return line.endswith("\n") and (row["split"] != "train" or row["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


class EventFile:
    """Writes scalars to a new TensorBoard event file.

    Args:
      directory: TensorBoard's log directory.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        name = (
            f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.t0repro"
        )
        self._file = open(directory / name, "ab")  # noqa: SIM115 (closed by close())
        self._write_record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one event with the values of one step."""
        values = (
            _bytes(1, _bytes(1, name.encode()) + _float(2, value))
            for name, value in scalars.items()
        )
        head = _double(1, time.time()) + _integer(2, step)
        self._write_record(head + _bytes(5, b"".join(values)))

    def flush(self) -> None:
        """Makes what was written visible to readers."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write_record(self, data: bytes) -> None:
        """One record: length, its checksum, the data and its checksum, all little-endian."""
        length = struct.pack("<Q", len(data))
        record = (length, _masked_crc(length), data, _masked_crc(data))
        self._file.write(b"".join(record))


# Protocol Buffers' wire format: a key of (field number, wire type), then the value.


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reversed
        table.append(byte)
    return tuple(table)


_TABLE = _crc32c_table()


def _masked_crc(data: bytes) -> bytes:
    """TFRecord's checksum: CRC-32C, rotated and offset so that checksums of checksums differ."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
