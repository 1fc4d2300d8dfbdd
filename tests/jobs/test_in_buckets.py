"""Auxiliary jobs of a training run in a bucket: pins are leases, and a death loses nothing."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t0repro import storage
from t0repro.config.checkpoints import SaveConfig
from t0repro.jobs.journal import read_status
from t0repro.jobs.local_launcher import LocalLauncher
from t0repro.storage import buckets, input_path, leases, place
from t0repro.training.checkpoint_retention import remove_superfluous
from t0repro.training.checkpoints import list_checkpoints

from .trainings import controller, curve, save_checkpoints, work_once

KEEP_ONE = SaveConfig(period=1, keep=1)


def runs(tmp_path):
    return sorted((tmp_path / "runs.txt").read_text().splitlines())


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_checkpoint_in_use_outlives_the_trainings_retention(bucket, tmp_path, evaluator):
    go = tmp_path / "go"
    waits = f"sh -c 'while [ ! -e {go} ]; do sleep 0.05; done; {' '.join(evaluator)}'"
    save_checkpoints(place(bucket), 3, 6)
    watched = controller(bucket, waits)
    states = []

    def training_continues():
        """The training removes once the first job runs."""
        if len(states) == 1:
            remove_superfluous(bucket, KEEP_ONE, {})
            go.touch()
        states.append(list_checkpoints(bucket))
        return False

    assert watched.run(training_continues)
    assert states[1] == [3, 6] and runs(tmp_path) == ["3 m", "6 m"]
    storage.close_copies()
    # There is no further save, so the controller removed it, and no trace of a pin is left of it.
    assert list_checkpoints(bucket) == [6]
    assert not [name for name in buckets.objects(bucket) if "checkpoint_3" in name]
    assert curve(input_path(bucket) / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_of_a_pin_and_a_removal_one_comes_first(bucket):
    checkpoint = f"{bucket}/checkpoint_3"
    with leases.hold_for_removal(checkpoint) as is_free:
        assert is_free and leases.pin(checkpoint) is None
    lease = leases.pin(checkpoint)
    with leases.hold_for_removal(checkpoint) as is_free:
        assert not is_free
    assert leases.is_unwanted(checkpoint)
    lease.release()
    with leases.hold_for_removal(checkpoint) as is_free:
        assert is_free
    assert not leases.is_unwanted(checkpoint) and not any(buckets.objects(bucket))


CONTROLLER = """
import sys
from tests.jobs.trainings import work_once
work_once(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_controller_that_is_killed_is_followed_by_one_that_does_the_rest(
    bucket, tmp_path, evaluator
):
    save_checkpoints(place(bucket), 3, 6)
    stays = tmp_path / "stays"
    waits = f"sh -c 'while [ -e {stays} ]; do sleep 0.05; done; {' '.join(evaluator)}'"
    stays.touch()
    first = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, bucket, waits],
        cwd=Path(__file__).parents[2],
        env=os.environ,
    )
    while not any("journal.jsonl" in name for name in buckets.objects(bucket)):
        assert first.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)  # a job has been started
    first.kill()
    first.wait()
    stays.unlink()
    assert work_once(bucket, waits)
    storage.close_copies()
    assert set(runs(tmp_path)) == {"3 m", "6 m"}
    assert curve(input_path(bucket) / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]
    assert [each.state for each in read_status(input_path(bucket)).values()] == ["succeeded"] * 2


class OtherMachine(LocalLauncher):
    """An engine whose jobs do not see this machine's temporary folders."""

    on_this_machine = False


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_jobs_on_other_machines_read_and_leave_everything_in_the_bucket(
    bucket, tmp_path, evaluator
):
    save_checkpoints(place(bucket), 3, 6)
    breaks = tmp_path / "breaks"
    breaks.touch()
    # The first attempt fails.
    once = f"sh -c 'if rm {breaks}; then echo broken; exit 1; fi; {' '.join(evaluator)}'"
    said = []
    assert work_once(bucket, once, launcher=OtherMachine(), said=said)
    storage.close_copies()
    assert runs(tmp_path) == ["3 m", "6 m"]
    assert curve(input_path(bucket) / "inference_eval" / "m") == [(3, 0.75), (6, 0.8571)]
    assert any("failed: exit code 1" in line and "| broken" in line for line in said)
    job = next(name for name in buckets.objects(bucket) if re.search(r"-3-\d\.json$", name))
    work = json.loads(buckets.read(f"{bucket}/{job}"))
    named = [work["log_file"], work["exit_file"], work["environment"]["EVAL_OUTPUT_DIR"]]
    assert all(each.startswith(f"{bucket}/auxiliary/m/step_3/") for each in named)
    assert work["lock_file"] is None
