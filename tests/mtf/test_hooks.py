"""metrics.jsonl and the progress line of the Mesh TensorFlow stack."""

import json

import numpy as np
import pytest
import tensorflow as tf

from t0repro.mtf import hooks
from t0repro.mtf.hooks import ProgressLine
from t0repro.mtf.metrics_file import MetricsFile
from t0repro.training.token_losses import count_targets

from ..helpers import tiny_models as tiny

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


PACKED = {
    "inputs": [[5, 1, 6, 1, 0, 0], [9, 8, 7, 6, 5, 1]],
    "inputs_segmentation": [[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1]],
    # One without EOS, as a cut text is, after which the marks of inputs and targets change places.
    "targets": [[4, 3, 8, 2, 0], [7, 1, 0, 0, 0]],
    "targets_segmentation": [[1, 1, 1, 2, 0], [1, 1, 0, 0, 0]],
}
UNPACKED = {name: PACKED[name] for name in ("inputs", "targets")}


@pytest.mark.parametrize("targets_only", [False, True])
@pytest.mark.parametrize(
    ("model_type", "batch"),
    [
        ("delimited_lm", PACKED),
        ("delimited_lm", UNPACKED),
        ("lm", {"targets": [[5, 1, 6, 1, 9, 1, 7, 1, 0], [5, 8, 1, 6, 7, 2, -3, 1, 0]]}),
    ],
)
def test_both_stacks_count_the_same_tokens_with_loss(model_type, batch, targets_only):
    config = tiny.model(
        model_type=model_type, num_encoder_layers=0, loss_on_targets_only=targets_only
    ).config
    arrays = {name: np.array(rows, np.int32) for name, rows in batch.items()}
    length = sum(arrays[side].shape[1] for side in ("inputs", "targets") if side in arrays)
    features = {name: tf.constant(rows) for name, rows in arrays.items()}
    marked = hooks._mark_scored(features, hooks._Loss(1.0, length, targets_only))
    assert np.count_nonzero(marked) == count_targets(arrays, config) > 0
