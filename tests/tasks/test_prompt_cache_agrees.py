"""The prompt cache holds what SeqIO's own pipeline gives, on real rows of many datasets."""

import json

import numpy as np
import pytest
import seqio

from t0repro.tasks.prompt_cache.records import RecordFile

from .prompt_caches import make
from .real_tasks import DATASETS, ROWS, register

PREFIX = "agrees_"


@pytest.fixture(scope="module")
def cached(shared_data, shared_vocab, tmp_path_factory):
    """The cache's folder and the names of its tasks, a few of each dataset."""
    register(PREFIX, shared_data, shared_vocab)
    folder = tmp_path_factory.mktemp("agrees")
    summary = make(folder, f"{PREFIX}*", workers=2, min_shards=3)
    return folder, summary.cached


def examples(task: seqio.Task, use_cached: bool) -> list:
    dataset = task.get_dataset(None, "validation", use_cached=use_cached, shuffle=False)
    arrays = (
        {name: np.asarray(value) for name, value in example.items()}
        for example in dataset.as_numpy_iterator()
    )
    return sorted(
        str([(name, each.dtype.str, each.tolist()) for name, each in sorted(example.items())])
        for example in arrays
    )


def test_every_field_of_every_example_equals_seqios_over_16_datasets(cached, monkeypatch):
    folder, names = cached
    assert len(DATASETS) >= 10
    compared = 0
    for name in names:
        task = seqio.TaskRegistry.get(name)
        monkeypatch.setattr(task, "_cache_dir", str(folder / name))
        from_cache = examples(task, use_cached=True)
        assert from_cache == examples(task, use_cached=False), name
        compared += len(from_cache)
    assert compared > 16 * ROWS


def test_tasks_with_fixed_choices_with_own_choices_and_without_are_among_them(cached):
    folder, names = cached
    of_choices = {
        len(json.loads((folder / name / "info.validation.json").read_text())["features"])
        for name in names
    }
    assert of_choices == {4, 5, 7}  # without choices, with them, the twin
    lengths = set()
    for name in names:
        provenance = json.loads((folder / name / "provenance.json").read_text())
        split = provenance["splits"]["validation"]
        lengths.add(split["examples"] / max(split["rows"], 1))
    assert len(lengths) >= 4


def test_statistics_count_what_the_examples_hold(cached):
    folder, names = cached
    for name in names[:6]:
        task = seqio.TaskRegistry.get(name)
        stats = json.loads((folder / name / "stats.validation.json").read_text())
        dataset = list(task.source.examples("validation"))
        encode = task.output_features["inputs"].vocabulary.encode
        if name.endswith("_score_eval"):
            dataset = [each for each in dataset for _ in each["answer_choices"]]
        lengths = [len(encode(example["inputs"])) for example in dataset]
        assert stats["examples"] == len(lengths)
        assert stats["inputs_tokens"] == sum(lengths)
        assert stats["inputs_max_tokens"] == max(lengths)


def test_record_files_are_read_by_tensorflow(tmp_path):
    import tensorflow as tf

    records = [b"", b"one", b"x" * 70_000]
    file = RecordFile(tmp_path / "records")
    for record in records:
        file.write(record)
    file.close()
    read = tf.data.TFRecordDataset(str(tmp_path / "records"))
    assert list(read.as_numpy_iterator()) == records
