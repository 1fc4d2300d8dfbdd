"""metrics.jsonl and the progress line of the Mesh TensorFlow stack."""

import json

import pytest

from t0repro.mtf import hooks
from t0repro.mtf.hooks import MetricsFile, ProgressLine

pytestmark = pytest.mark.mtf


def _lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_the_training_lines_that_it_will_repeat(tmp_path):
    path = tmp_path / "model" / "metrics.jsonl"
    metrics = MetricsFile(str(path))
    for step in (1, 2, 3):
        metrics.append({"split": "train", "step": step, "loss": 0.5})
    metrics.append({"split": "validation", "step": 3, "task": "t", "accuracy": 50.0})
    with open(path, "a") as file:
        file.write('{"split": "tra')  # cut by an interruption
    metrics.drop_training_after(1)
    assert [(line["split"], line["step"]) for line in _lines(path)] == [
        ("train", 1),
        ("validation", 3),
    ]


def test_a_line_is_never_appended_to_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"split": "validation", "step": 1}\n{"split": "vali')
    metrics = MetricsFile(str(path))
    metrics.append({"split": "validation", "step": 2})
    metrics.append({"split": "validation", "step": 3})
    assert [line["step"] for line in _lines(path)] == [1, 2, 3]


def test_dropping_from_a_file_that_is_not_there_writes_none(tmp_path):
    MetricsFile(str(tmp_path / "metrics.jsonl")).drop_training_after(3)
    assert not list(tmp_path.iterdir())


def test_progress_off_a_terminal_is_one_line_now_and_then_and_one_at_the_end(capsys):
    progress = ProgressLine(last_step=100)
    for step in range(1, 101):
        progress.show(step, 1.25, examples=3, tokens=10, per_token=2.5)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "step 1 of 100, loss 2.5000 per target token"
    assert lines[1].startswith("step 100 of 100, loss 2.5000 per target token, ")
    assert lines[1].endswith("0:00:00 left")
    assert "examples/s" in lines[1]
    assert "target tokens/s" in lines[1]


def test_in_a_bucket_tensorflow_alone_writes(monkeypatch, tmp_path, capsys):
    for name in ("record_training", "record_perplexity", "silence_loss_print"):
        monkeypatch.setattr(hooks, name, lambda *_: None)
    monkeypatch.chdir(tmp_path)
    hooks.install("gs://bucket/run")
    assert "not written to gs://bucket/run" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
