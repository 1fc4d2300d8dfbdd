import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from t0repro.event_files import event_writer
from t0repro.training.metrics import JsonLines, MetricLog, StepMetrics


def read_events(directory):
    """(step, tag, value) of every scalar that TensorBoard reads from a directory's event files."""
    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                # TensorBoard turns the old simple_value into a tensor of one float.
                number = np.frombuffer(value.tensor.tensor_content, np.float32)
                numbers = number if number.size else value.tensor.float_val
                found.append((event.step, value.tag, float(numbers[0])))
    return found


def test_tensorboard_reads_what_is_written(tmp_path):
    writer = event_writer(tmp_path)
    writer.write_scalars(1, {"train/loss": 2.5, "train/learning_rate": 0.125})
    writer.write_scalars(1_112_200, {"train/loss": -0.75})
    writer.close()
    assert read_events(tmp_path) == [
        (1, "train/loss", 2.5),
        (1, "train/learning_rate", 0.125),
        (1_112_200, "train/loss", -0.75),
    ]


def test_a_line_is_never_appended_to_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"split": "eval", "step": 1}) + "\n"
    for torn in (whole + '{"split": "ev', '{"split": "ev', "", whole):
        path.write_text(torn)
        writer = JsonLines(path)
        writer.write({"split": "eval", "step": 2})
        writer.close()
        kept = whole if torn.startswith(whole) else ""
        assert path.read_text() == kept + '{"split": "eval", "step": 2}\n', torn


def test_an_evaluation_that_starts_over_writes_its_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"split": "eval", "step": 2, "task": task, "accuracy": 0.5} for task in ("a", "b")]
    train = {"split": "train", "step": 1}
    for count in (1, 2):  # killed after its first task, then repeated
        lines = JsonLines(path)
        for row in (train, *rows[:count]):
            lines.write(row)
        lines.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == [train, rows[0], train, rows[1]]


def test_training_lines_of_later_steps_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"split": "train", "step": step}) for step in (1, 2, 3)]
    path.write_text("\n".join(lines) + "\n" + '{"split": "train", "st')
    writer = JsonLines(path, start_step=2)
    writer.write({"split": "train", "step": 3, "loss": 1.5})
    writer.close()
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[-1]["loss"] == 1.5


def test_metrics_go_to_the_lines_to_tensorboard_and_to_further_writers(tmp_path):
    class Further:
        def __init__(self):
            self.written = []

        def write_scalars(self, step, scalars):
            self.written.append((step, dict(scalars)))

        def flush(self):
            self.written.append("flush")

        def close(self):
            self.written.append("close")

    further = Further()
    manager = MetricLog(tmp_path, 0, [event_writer(tmp_path), further])
    manager.write_step(
        StepMetrics(
            4, 0.5, 0.25, target_tokens=3, examples=2, seconds=0.125, loss_per_target_token=0.75
        )
    )
    manager.write("validation", 4, {"token_accuracy": 0.75})
    manager.write("validation", 4, {"accuracy": 50.0}, task="a_task")
    manager.flush()
    manager.close()
    expected = {
        "train/loss": 0.5,
        "train/learning_rate": 0.25,
        "train/target_tokens": 3,
        "train/examples": 2,
        "train/seconds": 0.125,
        "train/input_tokens": 0,
        "train/input_wait_seconds": 0.0,
        "train/loss_per_target_token": 0.75,
    }
    validation = {"validation/token_accuracy": 0.75}
    task = {"eval/a_task/accuracy": 50.0}
    assert further.written == [(4, expected), (4, validation), (4, task), "flush", "close"]
    assert read_events(tmp_path) == [
        (4, tag, pytest.approx(x)) for tag, x in (expected | validation | task).items()
    ]
    first, second, third = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["split"] == "train" and first["loss"] == 0.5
    assert second == {"split": "validation", "step": 4, "token_accuracy": 0.75}
    assert third == {"split": "validation", "step": 4, "task": "a_task", "accuracy": 50.0}
