"""Ends training on a signal, or when a machine is about to be preempted."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

from jax.experimental import multihost_utils

from t0repro.partitioning.processes import SharedSignal, is_alone
from t0repro.progress import say
from t0repro.training.hooks.save import NOTICE_SECONDS
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.preemption import PREEMPTED


class StoppedBySignal(SystemExit):
    """A signal ended training early, after a save if the run saves checkpoints.

    The exit code is 130 for Ctrl-C (SIGINT), and PREEMPTED for SIGTERM and for a notice that the
    machine is about to be preempted: nothing is wrong, and the same command continues. Where
    nothing was saved it would start over, and the code is 143 as for any process that SIGTERM ends.
    """

    def __init__(self, number: int, saved: bool = True):
        shell = number == signal.SIGINT or not saved
        super().__init__(128 + number if shell else PREEMPTED)


class StopOnSignal(Hook):
    """Ends training after the step in which SIGTERM or SIGINT arrives, so that it is saved.

    A second signal has its usual effect. With several processes, all end after the same step. So
    they do when jax itself reports that one of their machines is about to be preempted.

    Args:
      saves: whether the run saves checkpoints at all.

    Attributes:
      received: the number of the signal that ended training, or None.
    """

    def __init__(self, saves: bool = True):
        self._saves = saves
        self.received: int | None = None
        self._noted: int | None = None
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}
        self._shared: SharedSignal | None = None

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Installs the signal handlers; Python allows that only in the main thread."""
        del loop, last_step
        self._shared = None if is_alone() else SharedSignal()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # Keep the caller's own handlers, to restore them later.
                self._before[number] = signal.signal(number, self._note)

    def after_step(self, loop: TrainingLoop) -> None:
        """Asks the loop to stop if a signal has come, to any of the processes."""
        if self._shared is not None:
            # Every process must call this at every step; it is true at the one step they agree on.
            if _jax_agreed_to_end(loop.step) and self._noted is None:
                self._noted, self._noted_at = signal.SIGTERM, time.monotonic()
                say("stopping: jax reported that a machine is about to be preempted")
            self.received = self._shared.exchange(self._noted or 0) or None
        else:
            self.received = self._noted
        if self.received is not None:
            loop.stop(f"a signal, {signal.Signals(self.received).name}")

    def end(self, loop: TrainingLoop) -> None:
        """Restores the previous signal handlers."""
        self._restore()
        if self._noted is not None and self._saves and not loop.has_failed:
            seconds = time.monotonic() - self._noted_at
            late = f", more than the {NOTICE_SECONDS:.0f} s that a preempted machine gets"
            say(f"saved {seconds:.1f} s after the signal{late if seconds > NOTICE_SECONDS else ''}")

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self._noted, self._noted_at = number, time.monotonic()
        # Restore now, so that a second signal interrupts the step.
        self._restore()
        again = " (Ctrl-C again stops at once)" if number == signal.SIGINT else ""
        saved = " and saved" if self._saves else ""
        # A signal may come in the middle of a line, and Python writes no line within another.
        with contextlib.suppress(RuntimeError):
            say(f"stopping: the current step is finished{saved} first{again}")

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


def _jax_agreed_to_end(step: int) -> bool:
    """Whether jax's processes agreed to end at this step; False if jax's service for it is off."""
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # jax's service for it is switched off
        return False
