"""Metrics: small pytrees that merge over microbatches, steps and batches.

They have the names and the meaning of clu's and T5X's classes, without TensorFlow, which clu
imports to write them. A model may return clu's own, too.

    metrics = {"loss": AveragePerStep.from_model_output(loss), "rows": Sum.from_model_output(8)}
    metrics["loss"].merge(other["loss"]).compute()

Only the host knows durations and the number of steps; it fills them in when a summary is written
(t0repro.training.metrics_manager).
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Mapping
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

MetricMap = Mapping[str, "Metric"]
MetricsMap = MetricMap  # T5X's name


class Scalar(float):
    """A metric's value: a number that is a clu.values.Scalar too, with `.value`."""

    def __new__(cls, value: float | np.ndarray) -> Self:
        """Makes the number known to clu, if somebody has imported clu and may ask for its class."""
        # T5X's own actions, and those written like them, act on a clu.values.Scalar and on nothing
        # else. Importing clu here would import TensorFlow.
        if values := sys.modules.get("clu.values"):
            values.Scalar.register(cls)
        return super().__new__(cls, value)

    @property
    def value(self) -> float:
        """The number."""
        return float(self)


@flax.struct.dataclass
class Metric(abc.ABC):
    """A value that merges with others of its class and computes to a number.

    A class that merges by adding its fields sets `additive = True`; devices may then all-reduce
    these fields, in any order.
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

    def compute_value(self) -> Any:
        """The number as a Scalar; an array if it is more than one number."""
        # A model's own metric may compute an array, which becomes a histogram.
        value = np.asarray(self.compute())
        return Scalar(value) if value.ndim == 0 else value


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
    def from_model_output(cls, values: Any, **_: Any) -> Self:
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
    def from_model_output(
        cls, values: Any, mask: Any = None, *, count: Any = None, **_: Any
    ) -> Self:
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
class Accuracy(Average):
    """The share of targets that have the largest logit."""

    @classmethod
    def from_model_output(cls, *, logits: Any, labels: Any, mask: Any = None, **_: Any) -> Self:
        """From logits [..., classes], ids [...] and a mask of the ids that count."""
        right = jnp.argmax(jnp.asarray(logits), axis=-1) == jnp.asarray(labels)
        return super().from_model_output(right, mask)


@flax.struct.dataclass
class AverageOfMeasured(Average):
    """A mean over the steps at which something was measured; omitted if nothing was."""


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


class Step:
    """A metric that counts steps; a summary fills in how many there were."""

    steps: Any

    def replace_steps(self, steps: int) -> Self:
        """The metric of this number of steps, however many microbatches were merged."""
        return self.replace(steps=steps)  # pyright: ignore[reportAttributeAccessIssue]


class _Timed:
    """A metric over a time; a summary fills in the duration."""

    duration: float | None

    def replace_duration(self, duration: float) -> Self:
        """The metric over this many seconds."""
        return self.replace(duration=duration)  # pyright: ignore[reportAttributeAccessIssue]


@flax.struct.dataclass
class AveragePerStep(_Additive, Step, Metric):
    """The total over the number of steps, however many microbatches or batches were merged."""

    total: Any
    # None until a summary fills it in: microbatches are added too, and must not count as steps.
    steps: Any = None

    @classmethod
    def from_model_output(cls, values: Any, steps: int | None = None, **_: Any) -> Self:
        """From an array or a number of that many steps; one step by default."""
        return cls(total=_total(values), steps=steps)

    def compute(self) -> Any:
        """The mean per step."""
        return self.total / (1 if self.steps is None else self.steps)


@flax.struct.dataclass
class Time(_Timed, Metric):
    """How long the steps took, in seconds."""

    # No part of the pytree: only the host knows it, and merging must not add it up.
    duration: float | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model_output(cls, **_: Any) -> Self:
        """Takes nothing."""
        return cls()

    def merge(self, other: Self) -> Self:
        """Nothing yet: the duration is filled in at the end."""
        return self

    def compute(self) -> Any:
        """Seconds."""
        return _require_duration(self.duration)


@flax.struct.dataclass
class TimeRate(_Additive, _Timed, Metric):
    """A total per second."""

    numerator: Any
    duration: float | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model_output(cls, numerator: Any, **_: Any) -> Self:
        """From an array or a number."""
        return cls(numerator=_total(numerator))

    def merge(self, other: Self) -> Self:
        """The sum; before durations are filled in."""
        assert self.duration is None and other.duration is None, "Durations cannot be merged."
        return super().merge(other)

    def compute(self) -> Any:
        """Per second."""
        return self.numerator / _require_duration(self.duration)


@flax.struct.dataclass
class StepsPerTime(_Additive, Step, _Timed, Metric):
    """Steps per second."""

    steps: Any = None
    duration: float | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model_output(cls, steps: int | None = None, **_: Any) -> Self:
        """From a number of steps; one by default."""
        return cls(steps=steps)

    def compute(self) -> Any:
        """Steps per second."""
        return (1 if self.steps is None else self.steps) / _require_duration(self.duration)


def _require_duration(duration: float | None) -> float:
    if duration is None:
        raise ValueError("The duration is filled in when a summary is written; this is none.")
    # The clock may show no time between two steps; a rate has to stay finite.
    return max(duration, 1e-9)


def is_metric_obj(obj: Any) -> bool:
    """Whether a node of a pytree is a metric: of these classes, of clu's or of T5X's."""
    return isinstance(obj, Metric) or (hasattr(obj, "merge") and hasattr(obj, "compute_value"))


def is_time_metric(obj: Any) -> bool:
    """Whether a metric needs a duration."""
    return isinstance(obj, _Timed)


def create_metrics_dict(float_metrics_dict: Mapping[str, Any]) -> dict[str, Sum]:
    """A `Sum` of each number."""
    return {name: Sum(value) for name, value in float_metrics_dict.items()}


def merge_metrics(a: Any, b: Any) -> Any:
    """Merges two trees of metrics, for instance dictionaries by name; `b` is the later one."""
    return jax.tree.map(lambda one, two: one.merge(two), a, b, is_leaf=is_metric_obj)


def set_time_metrics_duration(metrics: Any, duration: float) -> Any:
    """The metrics, with the seconds filled into each that needs a duration."""
    # By the method's name: T5X's own classes have it too.
    return jax.tree.map(
        lambda x: x.replace_duration(duration) if hasattr(x, "replace_duration") else x,
        metrics,
        is_leaf=is_metric_obj,
    )


def set_step_metrics_num_steps(metrics: Any, num_steps: int) -> Any:
    """The metrics, with the number of steps filled into each that needs it."""
    return jax.tree.map(
        lambda x: x.replace_steps(num_steps) if hasattr(x, "replace_steps") else x,
        metrics,
        is_leaf=is_metric_obj,
    )


def fill_in_steps(metrics: Any, steps: int, duration: float) -> Any:
    """The metrics, with the number of steps and the seconds filled into each that needs them."""
    return set_step_metrics_num_steps(set_time_metrics_duration(metrics, duration), steps)


def copy_to_host(metrics: Any) -> Any:
    """The metrics on the host; those of this module with float64, exact over long windows."""

    def as_float64(metric: Any) -> Any:
        if not isinstance(metric, Metric):
            return metric  # clu's may hold numbers of other types
        return jax.tree.map(lambda x: np.asarray(x, np.float64), metric)

    return jax.tree.map(as_float64, jax.device_get(metrics), is_leaf=is_metric_obj)


def compute_values(metrics: MetricMap) -> dict[str, Any]:
    """Name -> value, omitting what was not measured; a Scalar, an array or a value of clu's."""
    return {
        name: _plain(metric.compute_value())
        for name, metric in metrics.items()
        if not (isinstance(metric, AverageOfMeasured) and metric.count == 0)
    }


def _plain(value: Any) -> Any:
    """A Scalar for one number of clu's; other values as they are."""
    number = getattr(value, "value", value)
    is_number = type(value).__name__ == "Scalar" and np.ndim(number) == 0
    return Scalar(np.asarray(number)) if is_number else value
