"""The types that t5x.trainer names: futures, step functions and a trainer's constructor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

if TYPE_CHECKING:
    from t0repro.training.metric_classes import MetricMap
    from t0repro.training.models import BaseModel
    from t0repro.training.partitioner import Partitioner
    from t0repro.training.train_state import TrainState
    from t0repro.training.trainer import BaseTrainer


class ArrayMapFuture(Protocol):
    """Arrays by name, once computed."""

    def result(self) -> Mapping[str, jax.Array | np.ndarray]:
        """Waits for them."""
        ...


class MetricValueMapFuture(Protocol):
    """A summary's values by name, once it is written."""

    def result(self) -> Mapping[str, Any]:
        """Waits for them."""
        ...


class TimeFuture(Protocol):
    """A duration in seconds, once measured."""

    def result(self) -> float:
        """Waits for them."""
        ...


class LearningRateCallable(Protocol):
    """A schedule."""

    def __call__(self, step: jax.Array, /) -> jax.Array:
        """The learning rate of the update after this global step."""
        ...


class SummarizeMetricsCallable(Protocol):
    """Makes a summary of metrics."""

    def __call__(
        self, metrics: MetricMap, duration: float, num_steps: int
    ) -> Mapping[str, jax.Array]:
        """The values of metrics that were merged over some steps and seconds."""
        ...


class PartitionedTrainCallable(Protocol):
    """A train step."""

    def __call__(
        self, train_state: TrainState, batch: Mapping[str, Any]
    ) -> tuple[TrainState, MetricMap]:
        """The state after an update, and its metrics."""
        ...


class PartitionedEvalCallable(Protocol):
    """A step of an evaluation."""

    def __call__(self, train_state: TrainState, batch: Mapping[str, Any]) -> MetricMap:
        """The metrics of a batch."""
        ...


class BaseTrainerConstructor(Protocol):
    """Makes a trainer."""

    def __call__(
        self,
        model: BaseModel,
        train_state: TrainState,
        partitioner: Partitioner,
        eval_names: Sequence[str],
        summary_dir: str | None,
        train_state_axes: Any,
        rng: jax.Array,
    ) -> BaseTrainer:
        """The trainer."""
        ...
