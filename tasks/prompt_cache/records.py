"""The prompt cache's examples: made from renderings, written and read as TFRecord files.

Workers need no TensorFlow for it. SeqIO can also read shards in any bucket through this module.

An Example is `features { feature { key: ... value { bytes_list | float_list | int64_list } } }`.
Sources: tensorflow/core/example/{example,feature}.proto and tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import google_crc32c
import numpy as np

from t0repro.errors import UserError
from t0repro.files import naming
from t0repro.tasks.vocabulary import processor_of
from t0repro.working_copies import copy_with, is_streamed, opened

if TYPE_CHECKING:
    from t0repro.tasks.templates import Rendering

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


def _sized(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    return tag + (_VARINTS[size] if size < len(_VARINTS) else varint(size)) + content


class FeatureEncoder:
    """Encodes one named feature of an Example as an entry of its map of features."""

    def __init__(self, name: str):
        # Tag 0x0a is field 1, length-delimited; 0x12 is field 2.
        self._key = _sized(b"\x0a", name.encode())

    def _entry(self, kind: int, content: bytes) -> bytes:
        feature = _sized(bytes([kind << 3 | 2]), content)
        return _sized(b"\x0a", self._key + _sized(b"\x12", feature))

    def strings(self, values: Sequence[bytes]) -> bytes:
        """A list of byte strings."""
        return self._entry(_BYTES_LIST, b"".join([_sized(b"\x0a", value) for value in values]))

    def varints(self, packed: bytes) -> bytes:
        """A list of integers, given as their joined `varint`s."""
        # An empty list has no field at all, as protobuf writes it.
        return self._entry(_INT64_LIST, _sized(b"\x0a", packed) if packed else b"")

    def floats(self, values: Sequence[float]) -> bytes:
        """A list of float32."""
        return self._entry(_FLOAT_LIST, _sized(b"\x0a", struct.pack(f"<{len(values)}f", *values)))


def example(entries: Sequence[bytes]) -> bytes:
    """Serializes an Example from its encoded features."""
    return _sized(b"\x0a", b"".join(entries))


def _masked_crc(data: bytes) -> bytes:
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
        framed = b"".join((length, _masked_crc(length), record, _masked_crc(record)))
        try:
            self.bytes += self._file.write(framed)
        except OSError:
            # Only on an error: entering a context for each of millions of records takes time.
            with naming(self._path):
                raise
        self.records += 1

    def close(self) -> None:
        """Syncs and closes the file."""
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Closes the file without ensuring that it is on the disk; harmless after `close`."""
        try:
            self._file.close()
        except OSError:  # the disk is full, so the buffer cannot be flushed either
            pass


# Reading ---------------------------------------------------------------------------------------


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
        self._held = opened(path) if is_streamed(path) else None

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
    with contextlib.nullcontext(held) if held else opened(path) as file:
        file.seek(place)
        # TFRecord puts 16 bytes around a record: its length (8), the length's checksum (4), its own
        # (4).
        while head := file.read(12):
            _check(head, 8, path, place)
            length = int.from_bytes(head[:8], "little")
            if length + 16 > end - place:  # longer than the file: do not try to read it
                raise _broken(path, place)
            yield place, length, file
            place += length + 16


def _content(file: BinaryIO, length: int, path: Path, place: int) -> bytes:
    data = file.read(length + 4)
    _check(data, length, path, place)
    return data[:length]


def _check(data: bytes, length: int, path: Path, place: int) -> None:
    if len(data) != length + 4 or _masked_crc(data[:length]) != data[length:]:
        raise _broken(path, place)


def _broken(path: Path, place: int) -> UserError:
    return UserError(
        "A record is cut or its checksum is wrong.",
        where=f"{path}, byte {place}",
        fix="Remove the file and make it again.",
    )


def features(record: bytes) -> dict[str, Sequence[Any]]:
    """All features of a serialized Example: byte strings, floats or integers by name.

    Raises:
      google.protobuf.message.DecodeError: If the record is no Example.
    """
    entries = _example_message().FromString(record).features.feature
    return {entry.key: _values(entry.value) for entry in entries}


def _values(feature: Any) -> list[Any]:
    lists = (feature.bytes_list, feature.float_list, feature.int64_list)
    return next((list(each.value) for each in lists if each.value), [])


def integers(record: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named integer features of a serialized Example: int32 [length] each.

    Raises:
      KeyError: If a feature is missing.
      google.protobuf.message.DecodeError: If the record is no Example.
    """
    features = _example_message().FromString(record).features.feature
    values = {entry.key: entry.value.int64_list.value for entry in features}
    return {name: np.array(values[name], np.int32) for name in names}


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


# Streaming into SeqIO -----------------------------------------------------------------------------
# TensorFlow itself reads only Google's buckets. SeqIO reads a cached split by
# tf.data.TFRecordDataset, one file after another or in turns. A shard that only a bucket holds is
# read by `read_records` in its place: the same records in the same order, so all that SeqIO does
# with them stays.

_RECORDS_AT_A_TIME = 64  # passed from Python to tf.data


def stream_into_seqio() -> None:
    """Makes SeqIO read shards of working copies from their buckets; once is enough."""
    import tensorflow as tf
    from seqio import dataset_providers

    original: Any = dataset_providers._CachedDataSource
    if original.__name__ == "_StreamedSource":
        return

    class _StreamedSource(original):
        """A cached split, which may be in a bucket."""

        def __init__(self, cache_dir: str, *args: Any, **kwargs: Any):
            super().__init__(cache_dir, *args, **kwargs)
            if copy_with(Path(cache_dir)) is None:
                return
            read: Any = self._reader

            def read_from_bucket(file: tf.Tensor) -> tf.data.Dataset:
                # SeqIO's own reader parses the records too; only where they come from is replaced.
                whole_files = dataset_providers.tf.data.TFRecordDataset
                dataset_providers.tf.data.TFRecordDataset = _records
                try:
                    return read(file)
                finally:
                    dataset_providers.tf.data.TFRecordDataset = whole_files

            self._reader = read_from_bucket

    dataset_providers._CachedDataSource = _StreamedSource


def _records(file: Any) -> Any:
    """A tf.data.Dataset of a file's records."""
    import tensorflow as tf

    signature = tf.TensorSpec([None], tf.string)
    blocks = tf.data.Dataset.from_generator(_blocks, args=(file,), output_signature=signature)
    return blocks.unbatch()


def _blocks(file: bytes) -> Iterator[list[bytes]]:
    records = read_records(Path(os.fsdecode(file)))
    while block := list(itertools.islice(records, _RECORDS_AT_A_TIME)):
        yield block


# ---- Renderings as a task's examples, and its twin's, which has one per answer choice ------------

# The features are those that SeqIO caches for tasks registered by t0repro.tasks.registration.


class Tokenizer:
    """A vocabulary that returns tokens as joined varints (see `count`).

    Args:
      model: The vocabulary's serialized model, including its extra ids.
      threads: Number of threads that SentencePiece uses for a batch of texts.
    """

    def __init__(self, model: bytes, threads: int = 1):
        self._model = processor_of(model)
        # Encoded once per token: most of the work of writing an example is joining these.
        self._varints = [varint(token) for token in range(self._model.get_piece_size())]
        self._threads = threads

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Each text's tokens, without EOS."""
        table = self._varints
        encoded = self._model.encode(list(texts), num_threads=self._threads)
        return [b"".join([table[token] for token in tokens]) for tokens in encoded]


_CONTINUED = bytes(range(0x80, 0x100))


def count(tokens: bytes) -> int:
    """The number of tokens; the last byte of each varint is its only one below 0x80."""
    return len(tokens.translate(None, _CONTINUED))


_TOKENS = {"shape": [None], "dtype": "int32"}
_STRING = {"shape": [], "dtype": "string"}

# Tokenize repeated targets, such as classes and answer choices, only once.
_REMEMBERED_TARGETS = 1 << 14
_SHORT = 200  # characters


@dataclasses.dataclass
class Statistics:
    """The contents of SeqIO's statistics file for a split; EOS does not count as a token."""

    examples: int = 0
    inputs_tokens: int = 0
    inputs_max_tokens: int = 0
    targets_tokens: int = 0
    targets_max_tokens: int = 0

    def add(self, inputs: int, targets: int) -> None:
        """Counts an example with these numbers of tokens."""
        self.examples += 1
        self.inputs_tokens += inputs
        self.targets_tokens += targets
        self.inputs_max_tokens = max(self.inputs_max_tokens, inputs)
        self.targets_max_tokens = max(self.targets_max_tokens, targets)

    def merge(self, other: Statistics) -> None:
        """Adds another part's counts."""
        self.examples += other.examples
        self.inputs_tokens += other.inputs_tokens
        self.targets_tokens += other.targets_tokens
        self.inputs_max_tokens = max(self.inputs_max_tokens, other.inputs_max_tokens)
        self.targets_max_tokens = max(self.targets_max_tokens, other.targets_max_tokens)


def feature_types(score_eval: bool, has_choices: bool) -> dict[str, Mapping[str, Any]]:
    """Name -> shape and type of a cached example's features, as in SeqIO's info file."""
    found: dict[str, Mapping[str, Any]] = {
        "inputs": _TOKENS,
        "inputs_pretokenized": _STRING,
        "targets": _TOKENS,
        "targets_pretokenized": _STRING,
    }
    if score_eval:
        found["idx"] = _TOKENS
        found["is_correct"] = {"shape": [], "dtype": "bool"}
        found["weight"] = {"shape": [], "dtype": "float32"}
    elif has_choices:
        found["answer_choices"] = {"shape": [None], "dtype": "string"}
    return found


class ExampleWriter:
    """Serializes renderings as Examples of the task or of its twin.

    Args:
      tokenizer: Tokenizer for inputs and targets.
      eos: Feature -> id of the token to append, or None.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Mapping[str, int | None]):
        self._tokenizer = tokenizer
        # Encoded once: the same token ends every target.
        self._eos = {name: b"" if token is None else varint(token) for name, token in eos.items()}
        names = [*feature_types(True, True), *feature_types(False, True)]
        self._targets_seen: dict[str, tuple[bytes, int]] = {}
        self._encoders = {name: FeatureEncoder(name) for name in names}
        self._yes, self._no = (
            self._encoders["is_correct"].varints(varint(value)) for value in (1, 0)
        )
        self._weight = self._encoders["weight"].floats([1.0])

    def inputs(self, renderings: Sequence[Rendering]) -> list[tuple[bytes, int]]:
        """For each rendering, its input's two encoded features and its number of tokens."""
        texts = [rendering.inputs for rendering in renderings]
        tokens, text = self._encoders["inputs"], self._encoders["inputs_pretokenized"]
        return [
            (
                tokens.varints(encoded + self._eos["inputs"]) + text.strings([raw.encode()]),
                count(encoded),
            )
            for raw, encoded in zip(texts, self._tokenizer.encode(texts), strict=True)
        ]

    def _targets(self, target: str) -> tuple[bytes, int]:
        """A target's two encoded features and its number of tokens; short targets are cached."""
        found = self._targets_seen.get(target)
        if found is None:
            (encoded,) = self._tokenizer.encode([target])
            tokens, text = self._encoders["targets"], self._encoders["targets_pretokenized"]
            packed = tokens.varints(encoded + self._eos["targets"])
            found = packed + text.strings([target.encode()]), count(encoded)
            # Long targets seldom repeat and would fill memory.
            if len(target) <= _SHORT and len(self._targets_seen) < _REMEMBERED_TARGETS:
                self._targets_seen[target] = found
        return found

    def as_text(
        self, rendering: Rendering, inputs: tuple[bytes, int], has_choices: bool, seen: Statistics
    ) -> bytes:
        """The task's example, serialized; `seen` is updated."""
        targets, length = self._targets(rendering.targets)
        seen.add(inputs[1], length)
        entries = [inputs[0], targets]
        if has_choices:
            choices = [choice.encode() for choice in rendering.answer_choices or ()]
            entries.insert(0, self._encoders["answer_choices"].strings(choices))
        return example(entries)

    def as_ranking(
        self, rendering: Rendering, inputs: tuple[bytes, int], ordinal: int, seen: Statistics
    ) -> Iterator[bytes]:
        """Yields the twin's serialized examples, one per choice, with `idx` [ordinal, choice].

        Source: t5.data.preprocessors.rank_classification.
        """
        for index, choice in enumerate(rendering.answer_choices or ()):
            targets, length = self._targets(choice)
            seen.add(inputs[1], length)
            idx = self._encoders["idx"].varints(varint(ordinal) + varint(index))
            correct = self._yes if choice == rendering.targets else self._no
            yield example([idx, inputs[0], correct, targets, self._weight])
