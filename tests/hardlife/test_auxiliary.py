"""Auxiliary jobs through deaths and full disks: each point of the curve is there once."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from t0repro.jobs.journal import JobJournal
from t0repro.training.checkpoints import latest_step

from ..jobs.trainings import curve, make_evaluator, save_checkpoints

pytestmark = pytest.mark.hardlife

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("T0REPRO_DEATHS", "50"))
LAST_STEP, KEPT = 40, 2
MIXTURES = ("a", "b")

# Continues from its latest checkpoint, saves every second step and keeps the two latest.
TRAINING = f"""
import sys, time
from t0repro.config.checkpoints import SaveConfig
from t0repro.training.checkpoints import latest_step, save_checkpoint
from t0repro.training.checkpoints import remove_interrupted_saves
from t0repro.training.checkpoints import remove_superfluous
from tests.helpers.tiny_models import new_state
remove_interrupted_saves(sys.argv[1])
state = new_state()
for step in range((latest_step(sys.argv[1]) or 0) + 2, {LAST_STEP} + 1, 2):
    time.sleep(1.0)
    save_checkpoint(sys.argv[1], state.replace(step=state.step * 0 + step))
    remove_superfluous(sys.argv[1], SaveConfig(None, (), {KEPT}, None, False, None, None), {{}})
"""
CONTROLLER = """
import sys
from pathlib import Path
from tests.jobs.trainings import controller
folder = Path(sys.argv[1])
done = (folder.parent / "training has ended").exists
jobs = controller(folder, sys.argv[2], *sys.argv[3:], max_parallel=2, max_failures=100)
jobs.run(lambda: not done())
"""


def test_after_many_deaths_every_point_is_there_once(tmp_path, moments, outcome):
    model_dir, evaluator = tmp_path / "model", " ".join(make_evaluator(tmp_path))
    slow = f"sh -c 'sleep 0.$(($TRAIN_STEPS % 10)); {evaluator}'"
    model_dir.mkdir()
    start = {
        "training": lambda: _python(TRAINING, str(model_dir)),
        "controller": lambda: _python(CONTROLLER, str(model_dir), slow, *MIXTURES),
    }
    alive = {name: begin() for name, begin in start.items()}
    killed = {"training": 0, "controller": 0, "worker": 0, "command": 0}
    while sum(killed.values()) < KILLS:
        time.sleep(moments.uniform(0.2, 2.0))
        kind = moments.choice(list(killed))
        killed[kind] += _kill(kind, alive, moments)
        for name, process in alive.items():
            if process.poll() is not None and not (name == "training" and _is_trained(model_dir)):
                alive[name] = start[name]()
    while not _is_trained(model_dir):
        if alive["training"].poll() is not None:
            alive["training"] = start["training"]()
        time.sleep(0.2)
    alive["training"].wait()
    (tmp_path / "training has ended").touch()
    while alive["controller"].wait() != 0:
        alive["controller"] = start["controller"]()

    points = _check_results(model_dir)
    deaths = ", ".join(f"{name} {count}" for name, count in killed.items())
    outcome(f"auxiliary jobs: {sum(killed.values())} deaths ({deaths}), then {points}")


def _python(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT)


def _is_trained(model_dir: Path) -> bool:
    return latest_step(model_dir) == LAST_STEP


def _kill(kind: str, alive: dict[str, subprocess.Popen[bytes]], dice: random.Random) -> bool:
    """Kills one process of a kind; whether there was one."""
    if kind in alive:
        if alive[kind].poll() is not None:
            return False
        alive[kind].send_signal(signal.SIGKILL)
        alive[kind].wait()
        return True
    until = time.monotonic() + 4.0
    while time.monotonic() < until:  # jobs are short, and not always there
        with contextlib.suppress(psutil.Error):
            for worker in psutil.Process(alive["controller"].pid).children():
                victims = [worker] if kind == "worker" else worker.children()
                if victims:
                    dice.choice(victims).kill()
                    return True
        time.sleep(0.02)
    return False


def _check_results(model_dir: Path) -> str:
    progress = JobJournal(model_dir / "auxiliary").progress
    # What the training deleted while no controller lived is named as missed, and is not a success.
    missed = {point for point, each in progress.items() if each.state == "missed"}
    succeeded = {point for point, each in progress.items() if each.state == "succeeded"}
    assert missed | succeeded == set(progress)
    assert {point.mixture for point in succeeded} == set(MIXTURES)
    for mixture in MIXTURES:
        steps = sorted(point.step for point in succeeded if point.mixture == mixture)
        assert LAST_STEP in steps
        undisturbed = [(step, round(1 - 1 / (1 + step), 4)) for step in steps]
        assert curve(model_dir / "inference_eval" / mixture) == undisturbed
        results = model_dir / "auxiliary" / mixture / "results"
        assert {path.name for path in results.iterdir()} == {
            f"{mixture}_{step}_predictions" for step in steps
        }
    assert not any((model_dir / "auxiliary" / "pins").iterdir())
    return f"{len(succeeded)} points, each once; {len(missed)} missed"


def test_on_a_full_disk_the_controller_says_so_and_with_more_room_goes_on(
    on_tmpfs, tmp_path, outcome
):
    said, filled = [], 0
    for spare in (0, 4096, 20_000):  # after the checkpoints; a page of a file system is 4 kB
        disk = on_tmpfs(8 << 20)
        model_dir = disk / "model"
        save_checkpoints(model_dir, 3, 6)
        evaluator = make_evaluator(tmp_path)
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - spare))
        full = _aux(model_dir, evaluator)
        assert full.returncode in (1, 2), full.stdout + full.stderr
        assert "Traceback" not in full.stderr
        filled += full.returncode == 2
        said.append(full.stdout + full.stderr)
        (disk / "other").unlink()
        again = _aux(model_dir, evaluator)
        assert again.returncode == 0, again.stdout + again.stderr
        assert curve(model_dir / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]
    assert filled and any("The disk is full" in each for each in said), said
    outcome(f"auxiliary jobs: full disk: {len(said)} sizes, each said so and went on")


def _aux(model_dir: Path, evaluator: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-P", "-m", "t0repro.cli", "aux", f"--model_dir={model_dir}"),
            *("--auxiliary_job_mixtures=m", "--once", "--poll_seconds=0.1", "--max_failures=1"),
            f"--auxiliary_job_build_target_path={' '.join(evaluator)}",
            "--time_limit=60",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
