"""Writes TensorBoard event files; outside the JAX core, because clu imports TensorFlow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clu.metric_writers import MetricWriter


def event_writer(directory: str | os.PathLike[str]) -> MetricWriter:
    """A writer of TensorBoard event files into a directory."""
    from clu import metric_writers

    return metric_writers.SummaryWriter(os.fspath(directory))
