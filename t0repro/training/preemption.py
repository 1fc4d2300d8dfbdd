"""How a command that loses nothing ends on SIGTERM: a training run before its first step, say."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from t0repro.progress import say

# sysexits.h's EX_TEMPFAIL, "try again later". A shell reports 143 for a process that SIGTERM ended
# at once, without a save.
PREEMPTED = 75


@contextlib.contextmanager
def resumable(code: int = PREEMPTED) -> Iterator[None]:
    """Ends the process on SIGTERM with an exit code, for a block in which no work can be lost.

    While a training run makes steps, `StopOnSignal` puts its own handler in place of this one.
    """

    def end(number: int, frame: Any) -> NoReturn:
        del number, frame
        # A signal may come in the middle of a line, and Python writes no line within another.
        with contextlib.suppress(RuntimeError):
            say("stopped by SIGTERM: the same command continues")
        raise SystemExit(code)

    # Python allows handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
