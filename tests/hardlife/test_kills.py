"""Killed at random moments, over and over, a job continues and ends as if it had never died."""

import shutil
import time

import pytest

from .conftest import KILLED
from .jobs import kill

pytestmark = pytest.mark.hardlife


@pytest.mark.parametrize("name", KILLED)
def test_killed_at_random_moments_and_resumed_a_job_ends_with_the_same_bytes(
    name, whole, deaths, moments, outcome, tmp_path
):
    job, expected, seconds = whole(name)
    out = tmp_path / "out"
    died = 0
    while died < deaths:
        begun = time.monotonic()
        process = job.start(out)
        time.sleep(seconds * moments.uniform(job.first, 1))
        if process.poll() is None:
            kill(process)
            died += 1
            if out.exists():
                job.dead_check(out, expected)
            continue
        # It ended before the kill: begin again, and kill sooner.
        said, _ = process.communicate()
        assert process.returncode == 0 and job.result(out) == expected, said[-3000:]
        seconds = min(0.9 * seconds, time.monotonic() - begun)
        shutil.rmtree(out)
    assert job.finish(out) == expected
    outcome(f"kill -9: {name}: died {died} times, and ended with the same {len(expected)} results")
