"""Data that are not on this machine are named before a run builds or writes anything."""

import dataclasses

import pytest

from t0repro import compat
from t0repro.config.training_plan import SeqioDataConfig
from t0repro.data.checks import check_readable, tasks_to_train_on, tasks_with_split
from t0repro.data.train_data import TrainBatches
from t0repro.errors import UserError
from t0repro.tasks.task import not_at_hand

from .. import tiny_models as tiny


@pytest.mark.parametrize("use_cached", [True, False])
def test_a_task_without_its_data_is_named_with_where_to_put_them(use_cached):
    """As a task of TensorFlow Datasets is on a machine that has not prepared them."""
    compat.install()
    import seqio

    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=[])
    task = seqio.TaskRegistry.add("not_here", source, output_features={})
    try:
        with pytest.raises(UserError) as refused:
            check_readable(task.name, "train", use_cached=use_cached)
    finally:
        seqio.TaskRegistry.remove(task.name)
    assert "The data of the task not_here" in str(refused.value)
    assert "tfds_data_dir" in str(refused.value)


@pytest.fixture
def of_tfds(tmp_path):
    """A task of TensorFlow Datasets with one split."""
    compat.install()
    import seqio
    import tensorflow as tf
    import tensorflow_datasets as tfds

    tfds.dataset_builders.TfDataBuilder(
        name="few",
        version="1.0.0",
        data_dir=tmp_path,
        split_datasets={"train": tf.data.Dataset.from_tensor_slices({"inputs": ["a", "b"]})},
        features=tfds.features.FeaturesDict({"inputs": tfds.features.Text()}),
        description="",
    ).download_and_prepare()
    source = seqio.TfdsDataSource(tfds_name="few:1.0.0", tfds_data_dir=str(tmp_path))
    yield seqio.TaskRegistry.add("few_of_tfds", source, output_features={})
    seqio.TaskRegistry.remove("few_of_tfds")


# TFDS reads the description of a dataset by what this protobuf calls deprecated.
@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
def test_a_task_of_tfds_is_trained_on_by_parts_of_its_splits(of_tfds):
    def found(split, **changes):
        data = SeqioDataConfig(of_tfds.name, {}, split, 1, False, 1)
        return tasks_to_train_on(dataclasses.replace(data, **changes))

    for split in ("train", "train[:50%]", "train[:1]+train[1:]"):
        assert found(split) == [of_tfds]
    # A cache has files for whole splits.
    assert found("trian[:50%]") == found("train[:50%]", use_cached=True) == []


@pytest.fixture
def without_placeholder():
    """A task that SeqIO cannot cache; its rows come from Python."""
    compat.install()
    import seqio
    import tensorflow as tf

    signature = dict.fromkeys(("inputs", "targets"), tf.TensorSpec((None,), tf.int32))
    feature = seqio.Feature(seqio.PassThroughVocabulary(9), add_eos=False, dtype=tf.int32)

    def rows(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_generator(
            lambda: ({"inputs": [2, 3], "targets": [4]} for _ in range(3)),
            output_signature=signature,
        )

    yield seqio.TaskRegistry.add(
        "without_placeholder",
        seqio.FunctionDataSource(rows, splits=["train"]),
        output_features={"inputs": feature, "targets": feature},
        preprocessors=[],
    ).name
    seqio.TaskRegistry.remove("without_placeholder")


def batches_of(task, **changes):
    config = dataclasses.replace(
        tiny.run_config("unused", 1),
        plan=tiny.mesh_plan(tiny.train_data(task, pack=False, shuffle=False, **changes)),
        sequence_length={"inputs": 4, "targets": 4},
        batch_size=3,
    )
    return TrainBatches(config).open(0, None)


def test_a_task_that_seqio_cannot_cache_is_read_without(without_placeholder):
    check_readable(without_placeholder, "train", use_cached=True)
    assert (
        not_at_hand(tasks_with_split(without_placeholder, "train"), "train", use_cached=True) == {}
    )
    assert next(batches_of(without_placeholder))["inputs"].tolist() == [[2, 3, 0, 0]] * 3


def test_the_state_of_its_python_functions_is_not_saved(without_placeholder):
    with pytest.raises(UserError, match="cannot be saved: it runs Python functions"):
        batches_of(without_placeholder, checkpoint_input_pipeline=True)


def test_a_task_that_needs_a_cache_is_refused_without():
    compat.install()
    import seqio

    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, ["train"])
    placeholder = seqio.CacheDatasetPlaceholder(required=True)
    task = seqio.TaskRegistry.add(
        "needs_a_cache", source, output_features={}, preprocessors=[placeholder]
    )
    try:
        with pytest.raises(UserError, match="needs_a_cache can only be read from a cache"):
            check_readable(task.name, "train", use_cached=False)
    finally:
        seqio.TaskRegistry.remove(task.name)
