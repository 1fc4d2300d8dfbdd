"""The prompt cache's examples: made from renderings, written and read as TFRecord files.

Workers need no TensorFlow for it. SeqIO can also read shards in any bucket through this module.

An Example is `features { feature { key: ... value { bytes_list | float_list | int64_list } } }`.
Sources: tensorflow/core/example/{example,feature}.proto and tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from t0repro.errors import UserError
from t0repro.storage import is_streamed, open_file
from t0repro.storage.disk import name_in_errors

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # fields of Feature
_BUFFER_BYTES = 1 << 18


def varint(number: int) -> bytes:
    """Encodes a non-negative integer as a protocol buffer's varint."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


# Most lengths are below this, and looking one up is faster than encoding it.
_VARINTS = [varint(number) for number in range(1 << 14)]


def _prefix_size(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    return tag + (_VARINTS[size] if size < len(_VARINTS) else varint(size)) + content


class FeatureEncoder:
    """Encodes one named feature of an Example as an entry of its map of features."""

    def __init__(self, name: str):
        # Tag 0x0a is field 1, length-delimited; 0x12 is field 2.
        self._key = _prefix_size(b"\x0a", name.encode())

    def _entry(self, kind: int, content: bytes) -> bytes:
        feature = _prefix_size(bytes([kind << 3 | 2]), content)
        return _prefix_size(b"\x0a", self._key + _prefix_size(b"\x12", feature))

    def strings(self, values: Sequence[bytes]) -> bytes:
        """A list of byte strings."""
        return self._entry(
            _BYTES_LIST, b"".join([_prefix_size(b"\x0a", value) for value in values])
        )

    def varints(self, packed: bytes) -> bytes:
        """A list of integers, given as their joined `varint`s."""
        # An empty list has no field at all, as protobuf writes it.
        return self._entry(_INT64_LIST, _prefix_size(b"\x0a", packed) if packed else b"")

    def floats(self, values: Sequence[float]) -> bytes:
        """A list of float32."""
        return self._entry(
            _FLOAT_LIST, _prefix_size(b"\x0a", struct.pack(f"<{len(values)}f", *values))
        )


def example(entries: Sequence[bytes]) -> bytes:
    """Serializes an Example from its encoded features."""
    return _prefix_size(b"\x0a", b"".join(entries))


def _mask_crc(data: bytes) -> bytes:
    # TFRecord masks its CRC-32C: rotated right by 15 bits, plus a constant.
    crc = google_crc32c.value(data)
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


class RecordFile:
    """A TFRecord file being written; `close` syncs it to the disk.

    Attributes:
      records: Number of records written so far.
      bytes: Number of bytes written so far.
    """

    def __init__(self, path: Path):
        self.records = self.bytes = 0
        self._path = path
        self._file = open(path, "wb", buffering=_BUFFER_BYTES)

    def write(self, record: bytes) -> None:
        """Adds one record: its length, the length's checksum, the record, its checksum."""
        length = len(record).to_bytes(8, "little")
        framed = b"".join((length, _mask_crc(length), record, _mask_crc(record)))
        try:
            self.bytes += self._file.write(framed)
        except OSError:
            # Only on an error: entering a context for each of millions of records takes time.
            with name_in_errors(self._path):
                raise
        self.records += 1

    def close(self) -> None:
        """Syncs and closes the file."""
        with name_in_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Closes the file without ensuring that it is on the disk; harmless after `close`."""
        try:
            self._file.close()
        except OSError:  # the disk is full, so the buffer cannot be flushed either
            pass


def read_records(path: Path) -> Iterator[bytes]:
    """Yields the records of a TFRecord file, verifying their checksums.

    Raises:
      UserError: If the file is broken; names the file and the byte.
    """
    for place, length, file in _heads(path):
        yield _content(file, length, path, place)


class RecordsInTurns:
    """The records of a TFRecord file, some at a time, with their checksums verified.

    A file is closed in between, so that any number of files can be read in turn. A shard in a
    bucket stays open: what was fetched ahead of one turn is there for the next.

    Args:
      path: The file.
    """

    def __init__(self, path: Path):
        self._path, self._start = path, 0
        self._held = open_file(path) if is_streamed(path) else None

    def take(self, count: int) -> list[bytes]:
        """Up to `count` records; fewer only at the end.

        Raises:
          UserError: If the file is broken; names the file and the byte.
        """
        records = []
        heads = _heads(self._path, self._start, self._held)
        for place, length, file in itertools.islice(heads, count):
            records.append(_content(file, length, self._path, place))
            self._start = place + length + 16
        return records


def count_records(path: Path) -> int:
    """Number of records in a TFRecord file; checks their lengths and skips their contents.

    Raises:
      UserError: If the file is broken; names the file and the byte.
    """
    count = 0
    for _, length, file in _heads(path):
        # Without its contents, a record is skipped with its checksum.
        file.seek(length + 4, os.SEEK_CUR)
        count += 1
    return count


def is_damaged_at(path: Path, place: int) -> bool:
    """Whether the record around a byte of a TFRecord file has a wrong checksum, or is cut."""
    try:
        for at, length, file in _heads(path):
            if place < at + length + 16:
                _content(file, length, path, at)
                return False
            file.seek(length + 4, os.SEEK_CUR)
    except UserError:
        return True
    return False


def _heads(
    path: Path, place: int = 0, held: BinaryIO | None = None
) -> Iterator[tuple[int, int, BinaryIO]]:
    """Yields (offset, length, file positioned at the record); callers must read or skip it.

    Args:
      path: The file.
      place: Where its first record of interest begins.
      held: The file if it is open, and stays so.
    """
    end = path.stat().st_size
    with contextlib.nullcontext(held) if held else open_file(path) as file:
        file.seek(place)
        # TFRecord puts 16 bytes around a record: its length (8), the length's checksum (4), its own
        # (4).
        while head := file.read(12):
            _check(head, 8, path, place)
            length = int.from_bytes(head[:8], "little")
            if length + 16 > end - place:  # longer than the file: do not try to read it
                raise _broken_record_error(path, place)
            yield place, length, file
            place += length + 16


def _content(file: BinaryIO, length: int, path: Path, place: int) -> bytes:
    data = file.read(length + 4)
    _check(data, length, path, place)
    return data[:length]


def _check(data: bytes, length: int, path: Path, place: int) -> None:
    if len(data) != length + 4 or _mask_crc(data[:length]) != data[length:]:
        raise _broken_record_error(path, place)


def _broken_record_error(path: Path, place: int) -> UserError:
    return UserError(
        "A record is cut or its checksum is wrong.",
        where=f"{path}, byte {place}",
        fix="Remove the file and make it again.",
    )


def features(record: bytes) -> dict[str, Sequence[Any]]:
    """All features of a serialized Example: byte strings, floats or integers by name.

    Raises:
      google.protobuf.message.DecodeError: If the record is not an Example.
    """
    entries = _example_message().FromString(record).features.feature
    return {entry.key: _values(entry.value) for entry in entries}


def _values(feature: Any) -> list[Any]:
    lists = (feature.bytes_list, feature.float_list, feature.int64_list)
    return next((list(each.value) for each in lists if each.value), [])


def integers(record: bytes, names: Sequence[str], folder: Path) -> dict[str, np.ndarray]:
    """The named integer features of a serialized Example: int32 [length] each.

    Args:
      record: The example.
      names: The features.
      folder: The cache that it is of, for a message.

    Raises:
      UserError: If a feature is missing, or holds anything else than such integers.
      google.protobuf.message.DecodeError: If the record is not an Example.
    """
    entries = _example_message().FromString(record).features.feature
    found = {entry.key: entry.value for entry in entries}
    with contextlib.suppress(KeyError, OverflowError):
        values = {name: found[name].int64_list.value for name in names}
        # Without integers, a feature must be empty, not of texts or floats.
        if all(values[name] or not _values(found[name]) for name in names):
            return {name: np.array(values[name], np.int32) for name in names}
    raise UserError(
        f"A cached example does not have {' and '.join(names)} as integers of 32 bits; its"
        f" features are {', '.join(found) or 'none'}.",
        where=str(folder),
        fix="Cache the task again, with its tokenizer before SeqIO's CacheDatasetPlaceholder.",
    )


@functools.cache
def _example_message() -> Any:
    """tf.train.Example.

    Source: tensorflow/core/example/{example,feature}.proto. A map is, in the serialized form, a
    repeated message with the fields key and value.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="t0repro/example.proto", package="t0repro", syntax="proto3"
    )

    def add(message: str, name: str, number: int, kind: Any, *, many: bool = False) -> None:
        found = [each for each in file.message_type if each.name == message]
        described = found[0] if found else file.message_type.add(name=message)
        label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        added = described.field.add(name=name, number=number, label=label)
        if isinstance(kind, str):
            added.type, added.type_name = field.TYPE_MESSAGE, f".t0repro.{kind}"
        else:
            added.type = kind

    add("BytesList", "value", 1, field.TYPE_BYTES, many=True)
    add("FloatList", "value", 1, field.TYPE_FLOAT, many=True)
    add("Int64List", "value", 1, field.TYPE_INT64, many=True)
    add("Feature", "bytes_list", _BYTES_LIST, "BytesList")
    add("Feature", "float_list", _FLOAT_LIST, "FloatList")
    add("Feature", "int64_list", _INT64_LIST, "Int64List")
    add("Entry", "key", 1, field.TYPE_STRING)
    add("Entry", "value", 2, "Feature")
    add("Features", "feature", 1, "Entry", many=True)
    add("Example", "features", 1, "Features")
    # A pool of its own: TensorFlow may have described the real message in the default one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t0repro.Example"))
