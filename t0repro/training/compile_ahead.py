"""The train step is compiled while the first batch is made: neither needs the other's values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from t0repro.config.run_config import RunConfig
from t0repro.partitioning.processes import is_alone
from t0repro.training.trainer import BaseTrainer


def train_shapes(config: RunConfig, length: Callable[[str], int]) -> dict[str, tuple[int, int]]:
    """The shapes of what the model reads of a training batch, by feature.

    Args:
      config: a configuration of mode "train".
      length: gives the length of `inputs` and of `targets`.
    """
    data = config.plan.train_data
    names = ["targets"] if config.model.decoder_only else ["inputs", "targets"]
    if data is not None and data.pack:
        names += [f"{name}_segmentation" for name in names]
    return {name: (config.batch_size, length(name.split("_")[0])) for name in names}


@contextlib.contextmanager
def compiled_beside(trainer: BaseTrainer, config: RunConfig) -> Iterator[None]:
    """Compiles the train step in a thread, for the shapes that the configuration tells.

    Batches of other shapes have a step compiled for them when they come, as without this. Leaving
    the block waits for the compilation.
    """
    lengths = config.sequence_length or {}
    known = {"inputs", "targets"} <= lengths.keys() and not config.model.decoder_only
    # Several processes must do all that concerns them together in the same order.
    if not known or not is_alone():
        yield
        return
    shapes = train_shapes(config, lambda feature: lengths[feature])
    example = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}

    def compile_step() -> None:
        # An update with such a batch meets the error again, where it can be told.
        with contextlib.suppress(Exception):
            trainer.prepare_train(example)

    thread = threading.Thread(target=compile_step, name="compile")
    thread.start()
    try:
        yield
    finally:
        thread.join()
