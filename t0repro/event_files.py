"""Writes and reads TensorBoard event files; not in the JAX core, because clu imports TensorFlow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clu.metric_writers import MetricWriter

MARK = "tfevents"  # in the name of every event file


def event_writer(directory: str | os.PathLike[str]) -> MetricWriter:
    """A writer of TensorBoard event files into a directory."""
    from clu import metric_writers

    return metric_writers.SummaryWriter(os.fspath(directory))


def read_scalars(directory: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of the event files in a directory: tag -> (step, value), in the files' order.

    Scalars are summaries of that name, as TensorFlow 1 wrote them, or tensors without a dimension.
    """
    import numpy as np

    from t0repro import compat

    compat.quiet_logs()  # TensorBoard imports TensorFlow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    # 0 means all; by default TensorBoard keeps ten tensors of a tag, drawn at random.
    events = EventAccumulator(os.fspath(directory), {"scalars": 0, "tensors": 0}).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    for tag in events.Tags()["tensors"]:
        points = [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        if all(value.ndim == 0 and np.issubdtype(value.dtype, np.floating) for _, value in points):
            found[tag] = [(step, float(value)) for step, value in points]
    return found
