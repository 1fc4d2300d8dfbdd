"""Caches in buckets are read there, part by part: the same examples as on a disk, in one order."""

import itertools
import json

import numpy as np
import pytest

from t0repro import compat, storage
from t0repro.config.data import SeqioDataConfig
from t0repro.data.cached import CachedBatches
from t0repro.data.train_data import runs_python, seqio_dataset
from t0repro.errors import UserError
from t0repro.storage import buckets, input_path
from t0repro.tasks.prompt_cache.provenance import check_caches, damage
from t0repro.tasks.prompt_cache.records import read_records

from .prompt_caches import make

TASK = "demo_synthetic_glue_mrpc_paraphrase"
LENGTHS = {"inputs": 40, "targets": 6}
SHARDS = 20  # more than are read in turn


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    import t0repro.tasks.demo  # noqa: F401

    folder = tmp_path_factory.mktemp("cache")
    make(folder, TASK, min_shards=SHARDS)
    return folder / TASK


@pytest.fixture
def there(bucket, local, monkeypatch):
    """The cache of the task in a bucket; its objects are read in small parts."""
    monkeypatch.setattr(buckets, "_AHEAD_BYTES", 2500)
    storage.put_tree(local, f"{bucket}/{TASK}")
    return f"{bucket}/{TASK}"


in_each_store = pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)


def batches(folder, **settings):
    return CachedBatches([folder], LENGTHS, 4, seed=3, **settings)


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def first(batches, count, saved=None):
    return list(itertools.islice(batches.open(0, saved), count))


@in_each_store
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_a_bucket_are_those_of_a_disk_and_resume_exactly(
    there, local, tmp_path, shuffle
):
    on_disk = first(batches(local, shuffle=shuffle), 40)
    reading = batches(there, shuffle=shuffle)
    assert_equal(first(reading, 40), on_disk)
    stopped = batches(there, shuffle=shuffle)
    first(stopped, 15)
    stopped.save(tmp_path)
    storage.close_copies()  # another process has a copy elsewhere
    assert_equal(first(batches(there, shuffle=shuffle), 25, tmp_path), on_disk[15:])


@in_each_store
def test_seqio_reads_of_a_bucket_what_it_reads_of_a_disk(there, local, monkeypatch):
    compat.install()
    import seqio

    from t0repro.tasks.registry import add_cache_dirs

    add_cache_dirs([there.rpartition("/")[0]])
    data = SeqioDataConfig(TASK, LENGTHS, "train", 4, True, None, use_cached=True, pack=True)
    task, found = seqio.TaskRegistry.get(TASK), {}
    for folder in (local, input_path(there)):
        monkeypatch.setattr(task, "_cache_dir", str(folder))
        check_caches([task], "train")
        dataset = seqio_dataset(data, seed=5, num_epochs=1)
        found[folder] = [
            {name: tensor.numpy() for name, tensor in element.items()} for element in dataset
        ]
        # A generator's place cannot be saved: such a run rebuilds its batches and skips them.
        assert runs_python(dataset) == (folder != local)
    assert_equal(*found.values())
    assert len(found[local]) > 10


@in_each_store
def test_a_copy_of_a_cache_takes_no_space_and_fetches_no_more_than_is_read(
    there, monkeypatch, request
):
    fetched = []
    really = buckets.read

    def read(address, start, end):
        fetched.append(end - start)
        return really(address, start, end)

    monkeypatch.setattr(buckets, "read", read)
    shards = sorted(input_path(there).glob("train.tfrecord-*"))
    assert len(shards) == SHARDS and not any(shard.stat().st_blocks for shard in shards)
    assert damage(input_path(there), "train") is None and not fetched
    size = shards[0].stat().st_size
    next(records := read_records(shards[0]))
    assert 0 < sum(fetched) <= 7500 < size
    list(records)
    assert sum(fetched) == size  # each byte once


@in_each_store
def test_damage_in_a_bucket_is_found_as_on_a_disk(there, local):
    name = "train.tfrecord-00003-of-00020"
    content = bytearray((local / name).read_bytes())
    content[len(content) // 2] ^= 1
    buckets.write(f"{there}/{name}", bytes(content))
    with pytest.raises(UserError, match="A record is cut or its checksum is wrong") as error:
        first(batches(there), 200)
    assert f"{there}/{name}, byte " in str(error.value)
    storage.close_copies()
    buckets.write(f"{there}/{name}", bytes(content[:-1]))
    assert damage(input_path(there), "train") == (
        f"{name} has {len(content) - 1:,} of {len(content):,} bytes"
    )
    storage.close_copies()
    buckets.remove(f"{there}/{name}")
    assert f"1 of {SHARDS} shards are missing" in damage(input_path(there), "train")


@in_each_store
def test_of_seqios_own_cache_records_are_not_counted_in_a_bucket(there):
    buckets.remove(f"{there}/provenance.json")
    stats = json.loads(buckets.read(f"{there}/stats.train.json"))
    buckets.write(f"{there}/stats.train.json", json.dumps({**stats, "examples": 1}).encode())
    assert damage(input_path(there), "train") is None
