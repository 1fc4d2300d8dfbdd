"""Reports on work: lines, a bar or a line every few seconds, and what libraries log of it."""

from __future__ import annotations

import collections
import contextlib
import functools
import glob
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from t0repro.words import counted, printable, remove_passwords, rename_for_reader

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_OF_A_RATE = 30.0
_SECONDS_BETWEEN_WAITING_LINES = 60.0

# The functions that get the lines of `say`; the last one alone gets them.
_listeners: list[Callable[[str], None]] = []


def say(line: str) -> None:
    """Reports the current activity, on standard error or to `heard_by`'s listener."""
    if _listeners:
        _listeners[-1](line)
    else:
        line = printable(remove_passwords(rename_for_reader(line)), keep="\n")
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Passes the lines that the block and its threads report to a function."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Waiting:
    """Reports what a polling loop waits for: as soon as that changes, and every minute."""

    def __init__(self) -> None:
        self._awaited, self._next_report = "", 0.0

    def report(self, awaited: str, details: str = "") -> None:
        """Reports, if it is time to.

        Args:
          awaited: What is waited for: "waiting for a new checkpoint in runs/demo".
          details: What may differ at each poll; a change of it alone is not reported at once.
        """
        now = time.monotonic()
        if awaited != self._awaited or now >= self._next_report:
            self._awaited, self._next_report = awaited, now + _SECONDS_BETWEEN_WAITING_LINES
            say(f"{awaited}: {details}" if details else awaited)


@contextlib.contextmanager
def working(doing: str, stream: TextIO | None = None, every: float = 10.0) -> Iterator[None]:
    """Prints the current activity at once, and again every few seconds.

    For work that cannot count, such as compiling.

    Args:
      doing: The activity: "compiling the train step".
      stream: Where to write; defaults to standard error.
      every: Seconds between lines.
    """
    started, ended = time.monotonic(), threading.Event()

    def report(suffix: str) -> None:
        print(f"{doing}{suffix}", file=stream or sys.stderr, flush=True)

    def beat() -> None:
        while not ended.wait(every):
            report(f": {time.monotonic() - started:.0f} s")

    report(" ...")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def count_progress(
    total: int, doing: str, thing: str, done_word: str, plural: str | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of items finished since the last call.

    Args:
      total: Number of items.
      doing: The activity, for the bar: "scoring".
      thing: What is counted, in the singular: "pair".
      done_word: The finished activity, for the lines: "scored".
      plural: For irregular nouns: "batches".
    """
    from rich import console, progress

    in_all = counted(total, thing, plural)
    terminal = console.Console(stderr=True)
    if not terminal.is_terminal:

        def line(done: int, rate: float, left: float) -> str:
            counts = f"{done_word} {done:,} of {in_all}, {rate:,.1f}/s"
            return f"{counts}, about {left:.0f} s left"

        print_line = functools.partial(terminal.print, highlight=False)
        print_line(f"{doing} {in_all} ...")
        yield _line_printer(print_line, total, line, at_end=True)
        return
    columns = (
        progress.TextColumn(doing),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(f"{in_all.partition(' ')[2]}, {{task.fields[rate]:,.1f}}/s, left"),
        progress.TimeRemainingColumn(),
    )
    started, done = time.monotonic(), 0
    with progress.Progress(*columns, console=terminal) as bar:
        task = bar.add_task(doing, total=total, rate=0.0)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            # Average over the whole time, so that the rate does not jump with the size of a batch.
            bar.update(task, advance=count, rate=done / (time.monotonic() - started))

        yield advance


@contextlib.contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of bytes finished since the last call.

    Args:
      description: The activity, in a few words.
      total: Number of bytes.
    """
    from rich import console, progress

    terminal = console.Console(stderr=True)
    if not terminal.is_terminal:

        def line(done: int, rate: float, left: float) -> str:
            del rate
            size = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
            return f"{description}: {size}, about {left:.0f} s left"

        # Nothing is printed for work that ends within a few seconds.
        yield _line_printer(terminal.print, total, line, at_end=False)
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _line_printer(
    print_line: Callable[[str], None],
    total: int,
    line: Callable[[int, float, float], str],
    at_end: bool,
) -> Callable[[int], None]:
    """Returns a function that counts and prints; `line` formats (done, rate, seconds left)."""
    done, started = 0, time.monotonic()
    last = started
    # (time, done) of the last calls. A first item waits for what is compiled; first bytes do not.
    recent = collections.deque([] if at_end else [(started, 0)])

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if not recent:
            last = now
        recent.append((now, done))
        while now - recent[0][0] > _SECONDS_OF_A_RATE and len(recent) > 2:
            recent.popleft()
        # Done or due: the last line may come early, so that the total is always printed.
        if now - last >= _SECONDS_BETWEEN_LINES or (at_end and done == total):
            last = now
            since, before = (started, 0) if done == total else recent[0]
            rate = (done - before) / max(now - since, 1e-9)
            # If the total was too low (rows are estimated), the time left is 0, not negative.
            print_line(line(done, rate, max(total - done, 0) / max(rate, 1e-9)))

    return advance


@contextlib.contextmanager
def only_records(
    name: str | None, is_worth_logging: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    """Leaves out the records of a logger, None for the root, that are not worth logging."""
    log = logging.getLogger(name)
    log.addFilter(is_worth_logging)
    try:
        yield
    finally:
        log.removeFilter(is_worth_logging)


NOT_ON_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Without these libtpu asks Google's metadata server which TPU it is on, prints errors when it gets
no answer, and lets in one process at a time."""


def quiet_libtpu() -> None:
    """Keeps libtpu from printing errors if it is installed on a machine without a TPU.

    JAX loads it when it looks for devices.
    """
    chips = (*glob.glob("/dev/accel[0-9]*"), *glob.glob("/dev/vfio/[0-9]*"))
    if not chips and importlib.util.find_spec("libtpu"):
        for variable, value in NOT_ON_A_TPU.items():
            os.environ.setdefault(variable, value)


class SeqioOnce(logging.Filter):
    """Lets each of SeqIO's messages through once per process, and all others always."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        # Match by file: SeqIO logs through absl's logger, as other libraries do.
        if "seqio" not in record.pathname:
            return True
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new
