"""Compiles a train step while other work goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import numpy as np

from t0repro.model.features import t5x_features
from t0repro.partitioning.processes import is_alone
from t0repro.training.trainer import BaseTrainer


@contextlib.contextmanager
def compile_in_background(
    trainer: BaseTrainer, shapes: Mapping[str, tuple[int, int]]
) -> Iterator[None]:
    """Compiles the train step in a thread, for batches of these shapes.

    A batch of another shape gets its own step compiled when it comes, as it would without this.
    Leaving the block waits for the compilation.

    Args:
      trainer: does the updates.
      shapes: [rows, length] of each feature of a batch.
    """
    # Several processes must run their collective work in one order, so they compile no step here.
    # A trainer's own `compile_train` is called with the first batch.
    if not is_alone() or trainer.overrides("compile_train"):
        yield
        return
    example = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    if trainer.overrides("train"):
        example = t5x_features(example)

    def compile_step() -> None:
        # The first update with such a batch repeats the error, where it can be reported.
        with contextlib.suppress(Exception):
            trainer.prepare_train(example)

    thread = threading.Thread(target=compile_step, name="compile")
    thread.start()
    try:
        yield
    finally:
        thread.join()
