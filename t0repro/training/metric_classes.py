"""Metrics that a train step returns: small pytrees that merge over microbatches, steps and batches.

They have the names and the meaning of clu's and T5X's classes, without TensorFlow, which clu
imports to write them.

    metrics = {"loss": AveragePerStep.from_model_output(loss), "rows": Sum.from_model_output(8)}
    metrics["loss"].merge(other["loss"]).compute()

What only the host knows, namely durations and the number of steps, is filled in when a summary is
written (t0repro.training.metrics_manager).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

MetricMap = Mapping[str, "Metric"]


class Scalar(float):
    """A metric's value: a number that has T5X's `.value` too."""

    @property
    def value(self) -> float:
        """The number."""
        return float(self)


@flax.struct.dataclass
class Metric(abc.ABC):
    """Something that merges with others of its kind and becomes a number.

    A class that adds up its fields when it merges says so by `additive = True`; devices may then
    add them up among themselves, in any order.
    """

    @classmethod
    @abc.abstractmethod
    def from_model_output(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes the metric of one batch."""

    @abc.abstractmethod
    def merge(self, other: Self) -> Self:
        """The metric of both; `other` is the later one."""

    @abc.abstractmethod
    def compute(self) -> Any:
        """The number."""

    def compute_value(self) -> Scalar:
        """The number as a Scalar."""
        return Scalar(np.asarray(self.compute()))


class _Additive:
    """Merges by adding up each field."""

    additive = True

    def merge(self, other: Any) -> Any:
        return jax.tree.map(lambda one, two: one + two, self, other)


def _total(values: Any) -> jax.Array:
    # A model may return bfloat16, whose 8 bits are too few for a sum.
    return jnp.sum(jnp.asarray(values, jnp.float32))


@flax.struct.dataclass
class Sum(_Additive, Metric):
    """The sum of all values."""

    total: Any

    @classmethod
    def from_model_output(cls, values: Any) -> Self:
        """From an array or a number."""
        return cls(total=_total(values))

    def compute(self) -> Any:
        """The sum."""
        return self.total


@flax.struct.dataclass
class Average(_Additive, Metric):
    """The mean over all values, or of a total over a count; 0 / 0 is 0."""

    total: Any
    count: Any

    @classmethod
    def from_model_output(cls, values: Any, mask: Any = None, *, count: Any = None) -> Self:
        """From an array and a mask of the entries that count, or from a total and its divisor.

        As in clu, an entry counts once or not at all, whatever number the mask has for it, and a
        mask [batch] holds for all of each row. For a weighted mean, give total and count.
        """
        values = jnp.asarray(values, jnp.float32)
        if count is not None:
            return cls(total=jnp.sum(values), count=jnp.asarray(count, jnp.float32))
        counts = jnp.ones(values.shape, bool) if mask is None else jnp.asarray(mask) != 0
        counts = counts.reshape(counts.shape + (1,) * (values.ndim - counts.ndim))
        counts = jnp.broadcast_to(counts, values.shape)
        # Selected, not multiplied by the mask: 0 times a masked NaN would be NaN.
        return cls(
            total=jnp.sum(jnp.where(counts, values, 0.0)),
            count=jnp.sum(counts).astype(jnp.float32),
        )

    def compute(self) -> Any:
        """The mean."""
        # Not an `if`: under jit the count has no value yet.
        return self.total / (self.count + (self.count == 0))


@flax.struct.dataclass
class AverageOfMeasured(Average):
    """A mean over the steps at which something was measured; left out of a summary without any."""


@flax.struct.dataclass
class LastValue(Metric):
    """The latest value."""

    value: Any

    @classmethod
    def from_model_output(cls, value: Any) -> Self:
        """From a number, or an array with one entry."""
        return cls(value=_total(value))

    def merge(self, other: Self) -> Self:
        """The later one."""
        return other

    def compute(self) -> Any:
        """The value."""
        return self.value


@flax.struct.dataclass
class AveragePerStep(_Additive, Metric):
    """The total over the number of steps, however many microbatches or batches were merged."""

    total: Any
    # No part of the pytree: only the host knows it, and merging must not add it up.
    steps: int | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model_output(cls, values: Any) -> Self:
        """From an array or a number, which counts as one step's."""
        return cls(total=_total(values))

    def compute(self) -> Any:
        """The mean per step."""
        return self.total / (1 if self.steps is None else self.steps)


@flax.struct.dataclass
class Time(Metric):
    """How long the steps took, in seconds."""

    duration: float | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model_output(cls) -> Self:
        """Takes nothing."""
        return cls()

    def merge(self, other: Self) -> Self:
        """Nothing yet: the duration is filled in at the end."""
        return self

    def compute(self) -> Any:
        """Seconds."""
        return _filled_in(self.duration)


@flax.struct.dataclass
class TimeRate(_Additive, Metric):
    """A total per second."""

    numerator: Any
    duration: float | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model_output(cls, numerator: Any) -> Self:
        """From an array or a number."""
        return cls(numerator=_total(numerator))

    def compute(self) -> Any:
        """Per second."""
        return self.numerator / _filled_in(self.duration)


@flax.struct.dataclass
class StepsPerTime(Time):
    """Steps per second."""

    steps: int | None = flax.struct.field(pytree_node=False, default=None)

    def compute(self) -> Any:
        """Steps per second."""
        return (self.steps or 1) / _filled_in(self.duration)


def _filled_in(duration: float | None) -> float:
    if duration is None:
        raise ValueError("The duration is filled in when a summary is written; this is none.")
    # The clock may show no time between two steps; a rate has to stay finite.
    return max(duration, 1e-9)


def is_metric(value: Any) -> bool:
    """Whether a node of a pytree is a metric."""
    return isinstance(value, Metric)


def merge_metrics(one: Any, other: Any) -> Any:
    """Merges two trees of metrics, for instance dictionaries by name; `other` is the later one."""
    return jax.tree.map(lambda a, b: a.merge(b), one, other, is_leaf=is_metric)


def with_steps_and_time(metrics: Any, steps: int, duration: float) -> Any:
    """The metrics with the number of steps and the seconds filled in where they belong."""

    def filled_in(metric: Any) -> Any:
        known = {"steps": steps, "duration": duration}
        fields = {name: value for name, value in known.items() if hasattr(metric, name)}
        return metric.replace(**fields) if fields else metric

    return jax.tree.map(filled_in, metrics, is_leaf=is_metric)


def on_host(metrics: Any) -> Any:
    """The metrics with float64 numbers of the host, which stay exact over long windows."""
    fetched = jax.device_get(metrics)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), fetched)


def computed(metrics: MetricMap) -> dict[str, Scalar]:
    """Name -> value, without what was not measured."""
    return {
        name: metric.compute_value()
        for name, metric in metrics.items()
        if not (isinstance(metric, AverageOfMeasured) and metric.count == 0)
    }
