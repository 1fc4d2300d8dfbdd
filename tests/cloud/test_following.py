"""A run's lines and files reach a tracker once, over restarts and failures."""

import json
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from t0repro.cloud.trackers import follower, table
from t0repro.cloud.trackers.follower import TRACKING_FILE, track
from t0repro.cloud.trackers.table import TrackerName
from t0repro.cloud.trackers.tracker import TrackedRun
from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.training.metrics import JsonLines, MetricLog


class Recorder:
    """A tracker that keeps what it is told, as a server would, over several starts."""

    def __init__(self):
        self.run_id, self.opened_with = "run-1", []
        self.values, self.files, self.outcomes = [], {}, []
        self.down = False
        self._waiting = []

    def open(self, run, run_id):
        self.opened_with.append(run_id)
        self.parameters = run.flat_parameters()
        return self

    def log(self, step, values):
        self._waiting.append((step, values))

    def flush(self):
        if self.down:
            raise UserError("the server is down")
        self.values += self._waiting
        self._waiting = []

    def send_file(self, path, name):
        self.files[name] = path.read_text()

    def close(self, outcome):
        self.outcomes.append(outcome)
        # What a dead process had not sent is gone with it.
        self._waiting = []


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    module = types.SimpleNamespace(open_run=recorder.open)
    monkeypatch.setitem(sys.modules, "t0repro.cloud.trackers.mlflow_tracker", module)
    monkeypatch.setattr(table, "TRACKER_PACKAGES", dict.fromkeys(TrackerName))
    return recorder


def follow(folder, *, parameters=None, files=("*.gin", "out/*.txt")):
    run = TrackedRun(folder, parameters or {}, files)
    return track([TrackerName.MLFLOW], run)


def train(folder, first, last, start_step):
    lines = JsonLines(folder / "metrics.jsonl", start_step)
    for step in range(first, last + 1):
        lines.write({"split": "train", "step": step, "loss": step / 10})
    lines.close()


def steps(recorder):
    return [step for step, values in recorder.values if "train/loss" in values]


def test_every_line_and_file_arrives_under_its_tag(tmp_path, recorder):
    with follow(tmp_path, parameters={"model": {"d_model": 4}, "seed": None}):
        metrics = MetricLog(tmp_path)
        metrics.write("train", 1, {"loss": 2.5})
        metrics.write("eval", 1, {"accuracy": 50.0}, task="rte")
        metrics.close()
        (tmp_path / "config.gin").write_text("A = 1")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "a.txt").write_text("text")
    assert recorder.values == [(1, {"train/loss": 2.5}), (1, {"eval/rte/accuracy": 50.0})]
    assert recorder.files == {"config.gin": "A = 1", "out/a.txt": "text"}
    assert recorder.parameters == {"model.d_model": 4}
    assert recorder.outcomes == ["finished"]


def test_a_run_that_starts_again_continues_without_repeating(tmp_path, recorder):
    with pytest.raises(KeyboardInterrupt), follow(tmp_path):
        train(tmp_path, 1, 5, 0)
        raise KeyboardInterrupt
    # The last checkpoint was of step 3: the run's lines after it are written again.
    with follow(tmp_path):
        train(tmp_path, 4, 8, 3)
    assert steps(recorder) == list(range(1, 9))
    assert recorder.opened_with == [None, "run-1"]
    assert recorder.outcomes == ["stopped", "finished"]


def test_checkpoints_may_be_evaluated_in_any_order(tmp_path, recorder):
    for step in (20, 10, 20):
        with follow(tmp_path):
            metrics = MetricLog(tmp_path)
            metrics.write("eval", step, {"accuracy": 1.0}, task="rte")
            metrics.close()
    assert [step for step, _ in recorder.values] == [20, 10]


def test_what_a_tracker_did_not_take_is_sent_by_the_next_start(tmp_path, recorder):
    recorder.down = True
    said = []
    run = TrackedRun(tmp_path, {}, ())
    with heard_by(said.append), track([TrackerName.MLFLOW], run):
        train(tmp_path, 1, 3, 0)
    assert any("the server is down" in line for line in said)
    recorder.down = False
    with follow(tmp_path):
        train(tmp_path, 4, 4, 3)
    assert steps(recorder) == [1, 2, 3, 4]


def test_lines_are_sent_while_the_run_goes_on_but_no_half_line(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(follower, "_SECONDS", 0.01)
    with follow(tmp_path), open(tmp_path / "metrics.jsonl", "w") as file:
        file.write('{"split": "train", "step": 1, "loss": 1.0}\n{"split": "tr')
        file.flush()
        while not recorder.values:
            pass
        assert steps(recorder) == [1]
        file.write('ain", "step": 2, "loss": 1.0}\n')
    assert steps(recorder) == [1, 2]


def test_a_run_that_fails_is_said_to_have_failed(tmp_path, recorder):
    with pytest.raises(ValueError), follow(tmp_path):
        raise ValueError
    assert recorder.outcomes == ["failed"]


def test_a_damaged_tracking_file_is_named(tmp_path, recorder):
    (tmp_path / TRACKING_FILE).write_text("{")
    with pytest.raises(UserError, match="JSON") as caught, follow(tmp_path):
        pass
    assert TRACKING_FILE in str(caught.value)


def test_tensorboard_shows_settings_and_texts_beside_the_metrics(tmp_path):
    run = TrackedRun(tmp_path, {"steps": 3}, ("*.gin",))
    with track([TrackerName.TENSORBOARD], run):
        (tmp_path / "config.gin").write_text("A = 1")
    events = EventAccumulator(str(tmp_path)).Reload()
    texts = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    texts = {tag.removesuffix("/text_summary"): text for tag, text in texts.items()}
    assert '"steps": 3' in texts["parameters"]
    assert texts["config.gin"] == "    A = 1"
    assert texts["outcome"] == "    finished"
    assert json.loads((tmp_path / TRACKING_FILE).read_text())["tensorboard"]["run_id"]
