"""Commands start again with huge pages, where those are faster, unless the user decided."""

import os
import subprocess
import sys

import pytest

from t0repro.cli import gate

offered = pytest.mark.skipif(not gate._are_offered(), reason="this system has no huge pages")

# What a console script does, on a machine where huge pages are RATIO times as fast.
PROGRAM = """
import os, sys
from t0repro.cli import gate
gate._times_as_fast = lambda: float(os.environ["RATIO"])
gate.use_huge_pages_where_faster(sys.argv[1:])
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:])
"""
HUGE = "glibc.malloc.hugetlb=1"


def start(ratio, *arguments, tunables=None):
    environment = {name: x for name, x in os.environ.items() if name != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    return subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *arguments],
        env={**environment, "RATIO": str(ratio)},
        capture_output=True,
        text=True,
        check=True,
    )


@offered
def test_a_command_starts_again_where_huge_pages_are_faster_and_says_so_once_with_v():
    assert start(5.0, "encode", "--vocab", "x").stderr == ""
    done = start(5.0, "train", "--gin_file=a b", "-v=0")
    assert done.stdout == f"{HUGE} ['train', '--gin_file=a b', '-v=0']\n"
    assert done.stderr.count("huge pages") == done.stderr.count("\n") == 1
    assert "5.0 times" in done.stderr


@pytest.mark.parametrize(
    ("ratio", "tunables"), [(0.8, None), (1.2, None), (5.0, ""), (5.0, "glibc.malloc.perturb=0")]
)
def test_it_does_not_where_they_are_not_or_where_the_user_set_the_variable(ratio, tunables):
    done = start(ratio, "train", tunables=tunables)
    assert done.stdout == f"{tunables} ['train']\n"
    assert done.stderr == ""


def test_a_program_that_calls_the_command_is_never_replaced(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(gate, "_times_as_fast", lambda: 5.0)
    monkeypatch.setattr(gate, "_are_offered", lambda: True)
    started = []
    monkeypatch.setattr(os, "execve", lambda *of: started.append(of))
    gate.use_huge_pages_where_faster(["not", "of this process"])
    assert started == []
    gate.use_huge_pages_where_faster(sys.orig_argv[-1:])
    assert len(started) == 1


@offered
def test_the_kernel_gives_the_restarted_process_huge_pages():
    code = """
import ctypes, mmap, pathlib, re, sys
if sys.argv[1:]:
    memory = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(64 << 20))
else:
    allocated = ctypes.CDLL(None).malloc
    allocated.restype = ctypes.c_void_p
    ctypes.memset(allocated(64 << 20), 1, 64 << 20)
text = pathlib.Path("/proc/self/smaps_rollup").read_text()
print(re.search(r"AnonHugePages: +(\\d+)", text)[1])
"""

    def kilobytes(tunables, *arguments):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "GLIBC_TUNABLES": tunables},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    if kilobytes("", "ask for them") < 32 << 10:
        pytest.skip("the kernel has none left for who asks it itself: memory is in pieces")
    assert kilobytes("") == 0 and kilobytes(HUGE) > 32 << 10
