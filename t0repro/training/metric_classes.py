"""Metrics: small pytrees that merge over microbatches, steps and batches, and what writes them.

They have the names and the meaning of clu's and T5X's classes, without TensorFlow, which clu
imports to write them. A model may return clu's own, too.

    metrics = {"loss": AveragePerStep.from_model_output(loss), "rows": Sum.from_model_output(8)}
    metrics["loss"].merge(other["loss"]).compute()

Only the host knows durations and the number of steps; it fills them in when a summary is written
(`MetricsManager`).
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.training.metrics import OpenWriter, SplitMetrics, Writer, in_split

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


class Timed:
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
class Time(Timed, Metric):
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
        return _filled_in(self.duration)


@flax.struct.dataclass
class TimeRate(_Additive, Timed, Metric):
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
        return self.numerator / _filled_in(self.duration)


@flax.struct.dataclass
class StepsPerTime(_Additive, Step, Timed, Metric):
    """Steps per second."""

    steps: Any = None
    duration: float | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model_output(cls, steps: int | None = None, **_: Any) -> Self:
        """From a number of steps; one by default."""
        return cls(steps=steps)

    def compute(self) -> Any:
        """Steps per second."""
        return (1 if self.steps is None else self.steps) / _filled_in(self.duration)


def _filled_in(duration: float | None) -> float:
    if duration is None:
        raise ValueError("The duration is filled in when a summary is written; this is none.")
    # The clock may show no time between two steps; a rate has to stay finite.
    return max(duration, 1e-9)


def is_metric_obj(obj: Any) -> bool:
    """Whether a node of a pytree is a metric: of these classes, of clu's or of T5X's."""
    return isinstance(obj, Metric) or (hasattr(obj, "merge") and hasattr(obj, "compute_value"))


def is_time_metric(obj: Any) -> bool:
    """Whether a metric needs a duration."""
    return isinstance(obj, Timed)


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


def with_steps_and_time(metrics: Any, steps: int, duration: float) -> Any:
    """The metrics, with the number of steps and the seconds filled into each that needs them."""
    return set_step_metrics_num_steps(set_time_metrics_duration(metrics, duration), steps)


def on_host(metrics: Any) -> Any:
    """The metrics on the host; those of this module with float64, exact over long windows."""

    def fetched(metric: Any) -> Any:
        if not isinstance(metric, Metric):
            return metric  # clu's may hold numbers of other types
        return jax.tree.map(lambda x: np.asarray(x, np.float64), metric)

    return jax.tree.map(fetched, jax.device_get(metrics), is_leaf=is_metric_obj)


def computed(metrics: MetricMap) -> dict[str, Any]:
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


# ---- Writing metrics, in a background thread that also times the steps ---------------------------

Values = Mapping[str, Any]  # Scalars, and what is no single number


@dataclasses.dataclass(frozen=True)
class Fetched:
    """One update's metrics on the host, and its times.

    Attributes:
      metrics: metrics by name.
      seconds: from the end of the update before on the device to the end of this one.
      input_wait: how much of that the device waited for a batch.
    """

    metrics: MetricMap
    seconds: float
    input_wait: float


class MetricsManager:
    """Writes summaries of one split's metrics: `train`, or `training_eval/<task>`.

    All work that waits for the device is done by one background thread, in the order of the calls.
    A duration is from the end of one piece of device work to the end of the next: the training loop
    runs ahead of the device, so times taken around its calls would mean nothing.

    An error of the thread, such as a full disk, is raised by the future of the call that it belongs
    to and again, once, by `flush` or `close`; what was handed in after it is written all the same.

    Args:
      name: the split's name.
      summary_dir: where metrics.jsonl is written and, below it, what `open_writer` opens; None
        writes nothing.
      open_writer: opens a folder's writer of TensorBoard's events (see BaseTrainer).
      files: where values are written instead. The caller closes them.
    """

    def __init__(
        self,
        name: str,
        summary_dir: str | None = None,
        *,
        open_writer: OpenWriter | None = None,
        files: SplitMetrics | None = None,
    ):
        self.name, self._files, self._own_files = name, files, None
        self._summary_dir = summary_dir
        if files is None and summary_dir is not None and jax.process_index() == 0:
            writers = in_split(summary_dir, open_writer)
            self._files = self._own_files = SplitMetrics(summary_dir, None, writers)
        self._timer_started = False
        self._made_at: float | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"metrics {name}")
        self._lock = threading.Lock()
        self._pending: list[concurrent.futures.Future] = []
        # Used by the background thread alone:
        self._merged: Any = None
        self._steps, self._seconds, self._ended_at = 0, 0.0, 0.0

    def write_to(self, files: SplitMetrics) -> None:
        """Has values from here on written to files of the caller's."""
        self._files = files

    def report_uptime(self) -> None:
        """Adds `timing/uptime` to each summary from here on: seconds since this call."""
        self._made_at = time.perf_counter()

    @property
    def summary_dir(self) -> str | None:
        """The split's folder, in every process; None if nothing is written."""
        folder = self._summary_dir if self._files is None else self._files.folder
        return folder and os.path.join(folder, self.name)

    @property
    def summary_writer(self) -> Writer:
        """Writes to the split: TensorBoard's events if there are any, else lines."""
        opened = None if self._files is None else self._files.writer_of(self.name)
        return opened or _SplitWriter(self)

    def write_scalar(self, key: str, val: Any, step: int) -> None:
        """Writes one value, in the background."""
        self.write_scalars(step, {key: val})

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes values, in the background."""
        self._submit(lambda: self._write(int(step), {k: float(v) for k, v in scalars.items()}))

    def write_event(self, key: str, val: float, step: int) -> None:
        """Writes one value to TensorBoard's events alone, in the background: no line for it."""

        def write() -> None:
            if self._files is not None and jax.process_index() == 0:
                self._files.write_events(self.name, int(step), {key: float(val)})

        self._submit(write)

    def start_duration_timer(self, block_on: Any = ()) -> None:
        """Starts the clock: the next duration begins now, or when `block_on` is ready.

        Call it before the first step, and after pauses that should not count.
        """
        called_at, self._timer_started = time.perf_counter(), True

        def note() -> None:
            _wait_for(block_on)
            now = time.perf_counter() if jax.tree.leaves(block_on) else called_at
            # Work that was queued before this call may have ended after it.
            self._ended_at = max(self._ended_at, now)

        self._submit(note)

    def add(self, metrics: Any, input_wait: float | None = None) -> concurrent.futures.Future:
        """Adds one update's metrics to the next summary; the future is a `Fetched`.

        Args:
          metrics: metrics by name, which the device may still be computing.
          input_wait: seconds that the caller waited for the batch just before, if known; adds the
            metric `timing/input_wait_fraction`.
        """
        called_at = time.perf_counter()

        def fetch() -> Fetched:
            jax.block_until_ready(metrics)
            now, before = time.perf_counter(), self._ended_at
            self._ended_at = now
            # Waiting while the device works on the update before costs nothing.
            waited = max(0.0, min(input_wait or 0.0, called_at - (before or called_at)))
            fetched = on_host(metrics)
            if input_wait is not None:
                # Seconds waited per second make a fraction.
                fetched["timing/input_wait_fraction"] = TimeRate(waited)
            seconds = now - (before or now)
            self._steps, self._seconds = self._steps + 1, self._seconds + seconds
            merged = self._merged
            self._merged = fetched if merged is None else merge_metrics(merged, fetched)
            return Fetched(fetched, seconds, waited)

        return self._submit(fetch)

    def write_summary(self, step: int) -> concurrent.futures.Future:
        """Writes what was added since the last summary; the future is a dictionary of Scalars.

        It is empty, and nothing is written, if nothing was added.
        """

        def summarise() -> Values:
            if self._merged is None:
                return {}
            values = computed(with_steps_and_time(self._merged, self._steps, self._seconds))
            if self._made_at is not None:
                values["timing/uptime"] = Scalar(time.perf_counter() - self._made_at)
            self._merged, self._steps, self._seconds = None, 0, 0.0
            self._write(step, values)
            return values

        return self._submit(summarise)

    def write_metrics_summary(
        self, metrics: MetricMap | None, step: int, num_steps: int
    ) -> concurrent.futures.Future:
        """Writes metrics that were merged over `num_steps` steps; as `write_summary`.

        Raises:
          ValueError: if `start_duration_timer` was not called since the summary before.
        """
        if not self._timer_started:
            raise ValueError("The timer was not started: call start_duration_timer first.")
        self._timer_started = False
        if metrics is not None:
            self.add(metrics)

        def count() -> None:
            # `add` has counted one step.
            self._steps += num_steps - 1 if metrics is not None else 0

        self._submit(count)
        return self.write_summary(step)

    def flush(self) -> None:
        """Waits until everything handed in is written, and visible to readers.

        Raises:
          Exception: the first error of the background thread that was not raised here before.
        """
        error = self._wait()
        if self._files is not None and jax.process_index() == 0:
            self._files.flush()
        if error is not None:
            raise error

    def close(self) -> None:
        """Flushes, and ends the thread; it may be called again."""
        try:
            error = self._wait()
        finally:
            self._pool.shutdown()
            files, self._own_files = self._own_files, None
            if files is not None:
                files.close()
        if error is not None:
            raise error

    def _submit(self, work: Callable[[], Any]) -> concurrent.futures.Future:
        with self._lock:
            # Only what is unfinished or failed is kept: a long run makes millions of these.
            self._pending = [p for p in self._pending if not p.done() or p.exception()]
            future = self._pool.submit(work)
            self._pending.append(future)
        return future

    def _wait(self) -> BaseException | None:
        with self._lock:
            pending, self._pending = self._pending, []
        errors = [future.exception() for future in pending]
        return next((error for error in errors if error is not None), None)

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        # Process 0 writes for all; the others fetch and compute the same values.
        if self._files is not None and jax.process_index() == 0:
            self._files.write(self.name, step, values)


class _SplitWriter:
    """A split's lines as a writer; closing it leaves the manager open."""

    def __init__(self, manager: MetricsManager):
        self._manager = manager

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes a line."""
        self._manager.write_scalars(step, scalars)

    def flush(self) -> None:
        """Waits until the lines are written."""
        self._manager.flush()

    def close(self) -> None:
        """Waits until the lines are written."""
        self._manager.flush()


def _wait_for(arrays: Any) -> None:
    """Waits until arrays are computed; one that was donated since has been, or soon will be."""
    for array in jax.tree.leaves(arrays):
        try:
            jax.block_until_ready(array)
        except RuntimeError as error:
            if "deleted or donated" not in str(error):
                raise
