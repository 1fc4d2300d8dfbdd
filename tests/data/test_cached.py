"""Batches made of a cache with numpy: SeqIO's examples, trimming and packing, without SeqIO."""

import collections
import itertools
import json

import numpy as np
import pytest

from t0repro import compat
from t0repro.config.training_plan import SeqioDataConfig
from t0repro.data.cached import CachedBatches
from t0repro.data.seqio_data import renamed, seqio_dataset
from t0repro.errors import UserError

from ..tasks.prompt_caches import make

TASK = "demo_synthetic_glue_mrpc_paraphrase"
OTHER = "demo_synthetic_ag_news_which_section"
# Shorter than the longest examples, so that some are cut.
LENGTHS = {"inputs": 40, "targets": 6}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A task cached in one file and in several, and another task."""
    import t0repro.tasks.demo  # noqa: F401

    folder = tmp_path_factory.mktemp("cache")
    make(folder / "one", TASK, min_shards=1)
    make(folder / "several", TASK, min_shards=4)
    make(folder / "one", OTHER, min_shards=1)
    return folder


def first(batches: CachedBatches, count: int, saved=None) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(batches.open(0, saved, print), count))


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype == np.int32
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("pack", [True, False])
def test_in_the_files_order_the_batches_are_seqios(cache, monkeypatch, pack):
    compat.install()
    import seqio

    monkeypatch.setattr(seqio.TaskRegistry.get(TASK), "_cache_dir", str(cache / "one" / TASK))
    data = SeqioDataConfig(TASK, LENGTHS, "train", 4, False, None, use_cached=True, pack=pack)
    dataset = seqio_dataset(data, seed=None, num_epochs=None)
    theirs = [renamed(batch) for batch in dataset.take(40).as_numpy_iterator()]
    ours = CachedBatches([cache / "one" / TASK], LENGTHS, 4, pack=pack, shuffle=False)
    assert_equal(first(ours, 40), theirs)


def rows_of(batches) -> collections.Counter:
    pairs = (
        (x, y) for batch in batches for x, y in zip(batch["inputs"], batch["targets"], strict=True)
    )
    return collections.Counter((x.tobytes(), y.tobytes()) for x, y in pairs)


def test_an_epoch_of_shuffled_files_has_every_example_once_in_another_order(cache):
    folder = cache / "several" / TASK
    in_order = CachedBatches([folder], LENGTHS, 8, pack=False, shuffle=False)
    examples = json.loads((folder / "stats.train.json").read_text())["examples"]
    count = examples // 8
    assert count * 8 == examples
    shuffled = CachedBatches([folder], LENGTHS, 8, pack=False, seed=3)
    once, again = first(in_order, count), first(shuffled, 2 * count)
    assert rows_of(again[:count]) == rows_of(again[count:]) == rows_of(once)
    orders = [np.concatenate([b["inputs"] for b in part]) for part in
              (once, again[:count], again[count:])]  # fmt: skip
    assert not any((x == y).all() for x, y in itertools.combinations(orders, 2))


def test_tasks_are_drawn_at_their_rates(cache):
    folders = {cache / "one" / TASK: 3, cache / "one" / OTHER: 1}
    alone = CachedBatches([cache / "one" / TASK], LENGTHS, 8, pack=False, shuffle=False)
    its_rows = rows_of(first(alone, 80))
    assert sum(its_rows.values()) == 640  # all of it
    drawn = rows_of(first(CachedBatches(folders, LENGTHS, 400, pack=False, seed=1), 5))
    share = sum(count for row, count in drawn.items() if row in its_rows) / 2000
    # 2,000 draws with probability 0.75: the standard deviation of the share is 0.01.
    assert 0.71 < share < 0.79


@pytest.mark.parametrize("seed", [7, None])
def test_a_resumed_run_goes_on_with_the_same_batches(cache, tmp_path, seed):
    folders = [cache / "several" / TASK]
    source = CachedBatches(folders, LENGTHS, 4, seed=seed)
    batches = source.open(0, None, print)
    list(itertools.islice(batches, 9))
    source.save(tmp_path)
    expected = list(itertools.islice(batches, 5))
    assert_equal(first(CachedBatches(folders, LENGTHS, 4, seed=seed), 5, tmp_path), expected)


def test_another_batch_size_starts_over_and_says_so(cache, tmp_path):
    folders, said = [cache / "several" / TASK], []
    source = CachedBatches(folders, LENGTHS, 4, seed=7)
    first(source, 3)
    source.save(tmp_path)
    changed = CachedBatches(folders, LENGTHS, 2, seed=7)
    begun = list(itertools.islice(changed.open(3, tmp_path, said.append), 3))
    assert said == ["data: from the beginning, since batch_size changed"]
    assert_equal(begun, first(CachedBatches(folders, LENGTHS, 2, seed=7), 3))


def test_a_folder_that_is_no_complete_cache_is_refused(cache, tmp_path):
    with pytest.raises(UserError, match="not a complete cache of split 'train'"):
        CachedBatches([tmp_path], LENGTHS, 4)
    with pytest.raises(UserError, match="info.test.json is missing"):
        CachedBatches([cache / "one" / TASK], LENGTHS, 4, split="test")
