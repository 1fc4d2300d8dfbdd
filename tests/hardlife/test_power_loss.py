"""The power fails at random moments: what was not synced is gone, and nothing half is believed.

The job writes to an ext4 that is not used by anything else. At the moment of death the file system
is shut down without writing its journal or any page that was not synced (EXT4_IOC_SHUTDOWN, as
xfstests does it); then it is mounted again, which replays the journal as after a real failure.
noauto_da_alloc turns off ext4's rescue of programs that rename without a sync; commit=1 lets names
reach the disk early, and so before their content.
"""

import fcntl
import os
import struct
import subprocess
import time

import pytest

from . import jobs
from .conftest import NAMES

pytestmark = pytest.mark.hardlife

_EXT4_IOC_SHUTDOWN = 0x8004587D  # linux/fs/ext4/ext4.h
_WITHOUT_LOG_FLUSH = 2


class Disk:
    """An ext4 in a file, which can lose its power."""

    def __init__(self, folder, megabytes=256):
        self.image, self.folder = folder / "image", folder / "disk"
        self.folder.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self.image)], check=True)
        self.mount()

    def mount(self):
        options = "loop,noauto_da_alloc,commit=1"
        jobs.mount("-o", options, str(self.image), str(self.folder))

    def lose_power(self):
        disk = os.open(self.folder, os.O_RDONLY)
        fcntl.ioctl(disk, _EXT4_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        os.close(disk)


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    yield disk
    jobs.unmount(disk.folder)


def test_what_is_renamed_without_a_sync_is_lost_so_that_these_tests_can_fail(disk):
    for name, sync in (("synced", True), ("unsynced", False)):
        with open(disk.folder / f"{name}.tmp", "w") as file:
            file.write("content" * 1000)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.rename(disk.folder / f"{name}.tmp", disk.folder / name)
    # Another file's sync commits the journal: the names are on the disk, the unsynced content not.
    with open(disk.folder / "another", "w") as file:
        os.fsync(file.fileno())
    disk.lose_power()
    jobs.unmount(disk.folder)
    disk.mount()
    assert (disk.folder / "synced").stat().st_size == 7000
    assert (disk.folder / "unsynced").stat().st_size == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_job_whose_power_fails_believes_nothing_half_and_ends_with_the_same_bytes(
    name, whole, deaths, moments, outcome, disk
):
    job, expected, seconds = whole(name)
    out = disk.folder / "out"
    died = 0
    for _ in range(deaths):
        process = job.start(out)
        time.sleep(seconds * moments.uniform(job.first, 1.1))
        died += process.poll() is None
        disk.lose_power()
        if process.poll() is None:
            jobs.kill(process)
        else:
            process.communicate()
        jobs.unmount(disk.folder)
        disk.mount()
        if out.exists():
            job.dead_check(out, expected)
    assert job.finish(out) == expected
    count = len(expected)
    outcome(f"power loss: {name}: {died} of {deaths} while it ran, then the same {count} results")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_job_says_is_done_survives_a_power_failure_right_after_it(
    name, whole, outcome, disk
):
    job, expected, _ = whole(name)
    out = disk.folder / "out"
    assert job.finish(out) == expected
    disk.lose_power()
    jobs.unmount(disk.folder)
    disk.mount()
    assert job.result(out) == expected
    outcome(f"power loss right after the end: {name}: all {len(expected)} results are there")
