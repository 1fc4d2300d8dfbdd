"""Incomplete and mismatched cached tasks are found before use."""

import json
import shutil
from pathlib import Path

import pytest
import seqio

from t0repro.cli.gate import find_user_error
from t0repro.data.checks import check_readable
from t0repro.data.eval_examples import read_cached_examples
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.tasks.demo.datasets import FOLDER, VOCABULARY
from t0repro.tasks.prompt_cache.provenance import check_caches, damage
from t0repro.tasks.registration import add_prompted_task
from t0repro.tasks.registry import task_descriptions
from t0repro.tasks.vocabulary import VocabularyFile

from .prompt_caches import make

NAME = "checked_rows"
SPLIT = "validation"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """A folder of rows of our own, to be changed."""
    root = tmp_path_factory.mktemp("rows")
    shutil.copytree(FOLDER / "synthetic_imdb", root / "imdb")
    return root


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory) -> Path:
    """The whole cache of a task."""
    add_prompted_task(
        "imdb", None, "Reviewer Sentiment Feeling", [SPLIT],
        root=rows, vocabulary=VocabularyFile(str(VOCABULARY)), name=NAME,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("cache")
    make(folder, NAME, min_shards=4)
    return folder / NAME


@pytest.fixture(params=["with provenance", "as SeqIO makes it"])
def cache(request, whole, tmp_path, monkeypatch) -> Path:
    """A copy of the cache, which the task reads."""
    folder = tmp_path / NAME
    shutil.copytree(whole, folder)
    if request.param == "as SeqIO makes it":
        (folder / "provenance.json").unlink()
    monkeypatch.setattr(seqio.TaskRegistry.get(NAME), "_cache_dir", str(folder))
    return folder


def shard(folder: Path, number: int = 1) -> Path:
    return folder / f"{SPLIT}.tfrecord-{number:05d}-of-00004"


def cut(folder: Path) -> None:
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:-40])


def shorten(folder: Path) -> None:
    """Takes the last record away, so that the file is still one of records."""
    data = shard(folder).read_bytes()
    place = last = 0
    while place < len(data):
        last, place = place, place + 16 + int.from_bytes(data[place : place + 8], "little")
    shard(folder).write_bytes(data[:last])


def claim(folder: Path) -> None:
    path = folder / f"stats.{SPLIT}.json"
    stats = json.loads(path.read_text())
    path.write_text(json.dumps({**stats, "examples": stats["examples"] + 1}))


def count(stats: str):
    """Gives the statistics another content."""
    return lambda folder: (folder / f"stats.{SPLIT}.json").write_text(stats)


def describe_without(key: str):
    """Takes a field from the description of each feature."""

    def harm(folder: Path) -> None:
        path = folder / f"info.{SPLIT}.json"
        info = json.loads(path.read_text())
        for feature in info["features"].values():
            del feature[key]
        path.write_text(json.dumps(info))

    return harm


DAMAGE = {
    "a shard is missing": (lambda folder: shard(folder).unlink(), "1 of 4 shards are missing"),
    "a shard is emptied": (lambda folder: shard(folder).write_bytes(b""), "00001-of|48 examples"),
    "a shard is cut": (cut, "bytes|record is cut"),
    "a record is missing": (shorten, "bytes|hold 63 examples and its statistics count 64"),
    "the statistics say more": (claim, "hold 64 examples and its statistics count 65"),
    "the description is gone": (
        lambda folder: (folder / f"info.{SPLIT}.json").unlink(),
        "info.validation.json is missing",
    ),
    "the description is cut": (
        lambda folder: (folder / f"info.{SPLIT}.json").write_text("{"),
        "info.validation.json is missing or damaged",
    ),
    "the statistics are cut": (count("{"), "stats.validation.json is damaged"),
    "the statistics are a list": (count("[]"), "stats.validation.json is damaged"),
    "the statistics count in words": (
        count('{"examples": "64"}'),
        "stats.validation.json is damaged",
    ),
    "features without a shape": (describe_without("shape"), "does not say of which types"),
    "features without a type": (describe_without("dtype"), "does not say of which types"),
    "the marker is gone": (lambda folder: (folder / "COMPLETED").unlink(), "no COMPLETED"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_before_the_cache_is_read(cache, kind):
    check_readable(NAME, SPLIT, use_cached=True)
    harm, message = DAMAGE[kind]
    harm(cache)
    assert damage(cache, SPLIT)
    with pytest.raises(
        UserError, match=f"(incomplete|not cached).*({message})|not cached"
    ) as caught:
        check_readable(NAME, SPLIT, use_cached=True)
    assert caught.value.fix


def test_a_feature_that_no_record_has_is_named(cache):
    path = cache / f"info.{SPLIT}.json"
    info = json.loads(path.read_text())
    info["features"]["inputs_plaintext"] = {"dtype": "string", "shape": []}
    path.write_text(json.dumps(info))
    with pytest.raises(UserError, match="A cached example has no inputs_plaintext"):
        next(read_cached_examples(cache, SPLIT))


def test_a_feature_of_another_type_than_the_records_is_named(cache):
    path = cache / f"info.{SPLIT}.json"
    info = json.loads(path.read_text())
    info["features"]["inputs_pretokenized"] = {"dtype": "int32", "shape": [None]}
    path.write_text(json.dumps(info))
    with pytest.raises(UserError, match="not of the types that info.validation.json lists"):
        next(read_cached_examples(cache, SPLIT))


def _by_seqio():
    return seqio.get_mixture_or_task(NAME).get_dataset(None, SPLIT, use_cached=True)


def _by_mesh_tensorflow():
    """The reader of Mesh TensorFlow's stack, and of scoring in both."""
    from t0repro import compat

    compat.install()
    from t5.models import mesh_transformer

    lengths = {"inputs": 64, "targets": 16}
    (dataset,) = mesh_transformer.mesh_eval_dataset_fn(NAME, lengths, SPLIT, use_cached=True)
    return dataset.dataset_fn()


@pytest.mark.parametrize("read", [_by_seqio, _by_mesh_tensorflow])
def test_a_flipped_bit_is_found_as_the_cache_is_read_and_its_file_is_named(cache, read):
    """Sizes and counts do not show it; each record's checksum does, which all readers check."""
    path = shard(cache, 2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert damage(cache, SPLIT) is None
    with pytest.raises(Exception, match="corrupted record") as caught:
        list(read().as_numpy_iterator())
    told = find_user_error(caught.value)
    assert told and "another checksum" in told and f"where: {path}, byte " in told


@pytest.mark.parametrize("kind", ["a shard is missing", "a shard is emptied"])
def test_a_later_run_of_cache_names_a_damaged_task_rather_than_calling_it_cached(
    whole, tmp_path, kind
):
    shutil.copytree(whole, tmp_path / NAME)
    DAMAGE[kind][0](tmp_path / NAME)
    with pytest.raises(UserError, match="incomplete"):
        make(tmp_path, NAME, min_shards=4)
    shutil.rmtree(tmp_path / NAME)
    assert make(tmp_path, NAME, min_shards=4).cached == [NAME]


def test_a_cache_says_the_records_and_bytes_of_each_shard(whole):
    split = json.loads((whole / "provenance.json").read_text())["splits"][SPLIT]
    assert sum(file["records"] for file in split["files"].values()) == split["examples"] == 64
    assert {name: file["bytes"] for name, file in split["files"].items()} == {
        path.name: path.stat().st_size for path in whole.glob("*.tfrecord-*")
    }


# Made of something else --------------------------------------------------------------------------


@pytest.fixture
def other_vocabulary(tmp_path, monkeypatch, shared_vocab):
    """The task with T5's vocabulary, not the one that it was cached with."""
    task = seqio.TaskRegistry.get(NAME)
    other = seqio.SentencePieceVocabulary(str(shared_vocab), 100)
    features = {
        name: seqio.Feature(other, add_eos=feature.add_eos)
        for name, feature in task.output_features.items()
    }
    monkeypatch.setattr(task, "_output_features", features)


def test_a_cache_of_another_vocabulary_is_refused(cache, other_vocabulary):
    with pytest.raises(UserError, match="cached with another vocabulary") as caught:
        check_readable(NAME, SPLIT, use_cached=True)
    assert "T0REPRO_VOCAB" in caught.value.fix


def test_a_cache_of_a_larger_vocabulary_is_refused(whole, tmp_path, monkeypatch, shared_vocab):
    rows = task_descriptions()[NAME].rows
    name = "checked_rows_of_t5"
    add_prompted_task(
        "imdb", None, rows.template.name, [SPLIT],
        root=rows.root, vocabulary=VocabularyFile(str(shared_vocab)), name=name,
    )  # fmt: skip
    make(tmp_path, name, min_shards=4)
    (tmp_path / name / "provenance.json").unlink()
    monkeypatch.setattr(seqio.TaskRegistry.get(NAME), "_cache_dir", str(tmp_path / name))
    with pytest.raises(UserError, match="another vocabulary: the tokens of an example spell"):
        check_readable(NAME, SPLIT, use_cached=True)


@pytest.fixture
def of_two_vocabularies(tmp_path, monkeypatch):
    """A task with bytes for targets, cached as SeqIO caches it."""
    import tensorflow as tf

    vocabularies = {"inputs": seqio.SentencePieceVocabulary(str(VOCABULARY), 100),
                    "targets": seqio.ByteVocabulary()}  # fmt: skip
    rows = tf.data.Dataset.from_tensors({"inputs": "a fine film", "targets": "yes"})
    task = seqio.Task(
        "integrity_two_vocabularies",
        seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: rows, splits=[SPLIT]),
        output_features={
            name: seqio.Feature(vocabulary, dtype=tf.int32)
            for name, vocabulary in vocabularies.items()
        },
        preprocessors=[seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()],
    )
    (example,) = task.preprocess_precache(rows).as_numpy_iterator()
    with tf.io.TFRecordWriter(str(tmp_path / f"{SPLIT}.tfrecord-00000-of-00001")) as file:
        file.write(seqio.utils.dict_to_tfexample(example).SerializeToString())
    info = {
        "num_shards": 1,
        "features": dict.fromkeys(example, {"dtype": "int32", "shape": [None]}),
    }
    (tmp_path / f"info.{SPLIT}.json").write_text(json.dumps(info))
    (tmp_path / "COMPLETED").touch()
    monkeypatch.setattr(task, "_cache_dir", str(tmp_path))
    return task


def test_each_feature_is_compared_in_its_own_vocabulary(of_two_vocabularies):
    said = []
    with heard_by(said.append):
        check_caches([of_two_vocabularies], SPLIT)
    assert len(said) == 1 and "3 examples of integrity_two" in said[0]


def test_a_cache_without_provenance_is_warned_of(cache, capsys):
    check_readable(NAME, SPLIT, use_cached=True)
    said = capsys.readouterr().err
    if (cache / "provenance.json").exists():
        assert said == ""
    else:
        assert f"examples of {NAME} were compared with their text, and agree" in said


def test_rows_that_changed_since_are_said_and_stop_a_further_run_of_cache(
    whole, rows, tmp_path, monkeypatch, capsys
):
    shutil.copytree(whole, tmp_path / NAME)
    monkeypatch.setattr(seqio.TaskRegistry.get(NAME), "_cache_dir", str(tmp_path / NAME))
    (path,) = rows.rglob(f"{SPLIT}.jsonl")
    before = path.read_bytes()
    try:
        path.write_bytes(before.replace(b"film", b"movi", 1))  # as long as before
        check_readable(NAME, SPLIT, use_cached=True)
        assert f"have changed since {NAME} was cached" in capsys.readouterr().err
        with pytest.raises(UserError, match="cached already, with another version of its rows"):
            make(tmp_path, NAME, min_shards=4)
    finally:
        path.write_bytes(before)


def test_another_template_since_is_refused(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / NAME)
    path = tmp_path / NAME / "provenance.json"
    content = json.loads(path.read_text())
    content["template"]["sha256"] = "0" * 64
    path.write_text(json.dumps(content))
    monkeypatch.setattr(seqio.TaskRegistry.get(NAME), "_cache_dir", str(tmp_path / NAME))
    with pytest.raises(UserError, match="cached with another template"):
        check_readable(NAME, SPLIT, use_cached=True)
