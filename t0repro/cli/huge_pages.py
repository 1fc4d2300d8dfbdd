"""Huge pages for commands that compute on a CPU, on machines that zero them faster.

XLA takes a step's temporaries from the system and gives them back afterwards, so the system zeroes
them again in the next step, page by page. Pages of 2 MiB instead of 4 KiB made a train step 10% to
30% faster on one machine and 14% slower on another (docs/lab_log.md), so each start measures.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from t0repro.cli.results import echo

_VARIABLE = "GLIBC_TUNABLES"
# The system gives huge pages to those who ask for them; "[always]" needs no asking.
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ACCELERATORS = ("/dev/nvidiactl", "/dev/accel0", "/dev/vfio/vfio")  # of CUDA and of TPUs
# Enough to tell the two sizes apart; the rounds below take 0.07 s at each start.
_BYTES = 32 << 20
# The fastest counts, because the first huge pages of a new virtual machine took twenty times as
# long: its host had not given it the memory yet.
_ROUNDS = 3
# Where steps took 6% to 13% less time, huge pages were zeroed 5 times as fast (docs/lab_log.md).
_MUCH_FASTER = 1.5


def use_where_faster(arguments: Sequence[str]) -> None:
    """Starts this process again with huge pages if it may use them and zeroes them faster.

    A value of GLIBC_TUNABLES that the user has set, also an empty one, stays.

    Args:
      arguments: The command's own arguments, with which this process has to have been started; a
        program that calls the command as a function is never replaced.
    """
    count = len(arguments)
    if count == 0 or sys.orig_argv[-count:] != list(arguments):
        return
    if _VARIABLE in os.environ or not _are_offered():
        return
    ratio = _times_as_fast()
    if ratio < _MUCH_FASTER:
        return
    echo(
        f"huge pages: zeroed {ratio:.1f} times as fast as small ones here, so they are used"
        f" ({_VARIABLE}= turns them off)",
        err=True,
    )
    environment = {**os.environ, _VARIABLE: "glibc.malloc.hugetlb=1"}
    # glibc reads its settings only when a process starts. sys.argv lacks Python's own options.
    os.execve(sys.executable, sys.orig_argv, environment)


def _are_offered() -> bool:
    """Whether the CPU computes here, the system offers huge pages, and glibc can ask for them."""
    if sys.platform != "linux" or any(map(os.path.exists, _ACCELERATORS)):
        return False
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return (
            name == "glibc"
            # glibc can ask for huge pages since 2.35.
            and tuple(map(int, version.split(".")[:2])) >= (2, 35)
            and "[madvise]" in _MODE.read_text()
        )
    except (OSError, ValueError):  # another C library, or a system without huge pages
        return False


def _times_as_fast() -> float:
    """How much faster this machine zeroes new memory in huge pages than in small ones."""
    seconds = {huge: min(_seconds(huge) for _ in range(_ROUNDS)) for huge in (False, True)}
    return seconds[False] / seconds[True]


def _seconds(huge: bool) -> float:
    """The seconds that it takes to write to each small page of new memory."""
    # Private: for shared memory, which is Python's default, Linux has another setting.
    with mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        begun = time.perf_counter()
        memory[:: mmap.PAGESIZE] = b"\1" * (_BYTES // mmap.PAGESIZE)
        return time.perf_counter() - begun
