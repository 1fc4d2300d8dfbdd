"""The training loop of the commands: a trainer's updates, and what the plan does between them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from t0repro.errors import UserError
from t0repro.model.features import rename_features
from t0repro.training.metrics import MetricLog, SplitMetrics, StepMetrics
from t0repro.training.step_records import (
    TrainFeed,
    count_if_sharded,
    counts_of,
    number,
    other_metrics,
    time_batches,
    train_error,
)
from t0repro.training.train_state import TrainState
from t0repro.training.trainer import BaseTrainer, NumpyBatch, PreemptionError


class Hook:
    """Something that a TrainingLoop does between steps; methods do nothing unless overridden."""

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Called when training starts, with the global step at which it will end."""

    def before_first_step(self, loop: TrainingLoop) -> None:
        """Called when the first batch has been read, before its update is compiled."""

    def after_step(self, loop: TrainingLoop) -> None:
        """Called after each update, while the device may still be computing it."""

    def is_due(self, step: int) -> bool:
        """Whether `after_step` has work after this step, which a call of `train` must not pass."""
        del step
        return False

    def after_train(self, summary: concurrent.futures.Future) -> None:
        """Called with what a trainer's own `train` returned, before its last `after_step`."""

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Called with each step's metrics once they have been read, one step late."""

    def on_bad_update(self, loop: TrainingLoop, batch: NumpyBatch, metrics: StepMetrics) -> None:
        """Called when an update was held back because its loss or a gradient is NaN or Inf.

        The state is the one before the update.
        """

    def wait(self) -> None:
        """Waits for the hook's background work and raises its error."""

    def finish(self, loop: TrainingLoop) -> None:
        """Called after the last step unless an exception ended training: completes pending work."""

    def end(self, loop: TrainingLoop) -> None:
        """Called when training has ended, even by an exception: undoes what `start` set up."""


@dataclasses.dataclass(frozen=True)
class _Pending:
    """An update that the device may still be computing, and its counts if devices compute them."""

    step: int
    batch: NumpyBatch
    counts: Mapping[str, Any] | None
    fetched: concurrent.futures.Future


class TrainingLoop:
    """Trains until a step, running hooks between updates.

        with TrainingLoop(trainer, hooks=[SaveCheckpoints(folder, SaveConfig(1000))]) as loop:
            loop.run(batches, num_steps=10_000)

    An update's loss is read while the device computes the next update, so that the device never
    waits for the host:

        host      start 1   hooks 1 | start 2   report 1   hooks 2 | start 3   report 2   hooks 3
        device            [-------- update 1 --------][-------- update 2 --------][-- update 3 --

    "report 1" waits for update 1, writes its metrics and calls `on_metrics`: one step late. "hooks
    2" calls `after_step`, while the device may still compute update 2; a hook that needs its
    metrics calls `flush` first.

    Args:
      trainer: does the updates; the loop closes it.
      log: where to write a line for every step; None for nowhere. The loop closes it.
      files: what the trainer and the hooks write to; the loop closes them.
      hooks: run between updates, in this order.
      may_be_nan: whether training continues after a loss that is NaN or Inf; otherwise it is an
        error.
      synchronous: whether each update's loss is read before the next begins.
      start_step: the global step before the first update; None reads it from the trainer's state.

    Attributes:
      trainer: the trainer.
      step: the global step, that is the number of updates done.
      error: the exception that ended training, or None.
      stop_reason: why training was asked to stop, or None.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        *,
        log: MetricLog | None = None,
        files: SplitMetrics | None = None,
        hooks: Sequence[Hook] = (),
        may_be_nan: bool = False,
        synchronous: bool = False,
        start_step: int | None = None,
    ):
        self.trainer, self._log, self._files, self._hooks = trainer, log, files, hooks
        self._may_be_nan, self._synchronous = may_be_nan, synchronous
        self._pending: _Pending | None = None
        self._starts_clock = True
        # Of a call of a trainer's own `train`: the step it ends at, and whether updates are seen.
        self._call_ends, self._follows = 0, False
        state = trainer.stacked_state
        self.step = int(jax.device_get(state.step)) if start_step is None else start_step
        self.error: BaseException | None = None
        self.stop_reason: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether an exception ended training."""
        return self.error is not None

    @property
    def train_state(self) -> TrainState:
        """The state after the latest update; valid until the next."""
        return self.trainer.train_state

    @property
    def stacked_state(self) -> TrainState:
        """The same state as the trainer stores it, without a copy (t0repro.model.layer_stacks)."""
        return self.trainer.stacked_state

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            # Closed after the trainer, whose background threads write to these until it ends.
            for file in (self._log, self._files):
                if file is not None:
                    stack.callback(file.close)
            self.trainer.__exit__(kind, error, trace)

    def run(self, batches: Iterable[NumpyBatch], num_steps: int) -> int:
        """Does up to `num_steps` updates and returns how many it did.

        It does fewer if the batches run out or a hook calls `stop`.

        Raises:
          UserError: if a loss is NaN or Inf, or if the model refuses a batch.
          PreemptionError: if the batches or a hook raised it, after a save.
        """
        first, last_step = self.step, self.step + num_steps
        started: list[Hook] = []
        preemption: PreemptionError | None = None
        try:
            try:
                for hook in self._hooks:
                    # Add it before `start`: a hook whose start fails must still be ended.
                    started.append(hook)
                    hook.start(self, last_step)
                self._run_steps(batches, num_steps)
                if self.trainer.stop_training:
                    self.stop("the trainer's stop_training was set")
            except PreemptionError as error:
                # Not a failure: the hooks save, as after a signal.
                self.stop(str(error) or "preempted")
                preemption = error
            self.flush()
            for hook in started:
                hook.finish(self)
        except BaseException as error:
            self.error = error
            raise
        finally:
            # Whatever ended training, restore signal handlers, garbage collection and the terminal.
            with contextlib.ExitStack() as stack:
                for hook in reversed(started):
                    stack.callback(self._end, hook)
        if preemption is not None:
            raise preemption
        return self.step - first

    def _end(self, hook: Hook) -> None:
        try:
            hook.end(self)
        except Exception as error:
            if not self.has_failed:
                raise
            # Only log this one: it must not replace the error that ended training.
            logging.warning("After the error that ended training, another: %s", error)

    def _run_steps(self, batches: Iterable[NumpyBatch], num_steps: int) -> None:
        stopped = self.trainer.stop_training  # before the first step, by an evaluation
        if self.trainer.overrides("train"):
            self._run_calls(iter(batches), self.step + num_steps)
            return
        read = () if stopped else time_batches(itertools.islice(batches, num_steps))
        for index, (batch, wait) in enumerate(read):
            if not index:
                self._prepare_first(batch)
            before = self.step
            self._update(batch, wait)
            if not index:
                self._write_start(wait, before)
            self._run_after_step(before)
            if self.trainer.stop_training:
                break

    def _prepare_first(self, batch: NumpyBatch) -> None:
        for hook in self._hooks:
            hook.before_first_step(self)
        if self.trainer.overrides("compile_train"):
            self.trainer.compile_train(batch)

    def _run_after_step(self, before: int) -> None:
        # An update that was not applied does not count as a step.
        for hook in self._hooks if self.step > before else ():
            hook.after_step(self)

    def _write_start(self, wait: float, step: int) -> None:
        """Writes T5X's times of how training starts to TensorBoard's events."""
        manager = self.trainer.train_metrics_manager
        manager.write_event("timing/train_iter_warmup", wait, step)
        seconds = self.trainer.compilation_seconds
        manager.write_event("timing/compilation_seconds", seconds, step)

    def stop(self, reason: str | None = None) -> None:
        """Makes `run` end after the current update, as if there were no more batches.

        A stop cannot be taken back.

        Args:
          reason: why, in a line; the first reason given is kept.
        """
        self.trainer.stop_training = True
        self.stop_reason = self.stop_reason or reason

    def wait(self) -> None:
        """Waits for the hooks' background work, such as a save; raises its errors."""
        for hook in self._hooks:
            hook.wait()

    def flush(self) -> None:
        """Waits for the latest update, and until its metrics are written."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._record(pending)
        self.trainer.train_metrics_manager.flush()
        if self._log is not None:
            self._log.flush()
        # Work between steps, such as a save, must not count as the next update's time.
        self._starts_clock = True

    def _update(self, batch: NumpyBatch, input_wait: float) -> None:
        """Starts one update and records the one before."""
        # Count before the update starts: afterward the counts would queue behind it on the
        # devices.
        counts = count_if_sharded(batch, self.trainer.model)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step):
            fetched = self.trainer.update(batch, input_wait, starts_clock=self._starts_clock)
        self._starts_clock = False
        self._note(batch, counts, fetched)

    def _note(
        self,
        batch: NumpyBatch,
        counts: Mapping[str, Any] | None,
        fetched: concurrent.futures.Future,
    ) -> None:
        """Counts an update that has started, and records the one before."""
        self.step += 1
        previous = self._pending
        self._pending = _Pending(self.step, batch, counts, fetched)
        if previous is not None:
            self._record(previous)
        if self._synchronous:
            pending, self._pending = self._pending, None
            self._record(pending)

    def _record(self, pending: _Pending) -> None:
        """Waits for an update and reports it."""
        fetched = pending.fetched.result()
        values = fetched.metrics
        counts = pending.counts or counts_of(pending.batch, self.trainer.model)
        loss, tokens = number(values, "loss"), int(counts["target_tokens"])
        metrics = StepMetrics(
            step=pending.step,
            loss=loss,
            learning_rate=number(values, "learning_rate"),
            seconds=round(fetched.seconds, 6),
            **{name: int(count) for name, count in counts.items()},
            input_wait_seconds=round(fetched.input_wait, 6),
            # Only for the log: a run with summaries writes them there.
            others={} if self._log is None else other_metrics(fetched),
            loss_per_target_token=self._loss_per_token(loss, tokens, pending.batch),
        )
        is_skipped = "update_held" in values and bool(values["update_held"].compute())
        if is_skipped:
            self.step -= 1  # the state is unchanged, and no update followed
            for hook in self._hooks:
                hook.on_bad_update(self, pending.batch, metrics)
        self._report(metrics, is_skipped=is_skipped)

    def _report(self, metrics: StepMetrics, *, is_skipped: bool = False) -> None:
        """Writes a step's metrics and passes them to the hooks."""
        if not is_skipped and not math.isfinite(metrics.loss) and not self._may_be_nan:
            raise UserError(
                f"The loss of step {metrics.step} is {metrics.loss}.",
                where="training",
                fix="Start again with a lower learning rate, from an earlier checkpoint if there is"
                " one. In T5X's gin files, trainer.TerminateOnNanAction names the tensor that broke"
                " first (docs/trainer.md).",
            )
        if self._log is not None:
            self._log.write_step(metrics)
        for hook in self._hooks:
            hook.on_metrics(metrics)

    # It is called as T5X calls it: for all steps up to the next one after which a hook has work. If
    # it updates by the trainer's `update`, as BaseTrainer's does, the loop follows each update
    # (`_follow`). Otherwise it loops over the train step itself, and the loop learns from the state
    # and from the summary what it did.

    def _run_calls(self, batches: Iterator[NumpyBatch], last_step: int) -> None:
        feed, first = TrainFeed(batches, self.trainer.model, self._prepare_first), self.step
        self.trainer.on_update = self._follow
        try:
            while self.step < last_step and not self.trainer.stop_training:
                before = self.step
                try:
                    self._call_train(feed, last_step)
                except StopIteration:  # the batches have ended
                    if feed.counts and not self._follows:
                        what = "lost its updates when the batches ended"
                        raise train_error(self.trainer, what) from None
                    break
                if before == first:
                    self._write_start(feed.first_wait or 0.0, first)
        finally:
            self.trainer.on_update = None

    def _call_train(self, feed: TrainFeed, last_step: int) -> None:
        """One call, and what follows its last step.

        Raises:
          StopIteration: if the batches end.
          UserError: if it does no update, or returns no summary.
        """
        before, trainer = self.step, self.trainer
        steps = range(before + 1, last_step)
        due = (step for step in steps if any(hook.is_due(step) for hook in self._hooks))
        self._call_ends, self._follows = next(due, last_step), False
        feed.counts.clear()
        started = time.perf_counter()
        summary = trainer.train(feed, self._call_ends - before, start_step=before)
        if not self._follows:
            self.step = int(jax.device_get(trainer.stacked_state.step))
        wrong = None if hasattr(summary, "result") else f"returned {summary!r}"
        if self.step == before and not trainer.stop_training:
            wrong = f"did no update at step {before:,}"
        if wrong:
            raise train_error(trainer, wrong)
        for hook in self._hooks:
            hook.after_train(summary)
        if not self._follows:
            seconds = time.perf_counter() - started
            self._report(self._mean_step(summary.result(), feed, self.step - before, seconds))
        elif self._pending is not None:
            pending, self._pending = self._pending, None
            self._record(pending)
        if self.step >= self._call_ends or not self._follows:
            self._run_after_step(before)

    def _follow(self, batch: NumpyBatch, fetched: concurrent.futures.Future) -> None:
        before, self._follows, batch = self.step, True, rename_features(batch)
        counts = count_if_sharded(batch, self.trainer.model)
        self._note(batch, counts, fetched)
        if self.step < self._call_ends:
            self._run_after_step(before)

    def _mean_step(
        self, values: Mapping[str, Any], feed: TrainFeed, steps: int, seconds: float
    ) -> StepMetrics:
        """The metrics of the last of some steps, as means over them."""
        counts, loss = feed.mean_counts(steps), number(values, "loss")
        tokens, batch = counts["target_tokens"], rename_features(feed.latest)
        return StepMetrics(
            step=self.step,
            loss=loss,
            learning_rate=number(values, "learning_rate"),
            seconds=round(seconds / max(steps, 1), 6),
            **counts,
            loss_per_target_token=self._loss_per_token(loss, tokens, batch),
        )

    def _loss_per_token(self, loss: float, tokens: int, batch: NumpyBatch) -> float | None:
        per_token = getattr(self.trainer.model, "loss_per_target_token", None)
        return None if per_token is None else per_token(loss, tokens, batch)
