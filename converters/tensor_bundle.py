"""Reads and writes TensorBundle, the file format of tf.train.Saver (V2), without TensorFlow.

A checkpoint with prefix P is P.index and P.data-00000-of-0000N. The index is a LevelDB-style sorted
table, its blocks compressed with Snappy or not: name -> BundleEntryProto (dtype, shape, shard,
offset, size, masked crc32c), and the empty name -> BundleHeaderProto. Data files are the tensors'
bytes, little-endian, one after the other. The formats are described in
tensorflow/core/util/tensor_bundle, tensorflow/core/protobuf/tensor_bundle.proto and
tensorflow/core/lib/io/table_format.txt.

Reading it here needs no graph and detects a truncated file before any work is done. Writing it here
allows tensors to be written one by one, which tf.train.Saver cannot do.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

from t0repro import storage
from t0repro.converters import tensors
from t0repro.converters.tensors import bytes_of
from t0repro.converters.witnesses import damage_error
from t0repro.errors import UserError
from t0repro.storage.disk import name_in_errors

_TABLE_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
# Block types. tf.train.Saver does not compress, but an older TensorFlow did when it merged a
# checkpoint's shards, so the indexes of many released checkpoints are compressed.
_UNCOMPRESSED, _SNAPPY = 0, 1
_RESTART_INTERVAL = 16
_BLOCK_BYTES = 4096

# tensorflow/core/framework/types.proto; the dtypes that a T5's checkpoint can have.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    9: np.dtype(np.int64),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype(np.float16),
}
_DTYPE_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor's type (None if it cannot be read), shape, place in the files and checksum."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    masked_crc32c: int


class BundleReader:
    """An open bundle.

    Args:
      prefix: Path without `.index`.

    Raises:
      UserError: If the index or a data file is missing, damaged or shorter than the index says; the
        message names the file.
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self._prefix = os.fspath(prefix)
        index = f"{self._prefix}.index"
        table = table_of(index)
        header = dict(protobuf_fields(table.pop(b"", b"")))
        self._num_shards = header.get(1, 0)
        if self._num_shards < 1:
            raise damage_error(index, "it has no header")
        # BundleHeaderProto.endianness: 0 is little-endian.
        if header.get(2, 0) != 0:
            raise damage_error(index, "it was written on a big-endian machine")
        self.entries = {name.decode(): _parse_entry(value) for name, value in table.items()}
        self._check_shards()

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor and verifies its checksum; the array is read-only.

        Raises:
          UserError: If the bytes differ from what was written.
        """
        entry = self.entries[name]
        file_name = self._shard_path(entry.shard)
        if entry.dtype is None:
            raise damage_error(file_name, f"{name} is of a type that no T5 has")
        array = tensors.empty(entry.shape, entry.dtype)
        if array.nbytes != entry.size:
            raise damage_error(file_name, f"{name} has {entry.size} bytes, not {array.nbytes}")
        if not storage.read_into(file_name, entry.offset, bytes_of(array)):
            raise damage_error(file_name, f"{name} goes beyond its end")
        if _mask(_crc32c(array)) != entry.masked_crc32c:
            raise damage_error(file_name, f"the checksum of {name} is wrong")
        array.flags.writeable = False
        return array

    def _shard_path(self, shard: int) -> str:
        return f"{self._prefix}.data-{shard:05d}-of-{self._num_shards:05d}"

    def _check_shards(self) -> None:
        # Start every shard from 0, so that one without tensors must exist too.
        needed = dict.fromkeys(range(self._num_shards), 0)
        for entry in self.entries.values():
            needed[entry.shard] = max(needed.get(entry.shard, 0), entry.offset + entry.size)
        for shard, size in needed.items():
            path = self._shard_path(shard)
            if not storage.is_file(path):
                raise UserError(
                    "A data file of the checkpoint is missing.",
                    where=path,
                    fix="Copy all files that begin with this prefix, or choose another checkpoint.",
                )
            if (actual := storage.file_size(path)) < size:
                raise damage_error(path, f"it has {actual} bytes, but the index calls for {size}")


def table_of(path: str) -> dict[bytes, bytes]:
    """Reads all items of a table file, such as a checkpoint's index, compressed or not.

    Raises:
      UserError: If the file cannot be read, is not such a table, or has a wrong block checksum.
    """
    try:
        content = storage.read(path)
    except OSError as error:
        raise UserError(
            f"A checkpoint's index file cannot be read: {error.strerror or error}.",
            where=path,
            fix="Give it read permission, or choose another checkpoint.",
        ) from None
    if len(content) < _FOOTER_BYTES or content[-8:] != struct.pack("<Q", _TABLE_MAGIC):
        raise damage_error(path, "it does not end as an index file does")
    footer = content[-_FOOTER_BYTES:]
    try:
        meta_block, position = _handle(footer, 0)
        _block(path, content, *meta_block)  # empty, but its checksum is part of the file
        index_block, _ = _handle(footer, position)
        table = {}
        for _, handle in _block_items(_block(path, content, *index_block)):
            data_block, _ = _handle(handle, 0)
            table.update(_block_items(_block(path, content, *data_block)))
    except (IndexError, struct.error):
        raise damage_error(path, "its blocks do not fit together") from None
    return table


def _block(path: str, content: bytes, offset: int, size: int) -> bytes:
    """Returns a block's items and restarts, uncompressed, after verifying its checksum."""
    compression = content[offset + size]
    (crc,) = struct.unpack_from("<I", content, offset + size + 1)
    # The checksum covers the bytes as they are in the file, compressed or not, and the type byte.
    if _mask(google_crc32c.value(content[offset : offset + size + 1])) != crc:
        raise damage_error(path, "the checksum of a block is wrong")
    block = content[offset : offset + size]
    if compression == _SNAPPY:
        return _decompress(path, block)
    if compression != _UNCOMPRESSED:
        raise damage_error(path, f"TensorFlow knows no compression of type {compression}")
    return block


def _decompress(path: str, block: bytes) -> bytes:
    import pyarrow

    length, _ = _varint(block, 0)  # Snappy's raw format begins with it
    try:
        return pyarrow.Codec("snappy").decompress(block, length, asbytes=True)
    except (pyarrow.ArrowException, OSError):
        raise damage_error(path, "a compressed block cannot be decompressed") from None


def _block_items(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    (num_restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    # A block ends with the offsets of its restarts and their number, which sequential reading
    # ignores.
    position, end, key = 0, len(block) - 4 - 4 * num_restarts, b""
    while position < end:
        shared, position = _varint(block, position)
        unshared, position = _varint(block, position)
        length, position = _varint(block, position)
        # A key is stored as the length of its common prefix with the key before, and the rest.
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        yield key, block[position : position + length]
        position += length


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    offset, position = _varint(data, position)
    size, position = _varint(data, position)
    return (offset, size), position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def protobuf_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each protobuf field; length-delimited values are bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        if tag & 7 == 0:
            value, position = _varint(message, position)
        elif tag & 7 == 2:
            length, position = _varint(message, position)
            value, position = message[position : position + length], position + length
        else:
            # Wire type 5 is fixed32, 1 is fixed64.
            width = 4 if tag & 7 == 5 else 8
            value = int.from_bytes(message[position : position + width], "little")
            position += width
        yield tag >> 3, value


def _parse_entry(message: bytes) -> Entry:
    fields: dict[int, Any] = dict(protobuf_fields(message))
    # TensorShapeProto: each field 2 is a dimension, whose field 1 is its size.
    sizes = [dict(protobuf_fields(dim)) for n, dim in protobuf_fields(fields.get(2, b"")) if n == 2]
    # Field 7 lists the slices of a partitioned variable, whose entry has no data of its own.
    return Entry(
        dtype=None if 7 in fields else _DTYPES.get(fields.get(1, 0)),
        shape=tuple(int(size.get(1, 0)) for size in sizes),
        shard=fields.get(3, 0),
        offset=fields.get(4, 0),
        size=fields.get(5, 0),
        masked_crc32c=fields.get(6, 0),
    )


def _crc32c(array: np.ndarray) -> int:
    # google_crc32c reads an array without copying it, but does not accept a memoryview.
    return google_crc32c.value(array.reshape(-1).view(np.uint8))


def _mask(crc: int) -> int:
    """Applies LevelDB's masking, which it uses for checksums stored beside their data."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class BundleWriter:
    """Writes a bundle of one shard, tensor by tensor; `close` writes the index last.

    Args:
      prefix: Path or address without `.index`; its directory must exist.
      resume: Continue an interrupted writer's data file.
    """

    def __init__(self, prefix: str | os.PathLike[str], resume: bool = False):
        self._prefix = os.fspath(prefix)
        self._data = storage.open_new(f"{self._prefix}.data-00000-of-00001", resume=resume)
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        """Appends a tensor; its dtype must be one of `_DTYPES`."""
        array = np.asarray(array, order="C")
        offset = self._data.tell()
        with name_in_errors(self._data.name):
            self._data.write(bytes_of(array))
        self._entries[name] = _entry(array, offset)

    def read_back(self, size: int) -> bytes | None:
        """Returns the `size` bytes in the next tensor's place, or None if there are fewer."""
        offset = self._data.tell()
        data = self._data.read(size)
        # Seek back: `keep` or `add` decides what happens to the bytes.
        self._data.seek(offset)
        return data if len(data) == size else None

    def keep(self, name: str, array: np.ndarray) -> None:
        """Accepts the bytes in the next tensor's place as this tensor and moves past them."""
        offset = self._data.tell()
        self._entries[name] = _entry(array, offset)
        self._data.seek(offset + array.nbytes)

    def close(self) -> None:
        """Syncs the data file and writes the index."""
        # An interrupted conversion of more tensors may have left bytes after the last one.
        with name_in_errors(self._data.name):
            self._data.truncate()
        storage.finish(self._data)
        # One shard; VersionDef.producer 1, kTensorBundleVersion.
        header = _field(1, 1) + _field(3, _field(1, 1))
        table = {name.encode(): _format_entry(entry) for name, entry in self._entries.items()}
        with storage.open_new(f"{self._prefix}.index") as file:
            with name_in_errors(file.name):
                file.write(_format_table({b"": header, **table}))
            storage.finish(file)

    def abandon(self) -> None:
        """Closes the data file without an index, so it cannot be mistaken for a checkpoint."""
        self._data.close()


def _entry(array: np.ndarray, offset: int) -> Entry:
    checksum = _mask(_crc32c(array))
    return Entry(array.dtype, array.shape, 0, offset, array.nbytes, checksum)


def _format_entry(entry: Entry) -> bytes:
    assert entry.dtype is not None
    shape = b"".join(_field(2, _field(1, size)) for size in entry.shape)
    # The checksum is field 6, a fixed32 (wire type 5), unlike the others.
    checksum = _encode_varint(6 << 3 | 5) + struct.pack("<I", entry.masked_crc32c)
    return (
        _field(1, _DTYPE_NUMBERS[entry.dtype])
        + _field(2, shape)
        + _field(4, entry.offset)
        + _field(5, entry.size)
        + checksum
    )


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value
    return _encode_varint(number << 3) + _encode_varint(value)


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _format_table(table: Mapping[bytes, bytes]) -> bytes:
    output = bytearray()
    index: dict[bytes, bytes] = {}
    pending: dict[bytes, bytes] = {}
    size = 0
    # The format requires keys in ascending order of their bytes.
    for key in sorted(table):
        pending[key] = table[key]
        size += len(key) + len(table[key])
        if size >= _BLOCK_BYTES:
            index[key] = _append_block(output, pending)
            pending, size = {}, 0
    if pending:
        index[max(pending)] = _append_block(output, pending)
    # The format has a block of metadata before the index, which TensorFlow leaves empty.
    meta_handle = _append_block(output, {})
    index_handle = _append_block(output, index)
    footer = (meta_handle + index_handle).ljust(_FOOTER_BYTES - 8, b"\0")
    return bytes(output + footer + struct.pack("<Q", _TABLE_MAGIC))


def _append_block(output: bytearray, items: Mapping[bytes, bytes]) -> bytes:
    """Appends a block of sorted items with its trailer; returns its handle."""
    block, restarts, previous = bytearray(), [], b""
    for number, (key, value) in enumerate(items.items()):
        shared = 0
        if number % _RESTART_INTERVAL == 0:
            # At a restart point a key is written in full.
            restarts.append(len(block))
        else:
            shared = len(os.path.commonprefix([previous, key]))
        for length in (shared, len(key) - shared, len(value)):
            block += _encode_varint(length)
        block += key[shared:] + value
        previous = key
    # Even an empty block has one restart.
    restarts = restarts or [0]
    block += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    handle = _encode_varint(len(output)) + _encode_varint(len(block))
    block.append(_UNCOMPRESSED)
    output += block + struct.pack("<I", _mask(google_crc32c.value(bytes(block))))
    return handle
