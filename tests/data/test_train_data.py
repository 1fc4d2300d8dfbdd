"""Batches for training from a cache: those of Mesh TensorFlow's function, made in fewer threads."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from t0repro import compat
from t0repro.data.checks import check_shards
from t0repro.data.train_data import TrainBatches
from t0repro.errors import UserError

from ..helpers import tiny_models as tiny
from ..tasks.prompt_caches import make

MIXTURE = "light_steps"
TASKS = ["demo_synthetic_glue_mrpc_paraphrase", "demo_synthetic_ag_news_which_section"]
# Some examples are cut, and most rows hold several.
LENGTHS = {"inputs": 100, "targets": 6}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A cached mixture of two tasks, in several files each."""
    compat.install()
    import seqio

    import t0repro.tasks.demo  # noqa: F401 (registers the tasks)

    folder = tmp_path_factory.mktemp("cache")
    make(folder, *TASKS, min_shards=4)
    seqio.set_global_cache_dirs([str(folder)])
    seqio.MixtureRegistry.add(MIXTURE, [(TASKS[0], 3), (TASKS[1], 1)])
    yield MIXTURE
    seqio.MixtureRegistry.remove(MIXTURE)
    seqio.set_global_cache_dirs([])


def source(**changes):
    config = dataclasses.replace(
        tiny.run_config("unused", 1),
        plan=tiny.mesh_plan(tiny.train_data(MIXTURE, **changes)),
        sequence_length=LENGTHS,
        batch_size=16,
    )
    return TrainBatches(config)


def mesh_dataset(**changes):
    from t5.models import mesh_transformer

    arguments = {"shuffle": True, "seed": 5, "use_cached": True, "pack": True}
    return mesh_transformer.mesh_train_dataset_fn(MIXTURE, LENGTHS, **{**arguments, **changes})


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_a_cached_mixture_are_mesh_tensorflows(mixture, pack, shuffle):
    ours = source(pack=pack, shuffle=shuffle).open(0, None)
    theirs = mesh_dataset(pack=pack, shuffle=shuffle).batch(16).as_numpy_iterator()
    # Several epochs of both tasks.
    for one, other in itertools.islice(zip(ours, theirs, strict=False), 120):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == np.int32
            np.testing.assert_array_equal(one[name], other[name])


def test_a_shard_reads_its_own_files_alone_and_packs_them_as_mesh_tensorflow_does(mixture):
    import seqio
    from mesh_tensorflow.transformer import dataset as transformer_dataset

    ours = list(itertools.islice(source(num_shards=4).open(0, None), 15))
    assert len(ours) == 15
    provider, shards = seqio.get_mixture_or_task(MIXTURE), []
    for index in range(4):
        examples = provider.get_dataset(
            LENGTHS,
            split="train",
            use_cached=True,
            shuffle=True,
            num_epochs=None,
            seed=5,
            shard_info=seqio.ShardInfo(index, 4),
        ).map(lambda example: {name: example[name] for name in LENGTHS})
        rows = transformer_dataset.pack_or_pad(
            examples, LENGTHS, pack=True, feature_keys=tuple(LENGTHS), ensure_eos={"targets"}
        )
        shards.append(rows.batch(4).as_numpy_iterator())
    for batch, parts in zip(ours, zip(*shards, strict=True), strict=False):
        assert batch.keys() == parts[0].keys()
        for name in batch:
            wanted = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(batch[name], wanted)
    # Whoever makes one shard does not notice what is wrong with the others' files.
    (folder,) = map(Path, seqio.get_global_cache_dirs())
    files = [file for file in folder.rglob("*.tfrecord-*") if "-00003-" not in file.name]
    contents = {file: file.read_bytes() for file in files}
    assert len(files) == 2 * 3
    alone = source(num_shards=4)
    alone.make_only([3])
    for file in files:
        file.write_bytes(b"damaged")
    try:
        for batch, wanted in zip(alone.open(0, None), ours, strict=False):
            for name in batch:
                assert not batch[name][:12].any()
                np.testing.assert_array_equal(batch[name][12:], wanted[name][12:])
    finally:
        for file, content in contents.items():
            file.write_bytes(content)


def test_shards_without_examples_are_refused(mixture):
    import seqio

    check_shards(MIXTURE, "train", 4, use_cached=True)  # by files
    check_shards(MIXTURE, "train", 640, use_cached=True)  # by examples: each has 640
    check_shards(MIXTURE, "train", 640, use_cached=False)
    for use_cached in (True, False):
        with pytest.raises(UserError, match=r"Not every one of 641 shards .* 640 examples in \d"):
            check_shards(MIXTURE, "train", 641, use_cached=use_cached)
    (folder,) = map(Path, seqio.get_global_cache_dirs())
    (file,) = folder.joinpath(TASKS[1]).glob("train.tfrecord-00002-*")
    kept = file.read_bytes()
    file.write_bytes(b"")
    try:
        check_shards(MIXTURE, "train", 2, use_cached=True)
        with pytest.raises(UserError, match=f"shards has an example of the task {TASKS[1]}"):
            check_shards(MIXTURE, "train", 4, use_cached=True)
    finally:
        file.write_bytes(kept)


def parallel_maps(dataset) -> int:
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=1
        ).numpy()
    )
    functions = [function.node_def for function in graph.library.function]
    nodes = itertools.chain(graph.node, *functions)
    return sum(node.op.startswith("ParallelMap") for node in nodes)


def test_only_packing_has_threads_of_its_own(mixture):
    assert parallel_maps(mesh_dataset()) > 10
    assert parallel_maps(source().dataset(5)) == 1


def test_a_pipeline_whose_state_is_saved_stays_as_it_was(mixture):
    saved = source(checkpoint_input_pipeline=True).dataset(5)
    assert parallel_maps(saved) == parallel_maps(mesh_dataset())


def test_outside_a_training_datasets_are_built_as_ever(mixture):
    before = parallel_maps(mesh_dataset())
    source().dataset(5)
    assert parallel_maps(mesh_dataset()) == before
