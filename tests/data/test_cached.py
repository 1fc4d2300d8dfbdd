"""Batches made of a cache with numpy: SeqIO's examples, trimming and packing, without SeqIO."""

import collections
import itertools

import numpy as np
import pytest

from t0repro import compat
from t0repro.config.training_plan import DatasetConfig
from t0repro.data.cached import CachedBatches
from t0repro.data.seqio_data import renamed, seqio_dataset
from t0repro.errors import UserError

from ..tasks.prompt_caches import make

TASK = "demo_synthetic_glue_mrpc_paraphrase"
# Shorter than the longest examples, so that some are cut.
LENGTHS = {"inputs": 40, "targets": 6}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A task cached in one file, and in several."""
    import t0repro.tasks.demo  # noqa: F401

    folder = tmp_path_factory.mktemp("cache")
    make(folder / "one", TASK, min_shards=1)
    make(folder / "several", TASK, min_shards=4)
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
    data = DatasetConfig(TASK, LENGTHS, "train", 4, False, None, use_cached=True, pack=pack)
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
    examples = in_order._rates[str(folder)]
    count = int(examples) // 8
    assert count * 8 == examples
    shuffled = CachedBatches([folder], LENGTHS, 8, pack=False, seed=3)
    once, again = first(in_order, count), first(shuffled, 2 * count)
    assert rows_of(again[:count]) == rows_of(again[count:]) == rows_of(once)
    orders = [np.concatenate([b["inputs"] for b in part]) for part in
              (once, again[:count], again[count:])]  # fmt: skip
    assert not any((x == y).all() for x, y in itertools.combinations(orders, 2))


def test_tasks_are_drawn_at_their_rates(cache):
    folders = {cache / "one" / TASK: 3, cache / "several" / TASK: 1}
    source = CachedBatches(folders, LENGTHS, 400, pack=False, seed=1)
    drawn = []
    original = source._examples
    source._examples = lambda folder, generator: (  # which task each example came from
        drawn.append(folder.parent.name) or each for each in original(folder, generator)
    )
    first(source, 5)
    share = drawn.count("one") / len(drawn)
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
    # Another batch size starts over.
    changed = CachedBatches(folders, LENGTHS, 2, seed=seed)
    assert_equal(
        first(changed, 3, tmp_path),
        first(CachedBatches(folders, LENGTHS, 2, seed=changed._seed), 3),
    )


def test_a_folder_that_is_no_complete_cache_is_refused(cache, tmp_path):
    with pytest.raises(UserError, match="not a complete cache of split 'train'"):
        CachedBatches([tmp_path], LENGTHS, 4)
    with pytest.raises(UserError, match="info.test.json is missing"):
        CachedBatches([cache / "one" / TASK], LENGTHS, 4, split="test")
