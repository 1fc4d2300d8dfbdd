"""MLflow's own server on loopback takes a run, its settings, metrics and files."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from t0repro.cloud.trackers.follower import track
from t0repro.cloud.trackers.table import TrackerName
from t0repro.cloud.trackers.tracker import TrackedRun
from t0repro.errors import UserError
from t0repro.training.metrics import MetricLog

mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
pytestmark = [
    pytest.mark.slow,
    # Its client leaves the files that it uploads to the garbage collector.
    pytest.mark.filterwarnings("ignore:(?s)Exception ignored in.*FileIO"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    command += ["--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (
        open(folder / "log", "w") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True) as it,
    ):
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                assert it.poll() is None, (folder / "log").read_text()
                time.sleep(0.5)
        yield url
        os.killpg(it.pid, 15)


@pytest.fixture(autouse=True)
def address(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)


def write(folder, steps):
    with track([TrackerName.MLFLOW], TrackedRun(folder, {"model": {"d_model": 8}}, ("*.gin",))):
        metrics = MetricLog(folder, steps[0] - 1)
        for step in steps:
            metrics.write("train", step, {"loss": 1 / step})
        metrics.write("eval", steps[-1], {"accuracy": 40.0}, task="rte: yes?")
        metrics.close()
        (folder / "config.gin").write_text("A = 1")


def test_the_server_has_one_run_with_everything_after_two_starts(tmp_path, server):
    folder = tmp_path / "my-run"
    write(folder, [1, 2, 3])
    write(folder, [3, 4])  # resumed from the checkpoint of step 2
    client = mlflow.MlflowClient(server)
    experiment = client.get_experiment_by_name("t0repro")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "my-run"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"model.d_model": "8"}
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in losses] == [(k, 1 / k) for k in (1, 2, 3, 4)]
    accuracy = client.get_metric_history(run.info.run_id, "eval/rte_ yes_/accuracy")
    assert [each.step for each in accuracy] == [3, 4]
    downloaded = client.download_artifacts(run.info.run_id, "config.gin", str(tmp_path))
    assert open(downloaded).read() == "A = 1"


def test_a_server_that_is_not_there_is_named_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = TrackedRun(tmp_path / "run", {}, ())
    with (
        pytest.raises(UserError, match="MLFLOW_TRACKING_URI"),
        track([TrackerName.MLFLOW], run),
    ):
        raise AssertionError("the run must not begin")
    assert not run.folder.exists()
