"""Killed at random moments, over and over, a job goes on and ends as if it had never died."""

import time

import pytest

from .conftest import NAMES
from .jobs import kill

pytestmark = pytest.mark.hardlife


@pytest.mark.parametrize("name", NAMES)
def test_killed_at_random_moments_and_resumed_a_job_ends_with_the_same_bytes(
    name, whole, deaths, moments, outcome, tmp_path
):
    job, expected, seconds = whole(name)
    died = 0
    for _ in range(deaths):
        process = job.start(tmp_path / "out")
        time.sleep(seconds * moments.uniform(job.first, 1.1))
        if process.poll() is None:
            died += 1
        kill(process) if process.poll() is None else process.communicate()
        if (tmp_path / "out").exists():
            job.dead_check(tmp_path / "out", expected)
    assert job.finish(tmp_path / "out") == expected
    count = len(expected)
    outcome(f"kill -9: {name}: died {died} times in one folder, then the same {count} results")
