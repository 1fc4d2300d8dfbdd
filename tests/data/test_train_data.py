"""Batches for training from a cache: those of Mesh TensorFlow's function, made in fewer threads."""

import dataclasses
import itertools

import numpy as np
import pytest

from t0repro import compat
from t0repro.data.train_data import TrainBatches

from .. import tiny_models as tiny
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
        train_data=tiny.train_data(MIXTURE, **changes),
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
    ours = source(pack=pack, shuffle=shuffle).open(0, None, print)
    theirs = mesh_dataset(pack=pack, shuffle=shuffle).batch(16).as_numpy_iterator()
    # Several epochs of both tasks.
    for one, other in itertools.islice(zip(ours, theirs, strict=False), 120):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == np.int32
            np.testing.assert_array_equal(one[name], other[name])


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
    assert parallel_maps(source()._dataset(5)) == 1


def test_a_pipeline_whose_state_is_saved_stays_as_it_was(mixture):
    saved = source(checkpoint_input_pipeline=True)._dataset(5)
    assert parallel_maps(saved) == parallel_maps(mesh_dataset())


def test_outside_a_training_datasets_are_built_as_ever(mixture):
    before = parallel_maps(mesh_dataset())
    source()._dataset(5)
    assert parallel_maps(mesh_dataset()) == before
