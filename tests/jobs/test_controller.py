"""Each checkpoint with each mixture: one success, one point of the curve, whatever dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from t0repro.errors import UserError
from t0repro.jobs.journal import JobJournal, Point, curves, read_status, to_json
from t0repro.jobs.local_launcher import LocalLauncher
from t0repro.training.checkpoints import checkpoint_path

from .trainings import controller, curve, save_checkpoints, work_once


def runs(tmp_path) -> list[str]:
    return sorted((tmp_path / "runs.txt").read_text().splitlines())


def test_every_checkpoint_is_evaluated_once_with_each_mixture(tmp_path, evaluator):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3, 6)
    assert work_once(model_dir, evaluator, "a", "b")
    assert runs(tmp_path) == ["3 a", "3 b", "6 a", "6 b"]
    assert work_once(model_dir, evaluator, "a", "b")  # nothing is left to do
    save_checkpoints(model_dir, 9)
    assert work_once(model_dir, evaluator, "a", "b")
    assert runs(tmp_path) == ["3 a", "3 b", "6 a", "6 b", "9 a", "9 b"]
    # In the run's TensorBoard, and with the files of all steps together.
    for mixture in "ab":
        assert curve(model_dir / "inference_eval" / mixture) == [(3, 0.75), (6, 0.8571), (9, 0.9)]
        results = model_dir / "auxiliary" / mixture / "results"
        assert {path.name for path in results.iterdir()} == {
            f"{mixture}_{step}_predictions" for step in (3, 6, 9)
        }
    # TensorBoard reads every folder below the run's, and finds no point twice.
    assert len(list(model_dir.rglob("*tfevents*"))) == 6
    status = read_status(model_dir)
    assert [each.metric for each in status.values()][0] == ("accuracy", 0.75)
    assert len(curves(status)) == 2 and "accuracy  ▁" in curves(status)[0]
    assert to_json(status)[0] | {"seconds": 0} == {
        "step": 3, "mixture": "a", "state": "succeeded", "attempts": 1, "seconds": 0,
        "metric": {"accuracy": 0.75}, "reason": None,
    }  # fmt: skip


def test_mesh_tensorflows_checkpoints_are_taken_too(tmp_path, evaluator):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 4, mesh=True)
    assert work_once(model_dir, evaluator)
    assert runs(tmp_path) == ["4 m"] and curve(model_dir / "inference_eval" / "m") == [(4, 0.8)]


def test_a_checkpoint_that_is_half_written_is_never_taken(tmp_path, evaluator):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3)
    os.rename(checkpoint_path(model_dir, 3), model_dir / ".checkpoint_3.1234.tmp")
    assert work_once(model_dir, evaluator) and not (tmp_path / "runs.txt").exists()
    os.rename(model_dir / ".checkpoint_3.1234.tmp", checkpoint_path(model_dir, 3))
    next(path for path in checkpoint_path(model_dir, 3).rglob("*") if path.is_file()).unlink()
    with pytest.raises(UserError):
        work_once(model_dir, evaluator)
    assert not (tmp_path / "runs.txt").exists()


def test_a_checkpoint_in_work_outlives_the_trainings_retention(tmp_path, evaluator):
    """The job waits until the training has deleted its checkpoint, then evaluates it."""
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3)
    waits = [
        *("sh", "-c"),
        f"'while [ -e {checkpoint_path(model_dir, 3)} ]; do sleep 0.05; done;"
        f" {' '.join(evaluator)}'",
    ]
    going = threading.Event()
    going.set()
    working = threading.Thread(
        target=lambda: controller(model_dir, waits).run(going.is_set), daemon=True
    )
    working.start()
    while not (model_dir / "auxiliary" / "m" / "step_3").exists():
        time.sleep(0.02)
    shutil.rmtree(checkpoint_path(model_dir, 3))
    going.clear()
    working.join(60)
    assert runs(tmp_path) == ["3 m"]
    assert not any((model_dir / "auxiliary" / "pins").iterdir())  # released after


def test_a_pinned_checkpoint_still_lies_beside_the_settings_of_its_model(tmp_path):
    """What an evaluation reads beside a checkpoint, such as the activation, is pinned with it."""
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3)
    (model_dir / "operative_config.gin").write_text("its settings")
    shown = tmp_path / "shown"
    assert work_once(
        model_dir, f"sh -c 'cat $INITIAL_CHECKPOINT_PATH/../operative_config.gin > {shown}'"
    )
    assert shown.read_text() == "its settings"


def test_failures_are_retried_up_to_a_limit_and_their_logs_end_is_shown(tmp_path):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3)
    counter = tmp_path / "count"
    script = tmp_path / "fails.py"
    script.write_text(
        f"import pathlib\np = pathlib.Path({str(counter)!r})\n"
        "n = int(p.read_text()) if p.exists() else 0\np.write_text(str(n + 1))\n"
        "print('about to fail')\nraise SystemExit(0 if n >= 2 else 7)\n"
    )
    said: list[str] = []
    assert work_once(model_dir, f"{sys.executable} {script}", said=said, max_failures=3)
    assert read_status(model_dir)[Point(3, "m")].attempt == 3
    assert sum("failed: exit code 7" in line and "| about to fail" in line for line in said) == 2
    counter.unlink()
    save_checkpoints(model_dir, 6)
    assert not work_once(model_dir, f"{sys.executable} {script}", said=said, max_failures=2)
    assert read_status(model_dir)[Point(6, "m")].state == "given up"
    assert counter.read_text() == "2"
    # Started again, it takes up what was given up.
    assert work_once(model_dir, f"{sys.executable} {script}", said=said, max_failures=2)
    assert counter.read_text() == "3"


class PreemptingLauncher(LocalLauncher):
    """Kills its first jobs together with their workers, as an engine that needs the machine."""

    def __init__(self, times: int):
        super().__init__()
        self._left = times

    def submit(self, job):
        super().submit(job)
        if self._left:
            self.cancel(job)

    def state(self, job):
        if not self._left:
            return super().state(job)
        self._left -= 1
        return "preempted"


def test_a_job_whose_machine_is_taken_away_is_started_again_and_did_not_fail(tmp_path, evaluator):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3)
    said: list[str] = []
    waits = ["sh", "-c", "'sleep 0.5;", *evaluator, "'"]  # long enough to be killed first
    assert work_once(model_dir, waits, said=said, launcher=PreemptingLauncher(4), max_failures=1)
    assert runs(tmp_path) == ["3 m"]
    assert read_status(model_dir)[Point(3, "m")].attempt == 5
    assert sum("interrupted by its launcher" in line for line in said) == 4


def test_metrics_arrive_in_the_order_of_steps(tmp_path, evaluator):
    """The first checkpoint's job ends last; later ones' metrics wait for it."""
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3, 6, 9)
    late = tmp_path / "late.sh"
    late.write_text(
        'case "$TRAIN_STEPS" in 3) while [ "$(wc -l < ' + evaluator[-1] + ')" != 2 ];'
        f" do sleep 0.05; done;; esac\n{' '.join(evaluator)}\n"
    )
    (tmp_path / "runs.txt").touch()
    assert work_once(model_dir, f"sh {late} {{OUTPUT}}", max_parallel=3)
    assert (tmp_path / "runs.txt").read_text().splitlines()[-1] == "3 m"
    assert [step for step, _ in curve(model_dir / "inference_eval" / "m")] == [3, 6, 9]
    journal = (model_dir / "auxiliary" / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in journal]
    assert [each["step"] for each in events if each["event"] == "published"] == [3, 6, 9]


def test_a_second_controller_on_a_folder_says_so_and_stops(tmp_path):
    model_dir = tmp_path / "model"
    going = threading.Event()
    going.set()
    first = threading.Thread(
        target=lambda: controller(model_dir, "true").run(going.is_set), daemon=True
    )
    first.start()
    while not (model_dir / "auxiliary" / "settings.json").exists():
        time.sleep(0.02)
    with pytest.raises(UserError, match="Another run holds this folder for auxiliary jobs"):
        work_once(model_dir, "true")
    going.clear()
    first.join(30)


def test_other_settings_are_refused_while_results_of_the_first_are_there(tmp_path):
    model_dir = tmp_path / "model"
    said: list[str] = []
    work_once(model_dir, "false", "a", said=said)
    assert said == [f"there is no complete checkpoint in {model_dir}: no job to start"]
    save_checkpoints(model_dir, 3)
    work_once(model_dir, "true", "a")  # no job was started with the settings before
    work_once(model_dir, "true", "a", "b")  # one more mixture is welcome
    with pytest.raises(UserError, match="other settings"):
        work_once(model_dir, "false", "a")


def test_jobs_are_resumed_with_skip_missing_or_without_it(tmp_path):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3)
    target = "rank-eval --no_such_option"  # ends at once
    work_once(model_dir, target, "a", max_failures=1)
    shutil.rmtree(checkpoint_path(model_dir, 3))  # and nothing is left to do
    settings = model_dir / "auxiliary" / "settings.json"
    began_without = settings.read_text()
    # 0.1.0 did not hand on --gin_import_allowlist.
    began_without = began_without.replace(',\n "import_allowlist": null', "")
    began_with = began_without.replace("option", "option --skip_missing")
    for began in (began_without, began_with):
        for now in (target, f"{target} --skip_missing"):
            settings.write_text(began)
            work_once(model_dir, now, "a")
            with pytest.raises(UserError, match="other settings"):
                work_once(model_dir, f"{now} --limit 3", "a")


CONTROLLER = """
import sys
from pathlib import Path
from tests.jobs.trainings import work_once
work_once(Path(sys.argv[1]), sys.argv[2], "a", "b")
"""


def test_a_killed_controllers_successor_goes_on_without_doing_anything_twice(tmp_path, evaluator):
    model_dir = tmp_path / "model"
    save_checkpoints(model_dir, 3, 6)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", CONTROLLER, str(model_dir), " ".join(evaluator)]
    for done in (0, 1, 2):
        dying = subprocess.Popen(command, cwd=root)
        file = tmp_path / "runs.txt"
        while (len(file.read_text().splitlines()) if file.exists() else 0) <= done:
            time.sleep(0.01)
        dying.send_signal(signal.SIGKILL)
        dying.wait()
    assert subprocess.run(command, cwd=root, check=False).returncode == 0
    for mixture in "ab":
        assert curve(model_dir / "inference_eval" / mixture) == [(3, 0.75), (6, 0.8571)]
    progress = JobJournal(model_dir / "auxiliary").progress
    assert {each.state for each in progress.values()} == {"succeeded"}
    assert all(each.failures == 0 for each in progress.values())  # interrupted, not failed
