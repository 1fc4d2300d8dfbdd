"""The prompt cache holds what SeqIO's own pipeline gives, on real rows of many datasets."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import seqio

from t0repro.errors import UserError
from t0repro.tasks.prompt_cache.provenance import check_caches
from t0repro.tasks.prompt_cache.records import RecordFile
from t0repro.tasks.prompted_examples import UNCUT, prompted_examples
from t0repro.tasks.registration import add_prompted_task
from t0repro.tasks.registry import task_descriptions
from tests.tasks.vocabularies import write_vocabulary

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


@pytest.mark.parametrize("family", ["bytes", "mT5", "umT5", "MADLAD"])
def test_caches_and_rows_of_other_families_are_read_as_by_seqio(
    family, rows_root, tmp_path, monkeypatch
):
    """Bytes, sentinels that the file holds, 300 of them, none with SentencePiece's own ids."""
    forms = {
        "mT5": {"inside": 100},
        "umT5": {"pieces": 256_000},
        "MADLAD": {"pieces": 256_000, "unk": 0, "bos": 1, "eos": 2},
    }
    path = "bytes"
    if family != "bytes":
        path = str(write_vocabulary(tmp_path / "own.model", **forms[family]))
    peer = {
        "bytes": seqio.ByteVocabulary,
        "mT5": lambda: seqio.SentencePieceVocabulary(path),
        "umT5": lambda: seqio.SentencePieceVocabulary(path, 300),
        "MADLAD": lambda: seqio.SentencePieceVocabulary(path),
    }[family]()
    monkeypatch.setenv("T0REPRO_VOCAB", path)
    prefix = f"family_{family}"
    add_prompted_task(
        "super_glue", "rte", "GPT-3 style", ("validation",), root=rows_root, name=prefix
    )
    folder = tmp_path / "cache"
    for name in make(folder, f"{prefix}*").cached:
        task = seqio.TaskRegistry.get(name)
        assert task.output_features["targets"].vocabulary == peer
        on_the_fly = examples(task, use_cached=False)
        monkeypatch.setattr(task, "_cache_dir", str(folder / name))
        check_caches([task], "validation")
        assert examples(task, use_cached=True) == on_the_fly and len(on_the_fly) >= 2
        rows = list(prompted_examples(task_descriptions()[name], "validation", UNCUT))
        assert len(rows) == len(on_the_fly)
        for row in rows:
            assert row["inputs"].tolist() == peer.encode(row["inputs_pretokenized"].decode())
            target = row["targets_pretokenized"].decode()
            assert row["targets"].tolist() == [*peer.encode(target), peer.eos_id]
        # A cache of other tokens is refused, also where SeqIO's own class names them.
        other = {"targets": seqio.Feature(seqio.ByteVocabulary(extra_ids=7))}
        wrong = SimpleNamespace(
            name=name, cache_dir=task.cache_dir, splits=task.splits, output_features=other
        )
        with pytest.raises(UserError, match="cached with another vocabulary"):
            check_caches([wrong], "validation")
