"""Streams cached records of a bucket into SeqIO.

TensorFlow itself reads only Google's buckets. SeqIO reads a cached split by
tf.data.TFRecordDataset, one file after another or in turns. A shard that only a bucket holds is
read by `read_records` in its place: the same records in the same order, so all that SeqIO does with
them stays.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro.storage import address_of
from t0repro.tasks.prompt_cache.records import read_records

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
            if address_of(Path(cache_dir)) is None:
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
