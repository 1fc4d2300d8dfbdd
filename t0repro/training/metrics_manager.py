"""Writes metrics, in a background thread that also times the steps."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from t0repro.training.metric_classes import (
    MetricMap,
    Scalar,
    TimeRate,
    compute_values,
    copy_to_host,
    fill_in_steps,
    merge_metrics,
)
from t0repro.training.metrics import OpenWriter, SplitMetrics, Writer, open_below

Values = Mapping[str, Any]  # Scalars, and what is not a single number


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
            writers = open_below(summary_dir, open_writer)
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
            fetched = copy_to_host(metrics)
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

        def summarize() -> Values:
            if self._merged is None:
                return {}
            values = compute_values(fill_in_steps(self._merged, self._steps, self._seconds))
            if self._made_at is not None:
                values["timing/uptime"] = Scalar(time.perf_counter() - self._made_at)
            self._merged, self._steps, self._seconds = None, 0, 0.0
            self._write(step, values)
            return values

        return self._submit(summarize)

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
