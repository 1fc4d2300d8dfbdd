"""Data that are not on this machine are named before a run builds or writes anything."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import seqio

from t0repro import compat
from t0repro.config import data as records
from t0repro.config.data import SeqioDataConfig
from t0repro.data.checks import (
    check_data,
    check_features,
    check_readable,
    check_tokens,
    tasks_to_train_on,
    tasks_with_split,
)
from t0repro.data.train_data import TrainBatches
from t0repro.data.vocabulary_checks import check_rows, check_vocabularies
from t0repro.errors import UserError
from t0repro.runs import preflight
from t0repro.tasks.availability import missing_tasks
from t0repro.tasks.demo.datasets import VOCABULARY
from t0repro.tasks.registration import add_prompted_task
from t0repro.tasks.vocabulary import DEFAULT_ADDRESS
from tests.tasks.vocabularies import write_vocabulary

from ..helpers import tiny_models as tiny


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
        missing_tasks(tasks_with_split(without_placeholder, "train"), "train", use_cached=True)
        == {}
    )
    assert next(batches_of(without_placeholder))["inputs"].tolist() == [[2, 3, 0, 0]] * 3


@pytest.fixture
def without_seed():
    """A task whose dataset function is as t5's own pages wrote them before SeqIO had seeds."""
    compat.install()
    import seqio
    import tensorflow as tf

    def rows(split, shuffle_files=False):
        tokens = [[number] for number in range(2, 8)]
        return tf.data.Dataset.from_tensor_slices({"inputs": tokens, "targets": tokens})

    feature = seqio.Feature(seqio.PassThroughVocabulary(9), add_eos=False, dtype=tf.int32)
    yield seqio.TaskRegistry.add(
        "without_seed",
        seqio.FunctionDataSource(rows, splits=["train"]),
        output_features={"inputs": feature, "targets": feature},
        preprocessors=[],
    )
    seqio.TaskRegistry.remove("without_seed")


def test_a_dataset_function_without_a_seed_is_read_unless_one_is_bound(without_seed):
    """Mesh TensorFlow gives it none unless one is bound; SeqIO refuses to give it one."""
    name, lengths = without_seed.name, {"inputs": 4, "targets": 4}
    inputs = SimpleNamespace(
        mode="train",
        mixture_or_task_name=name,
        split="train",
        use_cached=False,
        sequence_length=lengths,
    )
    check_data(inputs)
    batches = batches_of(name, seed=None)
    read = np.concatenate([next(batches)["inputs"][:, 0] for _ in range(2)])
    assert sorted(read) == [*range(2, 8)]
    data = SeqioDataConfig(name, lengths, "train", 1, False, None)
    model = SimpleNamespace(decoder_only=False)
    checks = [
        lambda: check_data(inputs, seed=1),
        lambda: list(preflight._data(data, model, (None, None), "train")),
    ]
    for check in checks:
        with pytest.raises(UserError, match="The task without_seed cannot be read") as refused:
            check()
        assert "seed=None" in refused.value.fix


def test_a_rate_that_cannot_be_computed_is_refused_before_anything_starts(without_seed):
    by_examples = seqio.mixing_rate_num_examples
    seqio.MixtureRegistry.add("of_unknown_rates", [without_seed.name], default_rate=by_examples)
    inputs = SimpleNamespace(
        mode="train",
        mixture_or_task_name="of_unknown_rates",
        split="train",
        use_cached=False,
        sequence_length={"inputs": 4, "targets": 4},
    )
    try:
        with pytest.raises(UserError, match="rate of the task without_seed in of_unknown") as error:
            check_data(inputs)
    finally:
        seqio.MixtureRegistry.remove("of_unknown_rates")
    assert "num_input_examples" in error.value.fix


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


@pytest.fixture
def with_vocabulary(tmp_path, monkeypatch):
    """Registers a task whose vocabulary is the one that T0REPRO_VOCAB names."""
    (tmp_path / "super_glue" / "rte").mkdir(parents=True)
    (tmp_path / "super_glue" / "rte" / "train.jsonl").write_text("")
    monkeypatch.setattr("t0repro.tasks.registry._tasks", {})
    monkeypatch.setattr(seqio.TaskRegistry, "_REGISTRY", {})

    def register(address: object) -> str:
        monkeypatch.setenv("T0REPRO_VOCAB", str(address))
        return add_prompted_task("super_glue", "rte", "GPT-3 style", ("train",), root=tmp_path).name

    return register


def test_the_tasks_of_bytes_are_byt5s(with_vocabulary):
    name = with_vocabulary("bytes")
    of_bytes = records.ByteVocabulary()
    check_vocabularies(name, of_bytes, of_bytes)
    check_rows(259, of_bytes)
    with pytest.raises(UserError) as error:
        check_rows(200, of_bytes, decoder_only=True)
    assert error.value.where == "network.TransformerConfig.vocab_size"
    # T5's model is not one of bytes, though T0REPRO_VOCAB stands in for its file otherwise.
    of_t5 = records.SentencePieceVocabulary(sentencepiece_model_file=DEFAULT_ADDRESS)
    with pytest.raises(UserError, match="another vocabulary than the model's") as error:
        check_vocabularies(name, of_t5, of_t5)
    assert f"T0REPRO_VOCAB={DEFAULT_ADDRESS}" in error.value.fix


@pytest.mark.parametrize(
    ("address", "extra_ids", "form"),
    [("mc4.250000.100extra", 0, {"pieces": 250_100, "inside": 100}),
     ("umt5.256000", 300, {"pieces": 256_000})],
)  # fmt: skip
def test_a_copy_of_a_released_vocabulary_is_that_of_t5xs_file(
    with_vocabulary, tmp_path, address, extra_ids, form
):
    """Of mT5's, which holds its sentinels, and of umT5's, which T5X gives 300."""
    name = with_vocabulary(write_vocabulary(tmp_path / "copy.model", **form))
    record = records.SentencePieceVocabulary(
        sentencepiece_model_file=f"gs://t5-data/vocabs/{address}/sentencepiece.model",
        extra_ids=extra_ids,
    )
    check_vocabularies(name, record, record)
    check_rows(256_384, record)


def test_a_model_of_bytes_says_how_the_tasks_become_bytes(with_vocabulary):
    with pytest.raises(UserError) as error:
        of_bytes = records.ByteVocabulary()
        check_vocabularies(with_vocabulary(VOCABULARY), of_bytes, of_bytes)
    assert "T0REPRO_VOCAB=bytes" in error.value.fix


def test_seqios_own_vocabulary_is_checked_too(tmp_path):
    path = write_vocabulary(tmp_path / "own.model", unk=0, bos=1, eos=2)
    vocabulary = seqio.SentencePieceVocabulary(str(path), 100)
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, ["train"])
    feature = seqio.Feature(vocabulary)
    seqio.TaskRegistry.add(
        "default_ids",
        source,
        preprocessors=[],
        output_features={"inputs": feature, "targets": feature},
    )
    record = records.SentencePieceVocabulary(sentencepiece_model_file=str(path), extra_ids=100)
    with pytest.raises(UserError, match="gives unknown characters padding's id, 0"):
        check_vocabularies("default_ids", record, record)
    seqio.TaskRegistry.remove("default_ids")


@pytest.fixture
def without_inputs():
    """A task whose preprocessors give `source` where it is registered with `inputs`."""
    compat.install()
    import seqio
    import tensorflow as tf

    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({"source": [[1]], "targets": [[2]]})

    feature = seqio.Feature(seqio.PassThroughVocabulary(8), dtype=tf.int32)
    yield seqio.TaskRegistry.add(
        "without_inputs",
        seqio.FunctionDataSource(read, splits=["train"]),
        output_features={"inputs": feature, "targets": feature},
    )
    seqio.TaskRegistry.remove("without_inputs")


def test_a_task_that_lacks_a_feature_is_named_by_every_check_before_anything_starts(
    without_inputs, tmp_path
):
    from t0repro.tasks.checking import Verdict, check_tasks, tasks_without_prompts
    from t0repro.tasks.prompt_cache import seqio_plan

    name, lengths = without_inputs.name, {"inputs": 4, "targets": 4}
    message = f"The task {name} cannot be read: .*missing expected output feature.*: inputs"
    inputs = SimpleNamespace(
        mode="train",
        mixture_or_task_name=name,
        split="train",
        use_cached=False,
        sequence_length=lengths,
    )
    data = SeqioDataConfig(name, lengths, "train", 1, False, 1)
    model = SimpleNamespace(decoder_only=False)
    checks = [
        lambda: check_data(inputs),  # Mesh TensorFlow's dialect, on both backends
        lambda: list(preflight._data(data, model, (None, None), "train")),  # T5X's training
        lambda: list(preflight._data(data, model, (None, None), "infer")),
        lambda: seqio_plan.check_readable([without_inputs]),  # scripts/cache.sh
    ]
    for check in checks:
        with pytest.raises(UserError, match=message) as refused:
            check()
        assert "output_features" in refused.value.fix
    assert name in tasks_without_prompts(None)
    (checked,) = check_tasks([name], lambda count: None)
    assert checked.verdict is Verdict.BROKEN and "output feature" in checked.reason


def test_a_source_that_cannot_be_opened_is_named_with_its_task_in_one_line():
    """As by TensorFlow Datasets, which lists all of its datasets after the one that is missing."""
    from t0repro.tasks.checking import Verdict, check_tasks

    class Missing(seqio.FunctionDataSource):
        @property
        def splits(self):
            raise LookupError("Dataset few not found. Available: " + "others, " * 1000)

    source = Missing(lambda split, shuffle_files, seed=None: None, splits=[])
    seqio.TaskRegistry.add("of_few", source, output_features={})
    try:
        with pytest.raises(UserError, match="task of_few cannot be opened: LookupError") as refused:
            check_readable("of_few", "train", use_cached=False)
        (checked,) = check_tasks(["of_few"], lambda count: None)
    finally:
        seqio.TaskRegistry.remove("of_few")
    assert len(refused.value.what) < 300
    assert checked.verdict is Verdict.BROKEN and len(checked.reason) <= 200


def test_a_task_without_an_optional_feature_is_read(without_inputs):
    feature = without_inputs.output_features["inputs"]
    without_inputs._output_features["inputs"] = dataclasses.replace(feature, required=False)
    check_features([without_inputs], "train", None, use_cached=True)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"targets": {}}, "task odd has no inputs; it has targets"),
        (
            {"inputs": {"rank": 3}, "targets": {}},
            "inputs of the task odd have rank 3 and type int32",
        ),
        ({"inputs": {}, "targets": {"dtype": "float32"}}, "targets .* rank 1 and type float32"),
        ({"question": {}, "answer": {}}, "task odd has no inputs and no targets; it has question"),
    ],
)
def test_features_that_no_model_reads_are_refused_before_a_run_starts(features, message):
    """Not after minutes, by SeqIO's converter or Mesh TensorFlow's packing."""
    vocabulary = seqio.PassThroughVocabulary(8)
    made = {name: seqio.Feature(vocabulary, **given) for name, given in features.items()}
    task = SimpleNamespace(name="odd", output_features=made)
    model = SimpleNamespace(decoder_only=False)
    for mesh in {False, "float32" not in message}:
        with pytest.raises(UserError, match=message):
            check_tokens([task], model, mesh=mesh)
    if "targets" in features and not features["targets"] and "inputs" not in features:
        check_tokens([task], SimpleNamespace(decoder_only=True))


def test_mesh_tensorflows_lengths_are_of_every_feature(without_inputs, monkeypatch):
    """Its packing takes them, also of features that no model reads."""
    monkeypatch.setattr("t0repro.data.checks.check_features", lambda *_, **__: None)
    inputs = SimpleNamespace(
        mixture_or_task_name=without_inputs.name, split="train", use_cached=False, mode="train",
        sequence_length={"targets": 4},
    )  # fmt: skip
    with pytest.raises(UserError, match="lengths lack inputs") as error:
        check_data(inputs)
    assert error.value.where == "run.sequence_length"
