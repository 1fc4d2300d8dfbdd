"""A job's command runs within its limits, and nothing of it outlives it."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from t0repro.jobs.job import INTERPRETER, Job, Limits
from t0repro.jobs.local_launcher import LocalLauncher


def python_job(folder: Path, code: str, **limits) -> Job:
    return Job("job-1", folder, (INTERPRETER, "-c", code), {"NAME": "value"}, Limits(**limits))


def run(job: Job):
    launcher = LocalLauncher()
    launcher.submit(job)
    while launcher.state(job) == "running":
        time.sleep(0.02)
    return job.ending


@pytest.mark.parametrize(
    ("code", "limits", "reason"),
    [
        ("print('fine')", {}, ""),
        ("raise SystemExit(3)", {}, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", {}, "killed by SIGKILL"),
        ("import time; time.sleep(60)", {"seconds": 0.5}, "it took longer than 0.5 s"),
        (
            "import time; x = bytearray(10**9); x[::4096] = b'1' * len(x[::4096]); time.sleep(60)",
            {"memory_gb": 0.3},
            "it used more than 0.3 GB of memory",
        ),
    ],
)
def test_a_command_ends_with_the_reason(tmp_path, code, limits, reason):
    ending = run(python_job(tmp_path, code, **limits))
    assert ending is not None and ending.reason == reason and ending.seconds >= 0


def test_a_command_that_is_not_there_is_named(tmp_path):
    job = Job("job-1", tmp_path, ("no-such-command",), {}, Limits())
    ending = run(job)
    assert ending is not None and ending.reason.startswith("no-such-command cannot be started")


def test_a_command_finds_its_values_in_the_environment(tmp_path):
    run(python_job(tmp_path, "import os; print(os.environ['NAME'])"))
    assert (tmp_path / "job-1.log").read_text() == "value\n"


def test_a_secret_reaches_the_command_and_not_the_jobs_file(tmp_path):
    secrets = {"HF_TOKEN": "s3cr3t", "TRACKING": "http://user:s3cr3t@host"}
    code = "import os; print(*(os.environ[name] for name in ('HF_TOKEN', 'TRACKING', 'NAME')))"
    job = python_job(tmp_path, code)
    job = dataclasses.replace(job, environment={**job.environment, **secrets})
    run(job)
    assert job.log_file.read_text() == "s3cr3t http://user:s3cr3t@host value\n"
    file = tmp_path / "job-1.json"
    assert "s3cr3t" not in file.read_text() and '"NAME": "value"' in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_jobs_side_by_side_get_processors_of_their_own(tmp_path):
    code = "import os, time; print(*os.sched_getaffinity(0), flush=True); time.sleep(60)"
    launcher, used = LocalLauncher(), []
    for number in range(min(2, len(os.sched_getaffinity(0)))):
        job = dataclasses.replace(python_job(tmp_path, code, cpus=1), name=f"job-{number}")
        launcher.submit(job)
        while not (job.log_file.exists() and job.log_file.read_text().strip()):
            time.sleep(0.02)
        used.append(job.log_file.read_text())
    launcher.close()
    assert len(set(used)) == len(used) and all(len(each.split()) == 1 for each in used)


def test_a_flood_of_output_keeps_its_beginning_and_its_end(tmp_path):
    code = "for n in range(400_000): print('line', n)"
    job = python_job(tmp_path, code, log_megabytes=0.5)
    ending = run(job)
    assert ending is not None and not ending.reason
    log = job.log_file.read_text()
    assert log.startswith("line 0\nline 1\n") and log.endswith("line 399999\n")
    assert "bytes left out" in log and len(log) < 700_000


SPAWNS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{then}
"""


def left_behind(job: Job) -> psutil.Process:
    while not (job.log_file.exists() and job.log_file.read_text().strip()):
        time.sleep(0.02)
    return psutil.Process(int(job.log_file.read_text()))


def is_gone(process: psutil.Process) -> bool:
    for _ in range(500):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_what_a_command_leaves_running_is_killed_when_it_ends(tmp_path):
    job = python_job(tmp_path, SPAWNS.format(then=""))
    ending = run(job)
    assert ending is not None and not ending.reason
    assert (
        is_gone(psutil.Process(int(job.log_file.read_text())))
        if psutil.pid_exists(int(job.log_file.read_text()))
        else True
    )


def test_a_canceled_job_takes_all_its_processes_along(tmp_path):
    job = python_job(tmp_path, SPAWNS.format(then="time.sleep(600)"))
    launcher = LocalLauncher()
    launcher.submit(job)
    process = left_behind(job)
    launcher.cancel(job)
    assert is_gone(process) and job.ending is None and launcher.state(job) == "ended"


def test_a_job_ends_with_the_process_that_started_it(tmp_path):
    job = python_job(tmp_path, SPAWNS.format(then="time.sleep(600)"))
    path = job.write(dies_with_parent=True)
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-m', 't0repro.jobs.worker', {str(path)!r}],"
            " start_new_session=True)\n"
            "time.sleep(600)",
        ]
    )
    process = left_behind(job)
    starter.kill()
    starter.wait()
    assert is_gone(process)
    # The worker, which had the process killed, ends a moment later.
    launcher, deadline = LocalLauncher(), time.monotonic() + 60
    while launcher.state(job) == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert launcher.state(job) == "unknown"


# Sends itself SIGTERM at each line that the worker runs while it waits for its command.
SIGNALED = """
import signal, sys, threading
from t0repro.jobs import worker

FILES = (worker.__file__, threading.__file__)

def at_each_line(frame, event, argument):
    if event == "line":
        signal.raise_signal(signal.SIGTERM)
    return at_each_line if frame.f_code.co_filename in FILES else None

watch = worker._watch
def watched(*arguments):
    sys.settrace(at_each_line)
    try:
        return watch(*arguments)
    finally:
        sys.settrace(None)

worker._watch = watched
worker.main(sys.argv[1])
"""


def test_a_worker_may_be_asked_to_end_again_and_again_at_any_line(tmp_path):
    """Linux tells a child of its parent's death once for each of the parent's threads."""
    job = python_job(tmp_path, "import time; time.sleep(600)")
    command = [sys.executable, "-c", SIGNALED, str(job.write())]
    ended = subprocess.run(command, start_new_session=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL and job.ending is None  # it killed its group
