"""Batches made of a cache with numpy: SeqIO's own, order included, without SeqIO."""

import collections
import contextlib
import itertools
import json
import shutil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from t0repro import compat
from t0repro.config.data import SeqioDataConfig
from t0repro.data import cached
from t0repro.data.cached import CachedBatches
from t0repro.data.train_data import EvalBatches, rename_seqio_features, seqio_dataset
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.tasks.prompt_cache.folders import shard_names

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
    return list(itertools.islice(batches.open(0, saved), count))


def in_order(folder, lengths, pack, count) -> list[dict[str, np.ndarray]]:
    """The first batches of four rows, in the order of the folder's file."""
    return first(CachedBatches([folder], lengths, 4, pack=pack, shuffle=False), count)


@contextlib.contextmanager
def task_cached_in(folder):
    """The task for SeqIO, with this folder as its cache."""
    compat.install()
    import seqio

    import t0repro.tasks.demo  # noqa: F401

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(seqio.TaskRegistry.get(TASK), "_cache_dir", str(folder))
        yield


def seqios(folder, lengths, pack, count) -> list[dict[str, np.ndarray]]:
    """Those that SeqIO makes of the same folder."""
    data = SeqioDataConfig(TASK, lengths, "train", 4, False, None, use_cached=True, pack=pack)
    with task_cached_in(folder):
        dataset = seqio_dataset(data, seed=None, num_epochs=None)
        return [rename_seqio_features(batch) for batch in dataset.take(count).as_numpy_iterator()]


def mesh_tensorflows(folder, lengths, pack, count) -> list[dict[str, np.ndarray]]:
    """Those that Mesh TensorFlow's function makes of the same folder."""
    with task_cached_in(folder):
        from t5.models import mesh_transformer

        dataset = mesh_transformer.mesh_train_dataset_fn(
            TASK, lengths, shuffle=False, use_cached=True, pack=pack
        )
        return list(dataset.batch(4).take(count).as_numpy_iterator())


def write_records(folder, *files) -> None:
    """A cache of these files, each a list of tf.train.Examples."""
    import tensorflow as tf

    shape = {"dtype": "int32", "shape": [None]}
    info = {"num_shards": len(files), "features": dict.fromkeys(("inputs", "targets"), shape)}
    folder.mkdir(exist_ok=True)
    (folder / "info.train.json").write_text(json.dumps(info))
    (folder / "stats.train.json").write_text(json.dumps({"examples": sum(map(len, files))}))
    for examples, name in zip(files, shard_names("train", len(files)), strict=True):
        with tf.io.TFRecordWriter(str(folder / name)) as file:
            for each in examples:
                file.write(each.SerializeToString())
    (folder / "COMPLETED").touch()


def write_cache(folder, *files) -> None:
    """A cache of these files, each a list of its examples' numbers of tokens in inputs, targets."""
    import tensorflow as tf

    tokens = itertools.cycle(range(2, 1000))

    def of_sizes(pair) -> tf.train.Example:
        feature = {
            name: tf.train.Feature(
                int64_list=tf.train.Int64List(value=itertools.islice(tokens, size))
            )
            for name, size in zip(("inputs", "targets"), pair, strict=True)
        }
        return tf.train.Example(features=tf.train.Features(feature=feature))

    write_records(folder, *([of_sizes(pair) for pair in sizes] for sizes in files))


@pytest.mark.parametrize(
    "held", [{"dtype": "string", "shape": []}, {"dtype": "int32", "shape": [None, 3]}]
)
def test_a_cache_without_tokens_is_refused_and_not_trained_on_as_padding(tmp_path, held):
    write_cache(tmp_path, [(3, 2)] * 4)
    info = json.loads((tmp_path / "info.train.json").read_text())
    info["features"] = {name: held for name in ("inputs", "targets")}
    (tmp_path / "info.train.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="The cached inputs are not tokens: ") as caught:
        CachedBatches([tmp_path], {"inputs": 8, "targets": 8}, 2)
    assert caught.value.where == str(tmp_path / "info.train.json")


@pytest.mark.parametrize("targets", ["missing", "texts", "floats", "long"])
def test_an_example_without_tokens_is_refused_and_not_trained_on_as_padding(tmp_path, targets):
    import tensorflow as tf

    held = {
        "texts": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"yes"])),
        "floats": tf.train.Feature(float_list=tf.train.FloatList(value=[5.0])),
        "long": tf.train.Feature(int64_list=tf.train.Int64List(value=[2**40])),
    }
    tokens = {"inputs": tf.train.Feature(int64_list=tf.train.Int64List(value=[5, 1]))}
    if targets in held:
        tokens["targets"] = held[targets]
    write_records(tmp_path, [tf.train.Example(features=tf.train.Features(feature=tokens))] * 2)
    with pytest.raises(UserError, match="does not have inputs and targets as integers") as caught:
        next(CachedBatches([tmp_path], {"inputs": 8, "targets": 8}, 2).open(0, None))
    assert caught.value.where == str(tmp_path)


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype == np.int32
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("pack", [True, False])
# Inputs that are cut; rows of several examples, of which SeqIO packs 200 at a time.
@pytest.mark.parametrize("sizes", [(40, 6), (200, 100)])
def test_in_the_files_order_the_batches_are_seqios(cache, sizes, pack):
    folder, lengths = cache / "one" / TASK, dict(zip(("inputs", "targets"), sizes, strict=True))
    theirs = seqios(folder, lengths, pack, 200)
    assert_equal(in_order(folder, lengths, pack, 200), theirs)


@given(
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=20),
)
@example((8, 8), [(0, 2), (3, 0), (2, 1), (0, 0), (1, 1)])
@settings(max_examples=10)
def test_examples_of_any_lengths_make_seqios_rows(tmp_path_factory, lengths, sizes):
    folder = tmp_path_factory.mktemp("sizes")
    write_cache(folder, sizes)
    named = dict(zip(("inputs", "targets"), lengths, strict=True))
    assert_equal(in_order(folder, named, True, 10), seqios(folder, named, True, 10))


@given(
    # Files that end within a turn, with it, or hold nothing; more of them than are read in turn.
    st.lists(st.sampled_from([0, 1, 15, 16, 17, 32, 40]), min_size=1, max_size=40).filter(any),
)
@example([40] * 16)
@example([16, 0, 40] * 13)
@settings(max_examples=10)
def test_unshuffled_files_are_read_by_turns_as_seqio_reads_them(tmp_path_factory, counts):
    folder = tmp_path_factory.mktemp("files")
    write_cache(folder, *([(3, 1)] * count for count in counts))
    lengths, batches = {"inputs": 3, "targets": 1}, 2 * sum(counts) // 4 + 1
    assert_equal(in_order(folder, lengths, False, batches), seqios(folder, lengths, False, batches))


def test_shuffled_examples_come_from_sixteen_files_at_a_time(tmp_path):
    # An example's number of targets is that of its file.
    write_cache(tmp_path, *([(1, file)] * 500 for file in range(1, 21)))
    lengths = {"inputs": 1, "targets": 20}
    (batch,) = first(CachedBatches([tmp_path], lengths, 200, pack=False, seed=1), 1)
    assert len(collections.Counter((batch["targets"] != 0).sum(axis=1))) == 16


@contextlib.contextmanager
def mixture_cached_in(folders, rates):
    """The name of a mixture of the two tasks for SeqIO, with these folders as their caches."""
    compat.install()
    import seqio

    import t0repro.tasks.demo  # noqa: F401

    name, names = "cached_by_numpy", (TASK, OTHER)
    with pytest.MonkeyPatch.context() as patched:
        for task, folder in zip(names, folders, strict=True):
            patched.setattr(seqio.TaskRegistry.get(task), "_cache_dir", str(folder))
        seqio.MixtureRegistry.add(name, list(zip(names, rates, strict=True)))
        try:
            yield name
        finally:
            seqio.MixtureRegistry.remove(name)


@pytest.mark.parametrize("pack", [True, False])
# Files that are shuffled once, since their examples are held in memory, or for every epoch.
@pytest.mark.parametrize("held", [10_000, 0])
@given(
    counts=st.tuples(*[st.lists(st.integers(1, 40), min_size=1, max_size=20)] * 2),
    rates=st.tuples(*[st.floats(0.125, 1e6)] * 2) | st.just((0.0, 1.0)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=3)
def test_with_a_seed_shuffled_and_mixed_batches_are_seqios(
    tmp_path_factory, pack, held, counts, rates, seed
):
    from seqio import dataset_providers

    folders = [tmp_path_factory.mktemp("cache") / task for task in (TASK, OTHER)]
    sizes = itertools.cycle([(3, 1), (1, 2), (9, 5), (4, 4)])
    for folder, files in zip(folders, counts, strict=True):
        write_cache(folder, *([*itertools.islice(sizes, count)] for count in files))
    lengths, batches = {"inputs": 8, "targets": 4}, 150
    with pytest.MonkeyPatch.context() as patched, mixture_cached_in(folders, rates) as name:
        patched.setattr(dataset_providers, "_MAX_EXAMPLES_TO_MEM_CACHE", held)
        patched.setattr(cached, "KEPT_IN_MEMORY", held)
        data = SeqioDataConfig(name, lengths, "train", 4, True, None, use_cached=True, pack=pack)
        dataset = seqio_dataset(data, seed=seed, num_epochs=None).take(batches)
        theirs = [rename_seqio_features(batch) for batch in dataset.as_numpy_iterator()]
        given_rates = dict(zip(folders, rates, strict=True))
        ours = first(CachedBatches(given_rates, lengths, 4, pack=pack, seed=seed), batches)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("pack", [True, False])
# So few examples in the second case that packing leaves too few rows, and all is read again.
@pytest.mark.parametrize("counts", [([40, 3], [30]), ([1], [2])])
@pytest.mark.parametrize("rates", [(1.0, 3.0), (1.0, 0.0)])
def test_the_batches_of_an_evaluation_are_seqios(tmp_path, pack, counts, rates):
    folders = [tmp_path / task for task in (TASK, OTHER)]
    sizes = itertools.cycle([(3, 1), (1, 2), (9, 5), (4, 4)])
    for folder, files in zip(folders, counts, strict=True):
        write_cache(folder, *([*itertools.islice(sizes, count)] for count in files))
    lengths, steps = {"inputs": 16, "targets": 12}, 5
    with mixture_cached_in(folders, rates) as name:
        data = SeqioDataConfig(name, lengths, "train", 4, False, 42, use_cached=True, pack=pack)
        theirs = list(EvalBatches(data, steps))
    given_rates = dict(zip(folders, rates, strict=True))
    ours = CachedBatches(given_rates, lengths, 4, pack=pack, shuffle=False, seed=42).first(steps)
    assert_equal(list(ours), theirs)


def test_a_run_whose_order_an_older_version_drew_starts_its_data_over(cache, tmp_path):
    source, said = CachedBatches([cache / "several" / TASK], LENGTHS, 4, seed=7), []
    first(source, 1)
    source.save(tmp_path)
    position = json.loads((tmp_path / "position.json").read_text())
    del position["arguments"]["order"]
    (tmp_path / "position.json").write_text(json.dumps(position))
    with heard_by(said.append):
        source.open(1, tmp_path)
    assert said == ["data: from the beginning, since order changed"]


@pytest.mark.parametrize("pack", [True, False])
def test_the_batches_are_mesh_tensorflows_but_for_its_eos_where_targets_are_cut(tmp_path, pack):
    generator = np.random.default_rng(0)
    # Mostly a third of a row, some that fill it exactly, some longer.
    write_cache(tmp_path, generator.geometric([0.15, 0.3], size=(100, 2)).tolist())
    lengths = {"inputs": 20, "targets": 8}
    ours = in_order(tmp_path, lengths, pack, 40)
    assert any((batch["targets"][:, -1] > 1).any() for batch in ours)
    for batch in ours:
        batch["targets"][:, -1] = np.minimum(batch["targets"][:, -1], 1)
    assert_equal(ours, mesh_tensorflows(tmp_path, lengths, pack, 40))


def rows_of(batches) -> collections.Counter:
    pairs = (
        (x, y) for batch in batches for x, y in zip(batch["inputs"], batch["targets"], strict=True)
    )
    return collections.Counter((x.tobytes(), y.tobytes()) for x, y in pairs)


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
    # Rows of several examples, of which 200 are packed at a time: saved in the middle of these.
    lengths = {"inputs": 200, "targets": 100}
    source = CachedBatches(folders, lengths, 4, seed=seed)
    batches = source.open(0, None)
    list(itertools.islice(batches, 9))
    source.save(tmp_path)
    expected = list(itertools.islice(batches, 20))
    assert_equal(first(CachedBatches(folders, lengths, 4, seed=seed), 20, tmp_path), expected)


def test_another_batch_size_starts_over_and_says_so(cache, tmp_path):
    folders, said = [cache / "several" / TASK], []
    source = CachedBatches(folders, LENGTHS, 4, seed=7)
    first(source, 3)
    source.save(tmp_path)
    changed = CachedBatches(folders, LENGTHS, 2, seed=7)
    with heard_by(said.append):
        begun = list(itertools.islice(changed.open(3, tmp_path), 3))
    assert said == ["data: from the beginning, since batch_size changed"]
    assert_equal(begun, first(CachedBatches(folders, LENGTHS, 2, seed=7), 3))


def test_a_folder_that_is_no_complete_cache_is_refused(cache, tmp_path):
    with pytest.raises(UserError, match="not a complete cache of split 'train'"):
        CachedBatches([tmp_path], LENGTHS, 4)
    with pytest.raises(UserError, match="info.test.json is missing"):
        CachedBatches([cache / "one" / TASK], LENGTHS, 4, split="test")


def test_examples_that_no_statistics_count_are_counted(cache, tmp_path):
    for name in ("counted", "uncounted"):
        shutil.copytree(cache / "one" / TASK, tmp_path / name / TASK)
    file = tmp_path / "uncounted" / TASK / "stats.train.json"
    statistics = json.loads(file.read_text())
    del statistics["examples"]
    file.write_text(json.dumps(statistics))
    counted, uncounted = (
        first(CachedBatches([tmp_path / name / TASK], LENGTHS, 4, seed=7), 3)
        for name in ("counted", "uncounted")
    )
    assert_equal(counted, uncounted)


def of_a_task_in_t5s_form() -> list:
    """What SeqIO caches of a task that adds EOS after its cache, as t5's own do."""
    compat.install()
    import seqio
    import tensorflow as tf

    def rows(split, shuffle_files, seed=None):
        texts = {"inputs": ["a fine day", "no"], "targets": ["yes", "so it is"]}
        return tf.data.Dataset.from_tensor_slices(texts)

    feature = seqio.Feature(seqio.ByteVocabulary(extra_ids=0), add_eos=True, dtype=tf.int32)
    task = seqio.Task(
        "eos_after_cache",
        seqio.FunctionDataSource(rows, splits=["train"]),
        output_features={"inputs": feature, "targets": feature},
        preprocessors=[
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos,
        ],
    )
    cached = task.preprocess_precache(task.source.get_dataset("train", shuffle=False))
    return [seqio.utils.dict_to_tfexample(each) for each in cached.as_numpy_iterator()]


def test_targets_that_get_their_eos_after_the_cache_are_warned_of(cache, tmp_path):
    write_records(tmp_path / "t5_task", of_a_task_in_t5s_form())
    said = []
    source = CachedBatches([tmp_path / "t5_task", cache / "one" / TASK], LENGTHS, 4)
    with heard_by(said.append):
        source.open(0, None)
    (line,) = said
    assert "the targets of 1 cached task do not end in EOS (1), t5_task first" in line


@pytest.mark.parametrize(
    ("rate", "options", "message"),
    [
        (0.0, {}, "rates are .0.0."),
        (-1.0, {}, "rates are"),
        (float("nan"), {}, "rates are .nan."),
        (float("inf"), {}, "rates are .inf."),
        (1.0, {"batch_size": 0}, "cannot have 0 rows"),
        (1.0, {"sequence_length": {"inputs": 8}}, "lengths lack targets"),
    ],
)
def test_what_cannot_make_batches_is_told_at_once(cache, rate, options, message):
    options = {"sequence_length": LENGTHS, "batch_size": 4} | options
    with pytest.raises(UserError, match=message):
        CachedBatches({cache / "one" / TASK: rate}, **options)
