"""The list of training runs shows the status of each."""

import dataclasses
import datetime
import json
import os
import socket
import subprocess

import pytest
import typer
from typer.testing import CliRunner

from t0repro.cli.training_runs import runs
from t0repro.errors import UserError
from t0repro.reports.training_runs import describe_left_out, find_runs, run_rows, to_json
from t0repro.training.run_state import RUN_STATE_FILE, RunState

RUNNING = RunState(
    state="running",
    reason=None,
    first_step=0,
    step=1200,
    last_step=3000,
    loss=0.31,
    loss_per_target_token=2.34567,
    target_tokens=98765,
    examples=1000,
    steps_per_second=0.5,
    target_tokens_per_second=1234.5,
    seconds_left=3723.4,
    started="2026-11-22T00:00:00+00:00",
    updated="",  # see write
    host=socket.gethostname(),
    process=os.getpid(),
)


def write(folder, **changes):
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    state = dataclasses.replace(RUNNING, **{"updated": now, **changes})
    (folder / RUN_STATE_FILE).write_text(json.dumps(dataclasses.asdict(state)))


def test_each_training_is_listed_with_its_state_and_speed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    write(tmp_path / "a")
    write(tmp_path / "b", state="finished", step=3000, seconds_left=0.0)
    write(
        tmp_path / "b" / "auxiliary" / "m" / "step_3" / "output", state="stopped", reason="SIGTERM"
    )
    write(tmp_path / "c", process=dead.pid)
    unknown = {"target_tokens_per_second": None, "seconds_left": None}
    write(tmp_path / "d", loss=None, loss_per_target_token=None, **unknown)
    write(tmp_path / "e", loss_per_target_token=None)
    write(tmp_path / "d" / "checkpoint_3")  # a copy, and no training run
    runs = find_runs(tmp_path)
    listed = {
        str(path.relative_to(tmp_path)): row[1:]
        for path, row in zip(runs, run_rows(runs), strict=True)
    }
    assert listed == {
        "a": ("running", "1,200 of 3,000", "2.3457", "98,765", "1,234", "1:02:03"),
        "b": ("finished", "3,000 of 3,000", "2.3457", "98,765", "1,234", ""),
        "b/auxiliary/m/step_3/output": (
            "stopped: SIGTERM", "1,200 of 3,000", "2.3457", "98,765", "1,234", "",
        ),
        "c": (
            "failed: its process is gone: it was killed, or the machine went down",
            "1,200 of 3,000", "2.3457", "98,765", "1,234", "",
        ),
        "d": ("running", "1,200 of 3,000", "", "98,765", "", ""),
        "e": (
            "running", "1,200 of 3,000", "0.3100 in its own unit", "98,765", "1,234", "1:02:03",
        ),
    }  # fmt: skip
    written = json.loads((tmp_path / "a" / RUN_STATE_FILE).read_text())
    assert to_json(runs)[0] == {"folder": str(tmp_path / "a")} | written


def test_a_training_elsewhere_that_has_been_silent_says_for_how_long(tmp_path):
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=3)
    write(tmp_path / "a", host="another machine", updated=before.isoformat(timespec="seconds"))
    ((_, state, *_),) = run_rows(find_runs(tmp_path))
    assert state.startswith("running, silent for 3:00:")


def test_a_folder_without_trainings_is_named(tmp_path):
    with pytest.raises(UserError, match="no training runs here"):
        find_runs(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="a file, not a folder"):
        find_runs(tmp_path / "a")
    with pytest.raises(UserError, match="no such folder"):
        find_runs(tmp_path / "b")


def test_mesh_tensorflow_runs_are_said_to_be_left_out(tmp_path):
    write(tmp_path / "jax")
    assert describe_left_out(tmp_path) == ""
    (tmp_path / "mtf").mkdir()
    (tmp_path / "mtf" / "model.ckpt-20.index").touch()
    app = typer.Typer()
    app.command()(runs)
    shown = CliRunner().invoke(app, [str(tmp_path)])
    assert shown.exit_code == 0
    assert "Not listed: 1 folder with Mesh TensorFlow checkpoints" in shown.stderr
    assert str(tmp_path / "mtf") in shown.stderr and "Not listed" not in shown.stdout
    assert "t0repro plot" not in shown.stderr  # there is no curve to draw
    (tmp_path / "mtf" / "metrics.jsonl").touch()
    assert f"`t0repro plot {tmp_path / 'mtf'}` draws curves" in describe_left_out(tmp_path)
    (tmp_path / "mtf" / "b").mkdir()
    (tmp_path / "mtf" / "b" / "model.ckpt-20.index").touch()
    assert "draws curves of the 1 that recorded metrics" in describe_left_out(tmp_path)
    with pytest.raises(UserError, match="no training runs here. Not listed: 2 folders"):
        find_runs(tmp_path / "mtf")
