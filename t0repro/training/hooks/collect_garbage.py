"""Collects Python's garbage between steps."""

from __future__ import annotations

import gc

from t0repro.training.loop import Hook, TrainingLoop


class CollectGarbage(Hook):
    """Runs Python's garbage collection every `period` steps, and at no other time."""

    def __init__(self, period: int):
        self._period, self._first = period, 0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Switches off Python's automatic collection."""
        self._first = loop.step
        # Otherwise each process collects after another step, and all of them wait every time.
        gc.disable()

    def is_due(self, step: int) -> bool:
        """Whether this step ends a period."""
        return (step - self._first) % self._period == 0

    def after_step(self, loop: TrainingLoop) -> None:
        """Collects if a collection is due."""
        if self.is_due(loop.step):
            gc.collect()

    def end(self, loop: TrainingLoop) -> None:
        """Restores automatic collection."""
        gc.enable()
