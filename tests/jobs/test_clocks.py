"""A wall clock that jumps forward and backward ends no job early or late, nor mixes results."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t0repro.jobs.journal import JobJournal, Point, read_status, to_json

from .trainings import curve, make_evaluator, save_checkpoints

ROOT = Path(__file__).resolve().parents[2]
LIMIT, PAUSE = 1.5, 2.0

# Python runs this before anything else: each question for the time gets another day's answer.
JUMPS = """
import itertools, time
offsets = itertools.cycle([0.0, 86400.0, -86400.0, 3.0, -500 * 86400.0])
real_time, real_ns = time.time, time.time_ns
time.time = lambda: real_time() + next(offsets)
time.time_ns = lambda: real_ns() + int(next(offsets)) * 10**9
"""
# The mixture "hangs" has to be ended by the time limit, twice; "m" is evaluated.
CONTROLLER = f"""
import sys
from pathlib import Path
from t0repro.jobs.job import Limits
from tests.jobs.trainings import work_once
work_once(
    Path(sys.argv[1]), sys.argv[2], "hangs", "m", max_parallel=2, max_failures=2,
    retry_seconds={PAUSE}, limits=Limits(seconds={LIMIT} if sys.argv[3] == "hangs" else None),
)
"""


def start(folder, *arguments):
    (folder / "jumps").mkdir(exist_ok=True)
    (folder / "jumps" / "sitecustomize.py").write_text(JUMPS)
    return subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(folder / "model"), *arguments],
        env=os.environ | {"PYTHONPATH": str(folder / "jumps")},
        cwd=ROOT,
    )


def test_the_clock_does_jump(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(JUMPS)
    code = (
        "import time; times = [time.time() for _ in range(6)];"
        "assert times != sorted(times) and max(times) - min(times) > 500 * 86400"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, check=True)


def test_time_limits_and_pauses_hold(tmp_path):
    save_checkpoints(tmp_path / "model", 3)
    sleeps = f"{sys.executable} -c 'import time; time.sleep(600)'"
    started = time.monotonic()
    assert start(tmp_path, sleeps, "hangs").wait(120) == 0
    took = time.monotonic() - started
    status = read_status(tmp_path / "model")
    for point, progress in status.items():
        assert progress.state == "given up" and progress.attempt == 2, point
        assert progress.reason == f"it took longer than {LIMIT} s"
    # Neither a day nor nothing: two jobs to their limit, with the pause between.
    assert 2 * LIMIT + PAUSE < took < 100


@pytest.mark.slow
def test_what_crosses_a_restart_holds(tmp_path):
    """Killed in the middle of a job, and started again on another day."""
    save_checkpoints(tmp_path / "model", 3, 6)
    evaluator = " ".join(make_evaluator(tmp_path))
    dying = start(tmp_path, evaluator, "m")
    journal = tmp_path / "model" / "auxiliary" / "journal.jsonl"
    while not (journal.exists() and '"succeeded"' in journal.read_text()):
        assert dying.poll() is None
        time.sleep(0.02)
    dying.send_signal(signal.SIGKILL)
    dying.wait()
    assert start(tmp_path, evaluator, "m").wait(120) == 0
    progress = JobJournal(tmp_path / "model" / "auxiliary").progress
    assert {each.state for each in progress.values()} == {"succeeded"} and len(progress) == 4
    assert progress[Point(3, "m")].failures == 0
    assert curve(tmp_path / "model" / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]
    rows = to_json(read_status(tmp_path / "model"))
    assert all(0 <= row["seconds"] < 100 for row in rows)
