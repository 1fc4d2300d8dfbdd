"""Batches of T5X's DatasetConfig: SeqIO's own, in its order, from anywhere again bit for bit."""

import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest

from t0repro import compat
from t0repro.config.data import SeqioDataConfig
from t0repro.data.train_data import (
    EvalBatches,
    SeqioTrainBatches,
    make_train_eval_batches,
    rename_seqio_features,
    runs_python,
    seqio_dataset,
)
from t0repro.errors import UserError
from t0repro.model.features import t5x_features
from t0repro.progress import heard_by

from ..helpers import tiny_models as tiny

compat.install()
import seqio  # noqa: E402
import tensorflow as tf  # noqa: E402

LENGTHS = {"inputs": 48, "targets": 16}
# In seqio.EncDecFeatureConverter's words, feature by feature.
THEIRS = {
    "inputs": "encoder_input_tokens",
    "inputs_position": "encoder_positions",
    "inputs_segmentation": "encoder_segment_ids",
    "targets": "decoder_target_tokens",
    "targets_position": "decoder_positions",
    "targets_segmentation": "decoder_segment_ids",
}


def _halved_at_random(dataset):
    """Cuts each text in two at a random word: a stochastic preprocessor, after the cache."""

    @functools.partial(seqio.map_over_dataset, num_seeds=1)
    def halve(example, seed):
        words = tf.strings.split(example["text"], " ")
        at = tf.random.stateless_uniform((), seed, 1, tf.size(words), tf.int32)
        join = functools.partial(tf.strings.reduce_join, separator=" ")
        return {"inputs": join(words[:at]), "targets": join(words[at:])}

    return halve(dataset)


@pytest.fixture(scope="module", autouse=True)
def tasks(tmp_path_factory):
    """Tasks of 40, 9 and 1 lines of text, one of Python functions, and mixtures of them."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)

    def lines(count):
        return "".join(
            " ".join(map(str, generator.integers(0, 999, generator.integers(2, 9)))) + "\n"
            for _ in range(count)
        )

    feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True, dtype=tf.int32)
    preprocessors = [
        seqio.CacheDatasetPlaceholder(),
        _halved_at_random,
        seqio.preprocessors.tokenize,
        seqio.preprocessors.append_eos_after_trim,
    ]

    def as_text(dataset):
        return dataset.map(lambda line: {"text": line})

    for name, count in (("lines_of_40", 40), ("lines_of_9", 9), ("lines_of_1", 1)):
        path = folder / f"{name}.txt"
        path.write_text(lines(count))
        seqio.TaskRegistry.add(
            name,
            seqio.TextLineDataSource({"train": str(path)}),
            preprocessors=[as_text, *preprocessors],
            output_features={"inputs": feature, "targets": feature},
        )
    rows = lines(12).splitlines()

    def from_python(split, shuffle_files, seed=None):
        del split, shuffle_files, seed
        return tf.data.Dataset.from_generator(
            lambda: iter(rows), output_signature=tf.TensorSpec((), tf.string)
        )

    seqio.TaskRegistry.add(
        "lines_of_python",
        seqio.FunctionDataSource(from_python, splits=("train",)),
        preprocessors=[as_text, *preprocessors],
        output_features={"inputs": feature, "targets": feature},
    )
    seqio.MixtureRegistry.add("lines_of_49", [("lines_of_40", 3), ("lines_of_9", 1)])
    seqio.MixtureRegistry.add("lines_of_10", [("lines_of_9", 3), ("lines_of_1", 1)])
    yield
    seqio.MixtureRegistry.remove("lines_of_49")
    seqio.MixtureRegistry.remove("lines_of_10")
    for name in ("lines_of_40", "lines_of_9", "lines_of_1", "lines_of_python"):
        seqio.TaskRegistry.remove(name)


def data_config(name="lines_of_49", **changes):
    values = {
        "sequence_length": LENGTHS, "split": "train", "batch_size": 4, "shuffle": True, "seed": 7,
        "pack": True,
    }  # fmt: skip
    return SeqioDataConfig(mixture_or_task_name=name, **{**values, **changes})


def first(batches, count):
    return list(itertools.islice(iter(batches), count))


def opened(data, count, *, saved=None, said=None, **options):
    """The next `count` batches, and the source that they came from."""
    source = SeqioTrainBatches(data, **{"save_dataset": True, **options})
    with heard_by([].append if said is None else said.append):
        batches = source.open(0, saved)
    return first(batches, count), source


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) and ours
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == np.int32
            np.testing.assert_array_equal(one[name], other[name])


# In the words of seqio.DecoderFeatureConverter.
DECODERS = {
    name: THEIRS[name] for name in ("targets", "targets_position", "targets_segmentation")
} | {"loss_weights": "decoder_loss_weights", "full_attention": "decoder_causal_attention"}


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, {"targets": 16}])
def test_a_decoders_batches_are_those_of_seqios_converter(lengths, pack):
    data = data_config(pack=pack, converter="decoder", sequence_length=lengths)
    ours, _ = opened(data, 4)
    direct = seqio.get_dataset(
        "lines_of_49",
        task_feature_lengths=lengths,
        feature_converter=seqio.DecoderFeatureConverter(pack=pack),
        dataset_split="train",
        shuffle=True,
        num_epochs=None,
        seed=7,
        batch_size=4,
    )
    theirs = [
        {name: batch[name_of] for name, name_of in DECODERS.items() if name_of in batch}
        for batch in direct.take(4).as_numpy_iterator()
    ]
    assert_equal(ours, theirs)
    assert ("full_attention" in ours[0]) is (len(lengths) == 2)
    assert ours[0]["targets"].shape == (4, sum(lengths.values()))


@pytest.fixture
def model_features():
    """A task that gives the features that a model reads."""

    def read(split, shuffle_files, seed=None):
        del split, shuffle_files, seed
        tokens = tf.reshape(tf.range(2, 50), (12, 4))
        return tf.data.Dataset.from_tensor_slices(
            {
                "decoder_target_tokens": tokens,
                "decoder_input_tokens": tokens + 100,
                "decoder_causal_attention": tf.ones_like(tokens),
                "comment": tokens,
            }
        )

    feature = seqio.Feature(seqio.PassThroughVocabulary(200), add_eos=False)
    seqio.TaskRegistry.add(
        "model_features",
        seqio.FunctionDataSource(read, splits=("train",)),
        preprocessors=[],
        output_features={"decoder_target_tokens": feature},
    )
    yield "model_features"
    seqio.TaskRegistry.remove("model_features")


def test_features_are_passed_through_as_the_task_gives_them(model_features):
    data = data_config(model_features, converter="pass_through", shuffle=False)
    (batch, *_), _ = opened(data, 2)
    tokens = np.arange(2, 18).reshape(4, 4)
    assert batch.keys() == {"targets", "decoder_inputs", "full_attention", "loss_weights"}
    np.testing.assert_array_equal(batch["targets"], tokens)
    np.testing.assert_array_equal(batch["decoder_inputs"], tokens + 100)
    # As in T5X, everything has loss if the task does not say and nothing is padding.
    assert batch["full_attention"].all() and batch["loss_weights"].all()
    evaluated = next(iter(EvalBatches(data, 1)))
    np.testing.assert_array_equal(evaluated["decoder_inputs"], batch["decoder_inputs"])


PASSED = {
    "decoder_input_tokens": np.array([[0, 6, 0, 7]]),
    "decoder_target_tokens": np.array([[6, 0, 7, 0]]),
    "decoder_loss_weights": np.array([[0.5, 0, 0.25, 0]]),
}


def test_weights_passed_through_stay_fractions():
    batch = rename_seqio_features(PASSED, "pass_through")
    assert batch["loss_weights"].dtype == np.float32
    np.testing.assert_array_equal(batch["loss_weights"], PASSED["decoder_loss_weights"])
    named = t5x_features(batch)
    assert named["decoder_loss_weights"].dtype == np.float32


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"decoder_loss_weights": np.ones((1, 4))}, "has loss where decoder_target_tokens"),
        ({"decoder_loss_weights": None}, "and no decoder_loss_weights"),
        ({"decoder_input_tokens": None}, "no decoder_input_tokens"),
    ],
)
def test_what_t5xs_model_would_treat_differently_is_not_passed_through(change, why):
    batch = {name: x for name, x in (PASSED | change).items() if x is not None}
    with pytest.raises(UserError, match=why):
        rename_seqio_features(batch, "pass_through")


@pytest.mark.parametrize(
    ("name", "shuffle", "pack"),
    [("lines_of_49", True, True), ("lines_of_49", False, False), ("lines_of_40", True, False)],
)
def test_batches_and_their_order_are_those_of_seqio(name, shuffle, pack):
    ours, _ = opened(data_config(name, pack=pack, shuffle=shuffle), 12)
    direct = seqio.get_dataset(
        name,
        task_feature_lengths=LENGTHS,
        feature_converter=seqio.EncDecFeatureConverter(pack=pack),
        dataset_split="train",
        shuffle=shuffle,
        num_epochs=None,
        seed=7,
        batch_size=4,
    )
    theirs = [
        {name: batch[key] for name, key in THEIRS.items() if key in batch}
        for batch in first(direct.as_numpy_iterator(), 12)
    ]
    assert set(ours[0]) == (set(THEIRS) if pack else {"inputs", "targets"})
    assert_equal(ours, theirs)


@pytest.mark.always
@pytest.mark.parametrize(
    ("name", "by"),
    [("lines_of_49", "by the input pipeline's state"), ("lines_of_python", "rebuilt")],
)
@pytest.mark.parametrize("seed", [7, None])
def test_a_resumed_run_goes_on_with_the_same_batches(tmp_path, name, by, seed):
    data = data_config(name, seed=seed)
    source = SeqioTrainBatches(data, save_dataset=True)
    batches = source.open(0, None)
    first(batches, 9)
    source.save(tmp_path)
    expected = first(batches, 9)
    said = []
    resumed, _ = opened(data, 9, saved=tmp_path, said=said, resumed=True)
    assert [line for line in said if by in line], said
    assert_equal(resumed, expected)


@pytest.mark.always
@pytest.mark.parametrize(("name", "pack"), [("lines_of_40", False), ("lines_of_49", True)])
def test_shards_are_what_seqio_reads_on_as_many_hosts(name, pack):
    ours, _ = opened(data_config(name, pack=pack, num_shards=2), 6)
    hosts = [
        seqio.get_dataset(
            name,
            task_feature_lengths=LENGTHS,
            feature_converter=seqio.EncDecFeatureConverter(pack=pack),
            dataset_split="train",
            shuffle=True,
            num_epochs=None,
            shard_info=seqio.ShardInfo(index, 2),
            seed=7,
            batch_size=2,
        ).as_numpy_iterator()
        for index in range(2)
    ]
    theirs = [
        {name: np.concatenate([part[key] for part in parts]) for name, key in THEIRS.items()
         if key in parts[0]}
        for parts in itertools.islice(zip(*hosts, strict=True), 6)
    ]  # fmt: skip
    assert_equal(ours, theirs)
    whole, _ = opened(data_config(name, pack=pack), 6)
    assert not all(
        np.array_equal(a["inputs"], b["inputs"]) for a, b in zip(ours, whole, strict=True)
    )


def test_processes_that_make_their_own_shards_make_the_same_batches(tmp_path):
    data = data_config(num_shards=4)
    source = SeqioTrainBatches(data, save_dataset=True)
    batches = source.open(0, None)
    first(batches, 9)
    source.save(tmp_path)
    expected, parts = first(batches, 9), []
    for shards in ([0, 2], [1, 3]):
        part = SeqioTrainBatches(data, save_dataset=True, resumed=True)
        part.make_only(shards)
        parts.append(first(part.open(0, tmp_path), 9))
        others = [row for row in range(4) if row not in shards]
        assert not any(x[others].any() for batch in parts[-1] for x in batch.values())
    assert_equal(
        [
            {name: x + other[name] for name, x in one.items()}
            for one, other in zip(*parts, strict=True)
        ],
        expected,
    )


def test_another_number_of_shards_starts_the_data_over_and_one_is_what_there_was_before(tmp_path):
    _, source = opened(data_config(), 3)
    source.save(tmp_path)
    said = []
    opened(data_config(num_shards=2), 3, saved=tmp_path, resumed=True, said=said)
    assert said == ["data: from the beginning, since num_shards changed"]
    # A checkpoint of a version without shards.
    position = json.loads((tmp_path / "position.json").read_text())
    del position["arguments"]["num_shards"]
    (tmp_path / "position.json").write_text(json.dumps(position))
    said.clear()
    opened(data_config(), 3, saved=tmp_path, resumed=True, said=said)
    assert said == ["data: after 3 batches, by the input pipeline's state"]


def test_a_shard_without_an_example_of_some_task_is_an_error():
    data = data_config("lines_of_10", batch_size=2, num_shards=2)
    with pytest.raises(UserError, match=r"Shard \d of 2 of the training data has no more"):
        opened(data, 20)


def test_without_save_dataset_the_data_start_over_and_a_seed_is_warned_of(tmp_path):
    data, said = data_config(), []
    begun, source = opened(data, 5, save_dataset=False, said=said)
    assert [line for line in said if line.startswith("warning: the data have a seed")]
    source.save(tmp_path)
    assert not [*tmp_path.iterdir()]
    again, _ = opened(data, 5, save_dataset=False, saved=tmp_path, resumed=True, said=said)
    assert_equal(again, begun)
    assert "data: from the beginning, because save_dataset is False" in said


def test_no_warning_where_the_seed_is_drawn_or_the_data_are_saved():
    said = []
    opened(data_config(), 1, said=said)
    opened(data_config(seed=None), 1, save_dataset=False, said=said)
    assert said == []


def test_another_batch_size_starts_the_data_over_and_says_so(tmp_path):
    _, source = opened(data_config(), 3)
    source.save(tmp_path)
    said = []
    changed = data_config(batch_size=2)
    resumed, _ = opened(changed, 3, saved=tmp_path, resumed=True, said=said)
    assert "data: from the beginning, since batch_size changed" in said
    assert_equal(resumed, opened(changed, 3)[0])


def test_python_functions_in_a_pipeline_are_found():
    def dataset(name):
        return seqio_dataset(data_config(name), seed=1, num_epochs=None)

    assert runs_python(dataset("lines_of_python")) and not runs_python(dataset("lines_of_49"))


def test_evaluation_has_full_batches_of_each_task_and_of_the_mixture():
    data = data_config(shuffle=False, pack=False, batch_size=8)
    batches = EvalBatches.for_each_task(data, eval_steps=3)
    assert list(batches) == ["lines_of_40", "lines_of_9", "lines_of_49"]
    small = list(batches["lines_of_9"])
    assert [batch["inputs"].shape for batch in small] == [(8, 48)] * 3
    # Nine examples, then the next epoch of them: cut again, since the cut is random.
    direct = seqio.get_dataset(
        "lines_of_9",
        task_feature_lengths=LENGTHS,
        feature_converter=seqio.EncDecFeatureConverter(pack=False),
        num_epochs=24,
        seed=7,
    )
    rows = np.stack([row["decoder_target_tokens"] for row in first(direct.as_numpy_iterator(), 24)])
    np.testing.assert_array_equal(np.concatenate([batch["targets"] for batch in small]), rows)
    assert_equal(list(batches["lines_of_9"]), small)


def test_a_task_without_the_split_is_not_evaluated_and_an_empty_one_is_refused(tmp_path):
    data = data_config(split="validation")
    assert EvalBatches.for_each_task(data, 1) == {}
    said = []
    plan = dataclasses.replace(tiny.PLAN, train_eval_data=data)
    with heard_by(said.append):
        assert make_train_eval_batches(plan) == {}
    assert said == [f"train_eval: no task of {data.mixture_or_task_name} has validation"]
    (tmp_path / "empty.txt").write_text("")
    feature = seqio.Feature(seqio.ByteVocabulary(), dtype=tf.int32)
    seqio.TaskRegistry.add(
        "no_lines",
        seqio.TextLineDataSource({"train": str(tmp_path / "empty.txt")}),
        preprocessors=[
            lambda dataset: dataset.map(lambda line: {"inputs": line, "targets": line}),
            seqio.preprocessors.tokenize,
        ],
        output_features={"inputs": feature, "targets": feature},
    )
    try:
        with pytest.raises(UserError, match="'no_lines' has no example to evaluate"):
            list(EvalBatches.for_each_task(data_config("no_lines"), 1)["no_lines"])
    finally:
        seqio.TaskRegistry.remove("no_lines")


def test_memory_cache_off_reads_the_same_batches_again():
    data = dataclasses.replace(data_config(), use_memory_cache=False)
    batches = EvalBatches.for_each_task(data, 2)["lines_of_40"]
    assert_equal(list(batches), list(batches))
