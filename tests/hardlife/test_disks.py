"""Full, read-only and vanished folders: one clear error, nothing half, and the job can continue."""

import re
import shutil
import time

import pytest

from . import jobs
from .conftest import NAMES

pytestmark = pytest.mark.hardlife


def assert_clear(code, said):
    """An error for a person: exit code 2, no traceback, what to do next."""
    assert code == 2 and "Traceback" not in said, said[-3000:]
    assert re.search(r"fix: \S", said), said[-3000:]


def size(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_ends_a_job_clearly_and_with_more_room_it_goes_on(
    name, whole, outcome, on_tmpfs, tmp_path
):
    job, expected, _ = whole(name)
    job.finish(tmp_path / "measured")
    needed = size(tmp_path / "measured")
    shutil.rmtree(tmp_path / "measured")
    failed = 0
    for share in (0.2, 0.5, 0.9):
        disk = on_tmpfs(int(needed * share))
        code, said = job.run(disk / "out")
        if code == 0:
            continue
        failed += 1
        assert_clear(code, said)
        assert re.search("full|No space left|not enough", said), said[-3000:]
        if (disk / "out").exists():
            job.dead_check(disk / "out", expected)
        jobs.mount("-o", f"remount,size={4 * needed + (64 << 20)}", str(disk))
        assert job.finish(disk / "out") == expected
    assert failed
    outcome(f"full disk: {name}: {failed} of 3 sizes were too small, each said so and went on")


@pytest.mark.parametrize("name", NAMES)
def test_a_read_only_folder_is_a_clear_error(name, whole, outcome, on_tmpfs):
    job, _, _ = whole(name)
    disk = on_tmpfs(64 << 20)
    jobs.mount("-o", "remount,ro", str(disk))
    code, said = job.run(disk / "out")
    assert_clear(code, said)
    outcome(f"read-only folder: {name}: a clear error")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_vanishes_is_a_clear_error_or_is_made_again(
    name, whole, moments, outcome, tmp_path
):
    job, expected, seconds = whole(name)
    process = job.start(tmp_path / "out")
    time.sleep(seconds * moments.uniform(job.first, 0.9))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    said, _ = process.communicate(timeout=900)
    if process.returncode:
        assert_clear(process.returncode, said)
    result = job.finish(tmp_path / "out")
    assert result and result.items() <= expected.items()
    outcome(f"vanished folder: {name}: exit {process.returncode}, then what is there is the same")
