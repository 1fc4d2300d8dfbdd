"""Locks of folders: one holder, whoever dies, on this machine and another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from t0repro.errors import UserError
from t0repro.progress import heard_by
from t0repro.storage import lock_folder, locks

HOLDER = """
import sys, time
from pathlib import Path
from t0repro.storage import lock_folder
with lock_folder(Path(sys.argv[1]), "training"):
    print("held", flush=True)
    time.sleep(60)
"""


def start_holder(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-P", "-c", HOLDER, str(folder)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def end(holder: subprocess.Popen) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()


def test_a_second_run_is_refused_at_once_and_told_who_holds_the_folder(tmp_path):
    holder = start_holder(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"for training \(process {holder.pid} on .*\)"):
            with lock_folder(tmp_path, "caching"):
                pass
    finally:
        end(holder)


def test_a_killed_holder_blocks_nobody(tmp_path):
    holder = start_holder(tmp_path)
    end(holder)
    with lock_folder(tmp_path, "caching"):
        assert (tmp_path / locks.COMMAND_FILE).read_text().startswith("caching\n")


def test_a_refused_run_leaves_the_holder_its_lock(tmp_path):
    holder = start_holder(tmp_path)
    try:
        for _ in range(2):
            with pytest.raises(UserError), lock_folder(tmp_path, "caching"):
                pass
        assert (tmp_path / locks.LEASE_FILE).exists()
    finally:
        end(holder)


def test_nothing_but_the_lock_file_stays(tmp_path):
    with lock_folder(tmp_path / "new", "caching"):
        assert (tmp_path / "new" / locks.COMMAND_FILE).exists()
    assert {path.name for path in (tmp_path / "new").iterdir()} <= {locks.LOCK_FILE}


@pytest.fixture
def elsewhere(monkeypatch):
    """Leases are taken as if by a machine of another name."""

    def take(folder: Path, seconds: float):
        monkeypatch.setattr("filelock._marker.host_name", lambda: "elsewhere")
        lease = filelock.SoftFileLease(
            folder / locks.LEASE_FILE, lease_duration=seconds, is_singleton=False
        )
        lease.acquire(timeout=0)
        monkeypatch.undo()
        monkeypatch.setattr(locks, "_LEASE_SECONDS", seconds)
        return lease

    return take


def test_a_live_run_on_another_machine_is_refused(tmp_path, elsewhere):
    lease = elsewhere(tmp_path, 0.6)  # refreshed every 0.2 s
    said: list[str] = []
    try:
        with pytest.raises(UserError, match="elsewhere"):
            with heard_by(said.append), lock_folder(tmp_path, "training"):
                pass
    finally:
        lease.release()
    assert "still alive" in said[0]


def test_a_dead_run_on_another_machine_is_told_apart(tmp_path, elsewhere):
    lease = elsewhere(tmp_path, 0.6)
    marker = (tmp_path / locks.LEASE_FILE).read_bytes()
    lease.release()
    (tmp_path / locks.LEASE_FILE).write_bytes(marker)  # as a dead machine leaves it
    with lock_folder(tmp_path, "training"):
        assert (tmp_path / locks.COMMAND_FILE).read_text().startswith("training\n")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named_with_the_file_in_its_place(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot be locked: {tmp_path / 'file'} is a file"):
        with lock_folder(tmp_path / name, "training"):
            pass


def test_a_link_to_nothing_is_named_with_what_it_means(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=f"is a link to {tmp_path / 'gone'}, which is not there"):
        with lock_folder(tmp_path / "link", "training"):
            pass


class _Refused(Exception):
    pass


def test_a_refused_run_leaves_no_folder_that_was_made_for_it(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(_Refused), lock_folder(tmp_path / "mine" / "new" / "run", "training"):
        raise _Refused
    assert (tmp_path / "mine").is_dir() and not any((tmp_path / "mine").iterdir())


def test_a_failed_run_keeps_what_was_there_or_was_written(tmp_path):
    with pytest.raises(_Refused), lock_folder(tmp_path / "new" / "run", "training"):
        (tmp_path / "new" / "run" / "result").write_text("half of it")
        raise _Refused
    assert (tmp_path / "new" / "run" / "result").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(_Refused), lock_folder(tmp_path / "empty", "training"):
        raise _Refused
    assert (tmp_path / "empty").is_dir()


def test_a_run_refused_by_the_holder_does_not_remove_the_holders_folder(tmp_path):
    holder = start_holder(tmp_path / "new")
    try:
        with pytest.raises(UserError), lock_folder(tmp_path / "new", "caching"):
            pass
        assert (tmp_path / "new" / locks.LEASE_FILE).exists()
    finally:
        end(holder)


def test_a_lease_that_a_power_failure_emptied_is_taken_at_once(tmp_path):
    (tmp_path / locks.LEASE_FILE).write_bytes(b"")
    said: list[str] = []
    begun = time.monotonic()
    with heard_by(said.append), lock_folder(tmp_path, "training"):
        pass
    assert said == [] and time.monotonic() - begun < 5
