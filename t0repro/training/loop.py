"""The training loop of the commands: a trainer's updates, and what the plan does between them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from t0repro.config.training_plan import TrainingPlan
from t0repro.errors import UserError
from t0repro.files import output_path, write_atomically
from t0repro.model.t5 import own_features
from t0repro.partitioning.processes import from_first, is_alone, is_first
from t0repro.training.hooks import Hook
from t0repro.training.metrics import MetricLog, SplitMetrics, StepMetrics
from t0repro.training.start import Start
from t0repro.training.step_records import (
    TrainFeed,
    counts_of,
    named_as_t5xs,
    number,
    others_of,
    shared_counts,
    timed,
    wrong_train,
)
from t0repro.training.stopping import BaseAction, RunActions
from t0repro.training.t5_model import t5x_features
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
        # Of a call of a trainer's own `train`: the step it ends at, and whether updates are seen.
        self._call_ends, self._follows = 0, False
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
            if not self.failed:
                raise
            # Only log this one: it must not replace the error that ended training.
            logging.warning("After the error that ended training, another: %s", error)

    def _steps(self, batches: Iterable[NumpyBatch], num_steps: int) -> None:
        stopped = self.trainer.stop_training  # before the first step, by an evaluation
        if self.trainer.overrides("train"):
            self._calls_of_train(iter(batches), self.step + num_steps)
            return
        read = () if stopped else timed(itertools.islice(batches, num_steps))
        for index, (batch, wait) in enumerate(read):
            if not index:
                self._before_first(batch)
            before = self.step
            self._update(batch, wait)
            if not index:
                self._write_start(wait, before)
            self._after_step(before)
            if self.trainer.stop_training:
                break

    def _before_first(self, batch: NumpyBatch) -> None:
        for hook in self._hooks:
            hook.before_first_step(self)
        if self.trainer.overrides("compile_train"):
            self.trainer.compile_train(batch)

    def _after_step(self, before: int) -> None:
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
        # Count before the update starts: afterwards the counts would queue behind it on the
        # devices.
        counts = shared_counts(batch)
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
        values, counts = fetched.metrics, pending.counts or counts_of(pending.batch)
        loss, tokens = number(values, "loss"), int(counts["target_tokens"])
        metrics = StepMetrics(
            step=pending.step,
            loss=loss,
            learning_rate=number(values, "learning_rate"),
            seconds=round(fetched.seconds, 6),
            **{name: int(count) for name, count in counts.items()},
            input_wait_seconds=round(fetched.input_wait, 6),
            # Only for the log: a run with summaries writes them there.
            others={} if self._log is None else others_of(fetched),
            loss_per_target_token=self._per_target_token(loss, tokens, pending.batch),
        )
        held = "update_held" in values and bool(values["update_held"].compute())
        if held:
            self.step -= 1  # the state is unchanged, and no update followed
            for hook in self._hooks:
                hook.on_bad_update(self, pending.batch, metrics)
        self._report(metrics, held=held)

    def _report(self, metrics: StepMetrics, *, held: bool = False) -> None:
        """Writes a step's metrics and passes them to the hooks."""
        if not held and not math.isfinite(metrics.loss) and not self._may_be_nan:
            raise UserError(
                f"The loss of step {metrics.step} is {metrics.loss}.",
                where="training",
                fix="Start again from an earlier checkpoint with a lower learning rate.",
            )
        if self._log is not None:
            self._log.write_step(metrics)
        for hook in self._hooks:
            hook.on_metrics(metrics)

    # ---- A `train` of the trainer's own ----------------------------------------------------------

    # It is called as T5X calls it: for all steps up to the next one after which a hook has work. If
    # it updates by the trainer's `update`, as BaseTrainer's does, the loop follows each update
    # (`_follow`). Otherwise it loops over the train step itself, and the loop learns from the state
    # and from the summary what it did.

    def _calls_of_train(self, batches: Iterator[NumpyBatch], last_step: int) -> None:
        feed, first = TrainFeed(batches, self._before_first), self.step
        self.trainer.on_update = self._follow
        try:
            while self.step < last_step and not self.trainer.stop_training:
                before = self.step
                try:
                    self._call_train(feed, last_step)
                except StopIteration:  # the batches have ended
                    if feed.counts and not self._follows:
                        what = "lost its updates when the batches ended"
                        raise wrong_train(self.trainer, what) from None
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
            self.step = int(jax.device_get(trainer.held_state.step))
        wrong = None if hasattr(summary, "result") else f"returned {summary!r}"
        if self.step == before and not trainer.stop_training:
            wrong = f"did no update at step {before:,}"
        if wrong:
            raise wrong_train(trainer, wrong)
        for hook in self._hooks:
            hook.after_train(summary)
        if not self._follows:
            seconds = time.perf_counter() - started
            self._report(self._mean_step(summary.result(), feed, self.step - before, seconds))
        elif self._pending is not None:
            pending, self._pending = self._pending, None
            self._record(pending)
        if self.step >= self._call_ends or not self._follows:
            self._after_step(before)

    def _follow(self, batch: NumpyBatch, fetched: concurrent.futures.Future) -> None:
        before, self._follows, batch = self.step, True, own_features(batch)
        counts = shared_counts(batch)
        self._note(batch, counts, fetched)
        if self.step < self._call_ends:
            self._after_step(before)

    def _mean_step(
        self, values: Mapping[str, Any], feed: TrainFeed, steps: int, seconds: float
    ) -> StepMetrics:
        """The metrics of the last of some steps, as means over them."""
        counts, loss = feed.mean_counts(steps), number(values, "loss")
        tokens, batch = counts["target_tokens"], own_features(feed.latest)
        return StepMetrics(
            step=self.step,
            loss=loss,
            learning_rate=number(values, "learning_rate"),
            seconds=round(seconds / max(steps, 1), 6),
            **counts,
            loss_per_target_token=self._per_target_token(loss, tokens, batch),
        )

    def _per_target_token(self, loss: float, tokens: int, batch: NumpyBatch) -> float | None:
        of_model = getattr(self.trainer.model, "per_target_token", None)
        return None if of_model is None else of_model(loss, tokens, batch)


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
    # A trainer's own `compile_train` is called with the first batch.
    if not is_alone() or trainer.overrides("compile_train"):
        yield
        return
    example = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    if trainer.overrides("train"):
        example = t5x_features(example)

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


# ---- What a run's plan does between steps: summaries, evaluations, and what they remember --------


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """What the evaluations of a training run read.

    Attributes:
      train_eval: Batches by task, for evaluations with the training run's metrics.
      infer_eval: Evaluates the tasks' own metrics; None for no such evaluation.
    """

    train_eval: Mapping[str, Iterable[NumpyBatch]] = dataclasses.field(default_factory=dict)
    infer_eval: InferEval | None = None

    def __bool__(self) -> bool:
        return bool(self.train_eval) or self.infer_eval is not None

    def still_due(self, plan: TrainingPlan, start: Start, evaluated: int) -> bool:
        """Whether the last step's evaluation is still due, although every step is done.

        Args:
          plan: The run's plan.
          start: Where it starts.
          evaluated: The step of its latest finished evaluation; see `last_evaluated`.
        """
        if not self:
            return False
        # The run died while it evaluated its last step.
        was_interrupted = (
            start.checkpoint is not None and bool(plan.eval_period) and evaluated < start.step
        )
        return plan.run_eval_before_training or was_interrupted


class CollectGarbage(Hook):
    """Runs Python's garbage collection every `period` steps, and at no other time."""

    def __init__(self, period: int):
        self._period, self._first = period, 0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Switches off Python's automatic collection."""
        self._first = loop.step
        # Otherwise each process collects after another step, and all of them wait every time.
        gc.disable()

    def is_due(self, step: int) -> bool:
        """Whether this step ends a period."""
        return (step - self._first) % self._period == 0

    def after_step(self, loop: TrainingLoop) -> None:
        """Collects if a collection is due."""
        if self.is_due(loop.step):
            gc.collect()

    def end(self, loop: TrainingLoop) -> None:
        """Restores automatic collection."""
        gc.enable()


# ---- What a run remembers ------------------------------------------------------------------------

# A checkpoint's `progress.json` has the step from which periods are counted, and the state of its
# actions, such as the history of early stopping. A checkpoint is written before the evaluation of
# its step, so model_dir/evaluated.json repeats both as they are after the latest evaluation.

PROGRESS_FILE = "progress.json"
EVALUATED_FILE = "evaluated.json"


class RunProgress:
    """Saves and restores a run's progress: where periods start, and the state of its actions.

    Args:
      model_dir: the run's folder.
      step: the step that training is about to start from.
      actions: the actions of each mode; their saved state is restored here.
      checkpoint: the checkpoint in model_dir that training continues from; None for a new run.

    Attributes:
      path: model_dir/evaluated.json.
      first_step: the step at which the run first began, from which periods are counted.
      evaluated: the step of the latest finished evaluation, if it is `step`; else None.
      stopped: whether an action stopped the run after that evaluation.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        step: int,
        actions: Mapping[str, Sequence[BaseAction]],
        checkpoint: Path | None,
    ):
        self.path, self._actions = output_path(model_dir) / EVALUATED_FILE, actions
        self.first_step, self.evaluated, self.stopped = step, None, False
        if checkpoint is None:
            if is_first():
                # A file that an earlier run left would make this run's first evaluation look done.
                self.path.unlink(missing_ok=True)
            return
        # For the same step, these notes are newer: a checkpoint is written before its step is
        # evaluated and the actions run.
        after = _read(self.path)
        notes = after if after.get("step") == step else _read(checkpoint / PROGRESS_FILE)
        self.first_step = notes.get("first_step", step)
        if notes is after:
            self.evaluated, self.stopped = step, bool(after["stopped"])
        for mode, states in notes.get("actions", {}).items():
            # Matched by position; if the run resumes with more actions, the new ones start empty.
            for action, state in zip(actions.get(mode, ()), states, strict=False):
                action.load_state_dict(state)

    def notes(self) -> dict[str, Any]:
        """The progress as of now, in types that JSON can hold."""
        states = {
            mode: [item.state_dict() for item in items] for mode, items in self._actions.items()
        }
        return {"first_step": self.first_step, "actions": states}

    def save(self, folder: Path) -> None:
        """Writes the progress into a checkpoint that is being written."""
        write_atomically(folder / PROGRESS_FILE, json.dumps(self.notes()))

    def note_evaluated(self, step: int, *, stopped: bool) -> None:
        """Records that the evaluation of a step is done, and so are the actions on it."""
        notes = {"step": step, "stopped": stopped, **self.notes()}
        if is_first():
            write_atomically(self.path, json.dumps(notes))


def last_evaluated(folder: Path) -> int:
    """The step of the latest finished evaluation of a run; -1 if there is none.

    Args:
      folder: the run's folder, which only the first process reads.
    """
    return from_first(lambda: int(_read(folder / EVALUATED_FILE).get("step", -1)))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


# ---- Summaries and evaluations -------------------------------------------------------------------

# A summary at step k covers the steps since the summary before it, up to k, and the state after k
# updates. Splits are TensorBoard's runs: `train`, `training_eval/<task>`,
# `inference_eval/<task>`.


InferEval = Callable[["TrainingLoop"], Mapping[str, Mapping[str, float]]]


class Summarise(Hook):
    """Writes a summary every `period` steps and after the last step.

    Args:
      period: steps between summaries.
      progress: gives the step that they are counted from.
      run_actions: called with each summary as the metrics of the task `train`.
    """

    def __init__(self, period: int, progress: RunProgress, run_actions: RunActions | None = None):
        self._period, self._progress, self._run_actions = period, progress, run_actions
        self._last = 0
        self._written: concurrent.futures.Future | None = None

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Notes where training ends."""
        self._last, self._loop = last_step, loop

    def is_due(self, step: int) -> bool:
        """Whether a summary ends at this step."""
        return (step - self._progress.first_step) % self._period == 0 or step == self._last

    def after_train(self, summary: concurrent.futures.Future) -> None:
        """Takes the summary that a trainer's own `train` has written, of whatever steps."""
        self._written = summary

    def after_step(self, loop: TrainingLoop) -> None:
        """Starts to write a summary in the background if one is due."""
        if self._written is None and self.is_due(loop.step):
            self._written = loop.trainer.train_metrics_manager.write_summary(loop.step)

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Runs the actions on a summary once it has been written."""
        del metrics
        if self._written is None:
            return
        written, self._written = self._written, None
        values = written.result()
        if (
            values
            and self._run_actions
            and self._run_actions(self._loop.held_state, {"train": values})
        ):
            self._loop.stop("an action on the training run's metrics")

    def finish(self, loop: TrainingLoop) -> None:
        """Summarises the steps that no summary covers yet, after a stop."""
        loop.trainer.train_metrics_manager.write_summary(loop.step)


class Evaluate(Hook):
    """Evaluates every `period` steps and after the last step.

    If an evaluation was interrupted, a resumed run repeats it, so that its results and any stop
    that follows equal those of an uninterrupted run.

    Args:
      period: steps between evaluations; 0 for none.
      metrics: where results are written.
      train_eval: batches by task, evaluated with the training run's metrics.
      progress: records which evaluations are finished.
      infer_eval: evaluates the tasks' own metrics: {task: {metric: value}}.
      run_actions: called with the results of `TRAIN_EVAL` and `INFER_EVAL`.
      before_training: whether to evaluate before the first step too.
    """

    def __init__(
        self,
        period: int,
        metrics: SplitMetrics,
        *,
        train_eval: Mapping[str, Any],
        progress: RunProgress,
        infer_eval: InferEval | None = None,
        run_actions: Mapping[str, RunActions] | None = None,
        before_training: bool = False,
    ):
        self._period, self._metrics, self._before = period, metrics, before_training
        self._train_eval, self._infer_eval = train_eval, infer_eval
        self._run_actions, self._progress = run_actions or {}, progress
        self._last, self._is_compiled = 0, False

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Evaluates the initial step, if the plan says so or that evaluation was interrupted."""
        self._last = last_step
        if self._progress.evaluated == loop.step and self._progress.stopped:
            file = self._progress.path.name
            loop.stop(f"an action had stopped it at this step; remove {file} to train on")
            return
        missed = loop.step > self._progress.first_step and self.is_due(loop.step)
        if (missed and self._progress.evaluated != loop.step) or self._before:
            self.evaluate(loop)

    def after_step(self, loop: TrainingLoop) -> None:
        """Evaluates if an evaluation is due."""
        if self.is_due(loop.step):
            self.evaluate(loop)

    def is_due(self, step: int) -> bool:
        """Whether this step is evaluated."""
        since_first = step - self._progress.first_step
        return bool(self._period) and (since_first % self._period == 0 or step == self._last)

    def evaluate(self, loop: TrainingLoop) -> None:
        """Writes the results of both kinds of evaluation; stops training if an action says so."""
        # Write the metrics of earlier steps to the file first.
        loop.flush()
        self._run("TRAIN_EVAL", loop, self._evaluate_training(loop.trainer))
        if self._infer_eval is not None:
            results = self._infer_eval(loop)
            for task, values in results.items():
                numbers = {
                    name: float(x) for name, x in values.items() if isinstance(x, int | float)
                }
                # T5X cuts names at 113 characters.
                split = f"inference_eval/{task[:113]}"
                # SeqIO's loggers write the events of the tasks' own metrics themselves.
                self._metrics.write(split, loop.step, numbers, events=False)
            self._run("INFER_EVAL", loop, results)
        self._metrics.flush()
        # Wait for this step's checkpoint: a run that dies resumes from a checkpoint, and would find
        # here the notes of a lost step instead of those of its own.
        loop.wait()
        self._progress.note_evaluated(loop.step, stopped=loop.trainer.stop_training)

    def _evaluate_training(self, trainer: BaseTrainer) -> Mapping[str, Mapping[str, Any]]:
        batches = self._train_eval
        if trainer.overrides("compile_eval") and not self._is_compiled:
            self._is_compiled = True
            first = {
                name: named_as_t5xs(batch)
                for name, each in batches.items()
                for batch in itertools.islice(each, 1)
            }
            trainer.compile_eval(first)
        if trainer.overrides("eval"):
            batches = {name: map(named_as_t5xs, each) for name, each in batches.items()}
        return trainer.eval(batches)

    def _run(
        self, mode: str, loop: TrainingLoop, results: Mapping[str, Mapping[str, float]]
    ) -> None:
        run = self._run_actions.get(mode)
        if run is not None and results and run(loop.held_state, results):
            loop.stop(f"an action on the metrics of {mode}")
