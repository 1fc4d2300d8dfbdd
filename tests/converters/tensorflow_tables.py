"""TensorFlow's tables, byte for byte as tensorflow/core/lib/io/table_builder.cc writes them.

Snappy-compressed ones too, which no operation of a current TensorFlow writes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import google_crc32c
import pyarrow

from t0repro.converters.tensor_bundle import table_of

_BLOCK_BYTES = 262_144
_RESTART_INTERVAL, _INDEX_RESTART_INTERVAL = 16, 1
_MAGIC = 0xDB4775248B80FB57

Stored = tuple[bytes, int]
"""What a file has for a block, and the block's type."""


def _as_it_is(block: bytes) -> Stored:
    return block, 0


def _compressed(block: bytes) -> Stored:
    smaller = pyarrow.Codec("snappy").compress(block, asbytes=True)
    # A block that shrinks by less than an eighth is not worth the time to decompress it.
    return (smaller, 1) if len(smaller) < len(block) - len(block) // 8 else (block, 0)


def compress_index(prefix: Path) -> None:
    """Rewrites a checkpoint's index compressed; nothing else changes."""
    index = prefix.with_name(prefix.name + ".index")
    index.write_bytes(table(table_of(str(index)), _compressed))


def table(items: Mapping[bytes, bytes], store: Callable[[bytes], Stored] = _as_it_is) -> bytes:
    """The bytes of a table file.

    Args:
      items: what the table holds.
      store: what the file has for a block, and of which type it says that it is.
    """
    output, index, block = bytearray(), _Block(_INDEX_RESTART_INTERVAL), _Block(_RESTART_INTERVAL)
    keys = sorted(items)
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        block.add(key, items[key])
        if following is None or len(block.content()) >= _BLOCK_BYTES:
            index.add(_separator(key, following), _append(output, store(block.content())))
            block = _Block(_RESTART_INTERVAL)
    # The block that could name filters is empty.
    meta = _append(output, store(_Block(_RESTART_INTERVAL).content()))
    root = _append(output, store(index.content()))
    return bytes(output + (meta + root).ljust(40, b"\0") + struct.pack("<Q", _MAGIC))


class _Block:
    """Sorted items, each without what its key shares with the one before it."""

    def __init__(self, restart_interval: int):
        self._interval, self._number = restart_interval, 0
        self._items, self._restarts, self._previous = bytearray(), [0], b""

    def add(self, key: bytes, value: bytes) -> None:
        shared = len(os.path.commonprefix([self._previous, key]))
        if self._number and self._number % self._interval == 0:
            self._restarts.append(len(self._items))
            shared = 0
        self._items += _varint(shared) + _varint(len(key) - shared) + _varint(len(value))
        self._items += key[shared:] + value
        self._number, self._previous = self._number + 1, key

    def content(self) -> bytes:
        count = len(self._restarts)
        return bytes(self._items + struct.pack(f"<{count + 1}I", *self._restarts, count))


def _append(output: bytearray, stored: Stored) -> bytes:
    """Appends a block and its trailer; returns its handle."""
    content, kind = stored
    handle = _varint(len(output)) + _varint(len(content))
    content += bytes([kind])
    crc = google_crc32c.value(content)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    output += content + struct.pack("<I", masked)
    return handle


def _separator(key: bytes, following: bytes | None) -> bytes:
    """A short key that is not less than `key` and, if there is one, less than the following."""
    if following is None:
        for place, byte in enumerate(key):
            if byte != 0xFF:
                return key[:place] + bytes([byte + 1])
        return key
    place = len(os.path.commonprefix([key, following]))
    if place < min(len(key), len(following)) and key[place] + 1 < following[place]:
        return key[:place] + bytes([key[place] + 1])
    return key


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
