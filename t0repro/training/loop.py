"""The training loop of the commands: a trainer's updates, with hooks between them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from t0repro.errors import UserError
from t0repro.partitioning.devices import is_sharded
from t0repro.partitioning.processes import is_alone
from t0repro.training.hooks import Hook
from t0repro.training.losses import count_examples, count_inputs, count_targets
from t0repro.training.metric_classes import Fetched, computed, with_steps_and_time
from t0repro.training.metrics import MetricLog, SplitMetrics, StepMetrics
from t0repro.training.train_state import TrainState
from t0repro.training.trainer import BaseTrainer, NumpyBatch, PreemptionError


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

    An update's loss is read while the device computes the next update.

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
        state = trainer.held_state
        self.step = int(jax.device_get(state.step)) if start_step is None else start_step
        self.error: BaseException | None = None
        self.stop_reason: str | None = None

    @property
    def failed(self) -> bool:
        """Whether an exception ended training."""
        return self.error is not None

    @property
    def train_state(self) -> TrainState:
        """The state after the latest update; valid until the next."""
        return self.trainer.train_state

    @property
    def held_state(self) -> TrainState:
        """The same state as the trainer stores it, without a copy (t0repro.training.train_step)."""
        return self.trainer.held_state

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
                self._steps(batches, num_steps)
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
            if not self.failed:
                raise
            # Only log this one: it must not replace the error that ended training.
            logging.warning("After the error that ended training, another: %s", error)

    def _steps(self, batches: Iterable[NumpyBatch], num_steps: int) -> None:
        stopped = self.trainer.stop_training  # before the first step, by an evaluation
        timed = () if stopped else _timed(itertools.islice(batches, num_steps))
        for number, (batch, wait) in enumerate(timed):
            for hook in () if number else self._hooks:
                hook.before_first_step(self)
            before = self.step
            self._update(batch, wait)
            if not number:
                self._write_start(wait, before)
            # An update that was not applied does not count as a step.
            for hook in self._hooks if self.step > before else ():
                hook.after_step(self)
            if self.trainer.stop_training:
                break

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
        # Count before the update starts: afterwards the counts would queue behind it on the
        # devices.
        counts = _on_devices(batch) if any(map(is_sharded, batch.values())) else None
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step):
            fetched = self.trainer.update(batch, input_wait, starts_clock=self._starts_clock)
        self._starts_clock = False
        self.step += 1
        previous = self._pending
        self._pending = _Pending(self.step, batch, counts, fetched)
        if previous is not None:
            self._record(previous)
        if self._synchronous:
            pending, self._pending = self._pending, None
            self._record(pending)

    def _record(self, pending: _Pending) -> None:
        """Waits for an update, then writes its metrics and passes them to the hooks."""
        fetched = pending.fetched.result()
        values, counts = fetched.metrics, pending.counts or _counts(pending.batch)
        loss, tokens = _number(values, "loss"), int(counts["target_tokens"])
        metrics = StepMetrics(
            step=pending.step,
            loss=loss,
            learning_rate=_number(values, "learning_rate"),
            seconds=round(fetched.seconds, 6),
            **{name: int(count) for name, count in counts.items()},
            input_wait_seconds=round(fetched.input_wait, 6),
            # Only for the log: a run with summaries writes them there.
            others={} if self._log is None else _others(fetched),
            loss_per_target_token=self._per_target_token(loss, tokens, pending.batch),
        )
        held = "update_held" in values and bool(values["update_held"].compute())
        if held:
            self.step -= 1  # the state is unchanged, and no update followed
            for hook in self._hooks:
                hook.on_bad_update(self, pending.batch, metrics)
        elif not math.isfinite(metrics.loss) and not self._may_be_nan:
            raise UserError(
                f"The loss of step {metrics.step} is {metrics.loss}.",
                where="training",
                fix="Start again from an earlier checkpoint with a lower learning rate.",
            )
        if self._log is not None:
            self._log.write_step(metrics)
        for hook in self._hooks:
            hook.on_metrics(metrics)

    def _per_target_token(self, loss: float, tokens: int, batch: NumpyBatch) -> float | None:
        of_model = getattr(self.trainer.model, "per_target_token", None)
        return None if of_model is None else of_model(loss, tokens, batch)


def _number(values: Mapping[str, Any], name: str) -> float:
    if name in values:
        return float(values[name].compute())
    raise UserError(
        f"The train step returns no metric {name!r}; it returns {', '.join(sorted(values))}.",
        where="the trainer's _partitioned_train_step",
        fix="Return it: `apply_grads` adds the learning rate, and the model's loss_fn the loss.",
    )


def _counts(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of StepMetrics that count what is in a batch."""
    return {
        "target_tokens": count_targets(batch),
        "examples": count_examples(batch),
        "input_tokens": count_inputs(batch),
    }


# For a batch sharded across processes; all of them must call it.
_on_devices = jax.jit(_counts)


def _others(fetched: Fetched) -> dict[str, float]:
    """A step's metrics that StepMetrics has no fields for."""
    values = computed(with_steps_and_time(fetched.metrics, 1, fetched.seconds))
    for name in ("loss", "learning_rate", "learning_rate/current", "update_held"):
        values.pop(name, None)
    # A line of the log has room for numbers only.
    return {name: float(x) for name, x in values.items() if isinstance(x, int | float)}


def _timed(batches: Iterator[NumpyBatch]) -> Iterator[tuple[NumpyBatch, float]]:
    """Each batch, with the seconds spent waiting for it."""
    while True:
        started = time.perf_counter()
        batch: Any = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - started


@contextlib.contextmanager
def compiled_in_background(
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
    if not is_alone():
        yield
        return
    example = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}

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
