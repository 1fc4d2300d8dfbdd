"""The line about what a run's sequence lengths cut, against SeqIO's own untrimmed examples."""

import re

import pytest

from t0repro import compat
from t0repro.config.data import SeqioDataConfig
from t0repro.data.truncation import EXAMPLES, note_truncation
from t0repro.progress import heard_by
from t0repro.tasks.modules import load_tasks
from t0repro.tasks.registry import add_cache_dirs, find_tasks

from ..tasks.prompt_caches import make

NAME = "demo_synthetic_glue_mrpc_same_thing"


@pytest.fixture(scope="module")
def task():
    compat.install()
    load_tasks(["t0repro.tasks.demo"], into_seqio=True)
    (found,) = find_tasks(NAME)
    return found


def notes(task, lengths, **options) -> list[str]:
    lines: list[str] = []
    with heard_by(lines.append):
        note_truncation([task], "train", lengths, **{"use_cached": False, **options})
    return lines


def share(task, length: int) -> float:
    """The share of SeqIO's first inputs that are longer."""
    dataset = task.get_dataset(None, "train", use_cached=False, shuffle=False)
    sizes = [len(each["inputs"]) for each in dataset.take(EXAMPLES).as_numpy_iterator()]
    return sum(size > length for size in sizes) / len(sizes)


@pytest.mark.parametrize("length", [16, 30, 40])
def test_the_share_of_a_tasks_first_inputs_that_lose_tokens_is_seqios(task, length):
    percent = f"{100 * share(task, length):.0f}"
    lines = notes(task, {"inputs": length, "targets": 99})
    assert (percent == "0") == (lines == [])
    if lines:
        (line,) = lines
        wanted = f"note: inputs of more than {length} tokens lose their end: {percent}% of {NAME} "
        assert line == wanted + f"(first {EXAMPLES} examples of each)"


def test_nothing_is_said_where_nothing_is_cut_or_no_length_is_set(task):
    assert notes(task, {"inputs": 128, "targets": 32}) == notes(task, None) == []


def test_targets_are_counted_with_their_eos(task):
    (line,) = notes(task, {"inputs": 128, "targets": 1})
    assert re.match(f"note: targets of more than 1 token lose their end: 100% of {NAME}", line)


def test_a_cache_gives_the_same_line_and_one_that_fits_is_not_opened(task, tmp_path, monkeypatch):
    make(tmp_path, NAME, splits=("train",))
    add_cache_dirs([tmp_path])
    lengths = {"inputs": 16, "targets": 99}
    cached, rendered = notes(task, lengths, use_cached=True), notes(task, lengths)
    # The cache has the rows in another order, so its first ones are others.
    assert [re.sub(r"\d+%", "", line) for line in cached] == [
        re.sub(r"\d+%", "", line) for line in rendered
    ]
    assert not notes(task, {"inputs": 128, "targets": 32}, use_cached=True)


def test_a_task_without_a_prompt_is_counted_before_its_features_are_trimmed():
    compat.install()
    import seqio
    import tensorflow as tf

    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({"inputs": [[1] * 6] * 4, "targets": [[2]] * 4})

    feature = seqio.Feature(seqio.PassThroughVocabulary(8), dtype=tf.int32, add_eos=False)
    task = seqio.TaskRegistry.add(
        "six_tokens",
        seqio.FunctionDataSource(read, splits=["train"]),
        output_features={"inputs": feature, "targets": feature},
    )
    try:
        (line,) = notes(task, {"inputs": 5, "targets": 5})
        assert "inputs of more than 5 tokens lose their end: 100% of six_tokens" in line
        assert notes(task, {"inputs": 6, "targets": 5}) == []
    finally:
        seqio.TaskRegistry.remove("six_tokens")


def test_both_dialects_say_it_in_the_checks_that_a_start_and_a_dry_run_share(task, monkeypatch):
    from types import SimpleNamespace

    from t0repro.runs import preflight

    lengths = {"inputs": 16, "targets": 99}
    inputs = SimpleNamespace(
        mixture_or_task_name=NAME, split="train", use_cached=False, sequence_length=lengths
    )
    heard: list[str] = []
    with heard_by(heard.append):
        preflight._mesh_training_data(SimpleNamespace(inputs=inputs), jax=False)
    monkeypatch.setattr("t0repro.data.vocabulary_checks.check_vocabularies", lambda *_, **__: None)
    monkeypatch.setattr("t0repro.data.vocabulary_checks.check_rows", lambda *_, **__: None)
    data = SeqioDataConfig(NAME, lengths, "train", 1, False, 1)
    model = SimpleNamespace(decoder_only=False, vocab_size=1408)
    with heard_by(heard.append):
        list(preflight._data(data, model, (None, None), "train"))
        list(preflight._data(data, model, (None, None), "infer_eval"))
    assert [line for line in heard if "lose their end" in line] == notes(task, lengths) * 2
