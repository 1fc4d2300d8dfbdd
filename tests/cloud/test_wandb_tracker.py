"""wandb's own client writes a run, without a network."""

import json
import struct
import time

import pytest

from t0repro.cloud.trackers.follower import track
from t0repro.cloud.trackers.table import TrackerName
from t0repro.cloud.trackers.tracker import TrackedRun
from t0repro.training.metrics import MetricLog

wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
pytestmark = pytest.mark.slow


BLOCK = 32768  # of the log format of LevelDB, in which the client writes


def records(folder):
    """What the client kept for the server, in order."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if BLOCK - at % BLOCK < 7:  # no header fits into the rest of a block
                at += BLOCK - at % BLOCK
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                yield record
                whole = b""


def ended_records(folder):
    """All records of a run; wandb's own process writes the last ones after the run's end."""
    for _ in range(300):
        found = list(records(folder))
        if any(each.HasField("exit") for each in found):
            break
        time.sleep(0.1)
    return found


def test_an_offline_run_holds_settings_metrics_and_files(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "my-run"
    with track([TrackerName.WANDB], TrackedRun(folder, {"model": {"d_model": 8}}, ("*.gin",))):
        metrics = MetricLog(folder, 0)
        for step in (1, 2):
            metrics.write("train", step, {"loss": 1 / step})
        metrics.write("eval", 1, {"accuracy": 40.0}, task="rte")  # of an earlier checkpoint
        metrics.close()
        (folder / "config.gin").write_text("A = 1")
    found = ended_records(folder)
    (run,) = (each.run for each in found if each.HasField("run"))
    assert run.display_name == "my-run"
    config = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert config["model.d_model"] == 8
    rows = [
        {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in each.history.item
        }
        for each in found
        if each.HasField("history")
    ]
    kept = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
    assert kept == [
        {"train/loss": 1.0, "global_step": 1},
        {"train/loss": 0.5, "global_step": 2},
        {"eval/rte/accuracy": 40.0, "global_step": 1},
    ]
    assert list(folder.glob("wandb/offline-run-*/files/config.gin"))
    # Its client's words on how it keeps files are of no use to who trains.
    assert "WARNING" not in capfd.readouterr().err
