"""The Trainer owns a train state, steps it through batches and runs actions between steps."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from t0repro.errors import UserError
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import Partitioning
from t0repro.training.actions import Action
from t0repro.training.batch_sums import measured_evaluation, summary
from t0repro.training.loss import (
    count_examples,
    count_targets,
    evaluation_metrics,
    evaluation_sums,
    loss_denominator,
)
from t0repro.training.metrics import Metrics, StepMetrics
from t0repro.training.optimizers import Optimizer
from t0repro.training.schedules import Schedule
from t0repro.training.train_state import TrainState
from t0repro.training.train_step import Measured, jitted_train_step, make_train_step
from t0repro.words import counted

NumpyBatch = Mapping[str, np.ndarray]

# Features that the model reads; positions are not among them (t0repro.model.t5).
FEATURES = ("inputs", "targets", "inputs_segmentation", "targets_segmentation")


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step whose loss the device may still be computing."""

    step: int
    values: Mapping[str, jax.Array]
    target_tokens: int
    examples: int


class Trainer:
    """Trains and evaluates a model.

        with Trainer(model, state, optimizer=..., schedule=...) as trainer:
            trainer.train(batches, num_steps=1000)

    Batches are sent to the device, and losses fetched, explicitly; any other transfer during a step
    is an error. A step's loss is read while the device computes the next step.

    Args:
      model: the model.
      state: where to start. The trainer owns it from now on and reuses its buffers.
      optimizer: from t0repro.training.optimizers.
      schedule: maps the global step before an update to its learning rate.
      num_microbatches: number of equal parts into which a batch is split.
      seed: seed for dropout.
      metrics: where to write metrics; None writes none.
      actions: run between steps, in this order.
      partitioning: the devices that the state is divided among; None if it is on one.
      dropout_key: PRNG key for dropout, into which each step is folded; made from `seed` if None.
      measured: what a step measures for T5X's metrics; None for nothing.
      may_be_nan: whether training goes on when a loss is not finite; otherwise it is an error.

    Attributes:
      step: the global step, that is the number of updates done.
      error: the exception that ended training, or None.
      stop_reason: why training was asked to stop, or None.
    """

    def __init__(
        self,
        model: T5,
        state: TrainState,
        *,
        optimizer: Optimizer,
        schedule: Schedule,
        num_microbatches: int = 1,
        seed: int = 0,
        metrics: Metrics | None = None,
        actions: Sequence[Action] = (),
        partitioning: Partitioning | None = None,
        dropout_key: jax.Array | None = None,
        measured: Measured | None = None,
        may_be_nan: bool = False,
    ):
        self._model, self._state = model, state
        self._metrics, self._actions = metrics, actions
        self._num_microbatches = num_microbatches
        several = partitioning is not None and partitioning.mesh.size > 1
        self._partitioning = partitioning if several else None
        self._may_be_nan = may_be_nan
        if dropout_key is None and model.config.dropout_rate:
            # Fold in a constant, because parameters are drawn with the seed's key itself.
            dropout_key = jax.random.fold_in(jax.random.key(seed), 1)
        train_step = make_train_step(
            model,
            optimizer,
            schedule,
            num_microbatches=num_microbatches,
            dropout_key=dropout_key,
            measured=measured,
            partitioning=self._partitioning,
        )
        self._train_step = jitted_train_step(train_step, state, self._partitioning)
        self._evaluate = jax.jit(evaluation_sums, static_argnums=0)
        self._measure = jax.jit(measured_evaluation, static_argnums=0)
        self._compiled: dict[Any, Callable] = {}
        self._pending: _Pending | None = None
        self._read_at = 0.0
        self.step = int(jax.device_get(state.step))
        self.error: BaseException | None = None
        self.stop_reason: str | None = None
        self._stopping = False

    @property
    def failed(self) -> bool:
        """Whether an exception ended training."""
        return self.error is not None

    @property
    def train_state(self) -> TrainState:
        """The state after the latest step; valid until the next step."""
        return self._state

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def compile(self, batch: NumpyBatch) -> None:
        """Compiles the train step for batches with this one's features and shapes, if needed.

        Raises:
          UserError: if the batch lacks a feature, or its size is not a multiple of the number of
            microbatches.
        """
        self._step_for(self._on_devices(batch))

    def train(self, batches: Iterable[NumpyBatch], num_steps: int) -> int:
        """Does up to `num_steps` updates and returns how many it did.

        It does fewer if the batches run out or an action calls `stop`.

        Raises:
          UserError: if a loss is not finite, or if `compile` would refuse a batch.
        """
        last_step = self.step + num_steps
        started: list[Action] = []
        try:
            for action in self._actions:
                # Noted first: an action whose start fails is ended too.
                started.append(action)
                action.start(self, last_step)
            first = self.step
            self._read_at = 0.0
            for batch in itertools.islice(batches, num_steps):
                self._do_step(batch)
                for action in self._actions:
                    action.after_step(self)
                if self._stopping:
                    break
            self.flush()
            return self.step - first
        except BaseException as error:
            self.error = error
            raise
        finally:
            for action in started:
                action.end(self)

    def eval(self, batches: Iterable[NumpyBatch], split: str = "eval") -> dict[str, float]:
        """Computes Mesh TensorFlow's teacher-forced metrics, without dropout or z_loss.

        They are also written as the metrics of `split` at the current step.

        Returns:
          `loss`, the mean over batches of the loss normalised as in training;
          `neg_log_perplexity`, the mean log-likelihood of a target in nats; `token_accuracy`;
          `sequence_accuracy`; `num_eval_tokens`.
        """
        self.flush()
        sums: dict[str, float] = collections.defaultdict(float)
        for batch in batches:
            denominator = loss_denominator(self._model.config, batch)
            features = self._on_devices(batch)
            with self._active():
                values = self._evaluate(
                    self._model, self._state.params, features, denominator=denominator
                )
            for name, value in jax.device_get(values).items():
                sums[name] += float(value)
        metrics = evaluation_metrics(sums)
        if self._metrics is not None:
            self._metrics.write(split, self.step, metrics)
            self._metrics.flush()
        return metrics

    def eval_measured(self, batches: Iterable[NumpyBatch], *, packed: bool) -> dict[str, float]:
        """Computes T5X's metrics of batches, without dropout, under its names.

        Args:
          batches: what to evaluate.
          packed: whether rows hold several examples, which decides some of the names.
        """
        self.flush()
        sums, count = collections.defaultdict[str, float](float), 0
        for batch in batches:
            features = self._on_devices(batch)
            with self._active():
                values = self._measure(self._model, self._state.params, features)
            count += 1
            for name, value in jax.device_get(values).items():
                sums[name] += float(value)
        return summary(sums, count, packed=packed) if count else {}

    def stop(self, reason: str | None = None) -> None:
        """Makes `train` end after the current step, as if there were no more batches.

        Args:
          reason: why, in a line; the first reason given is kept.
        """
        self._stopping = True
        self.stop_reason = self.stop_reason or reason

    def flush(self) -> None:
        """Waits for the latest step and writes its metrics."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._record(pending)
        if self._metrics is not None:
            self._metrics.flush()

    def _do_step(self, batch: NumpyBatch) -> None:
        """Starts one update and records the one before."""
        on_device = self._on_devices(batch)
        step = self._step_for(on_device)
        # The first step's clock starts after compilation.
        self._read_at = self._read_at or time.perf_counter()
        with jax.transfer_guard("disallow"):
            self._state, values = step(self._state, on_device)
        self.step += 1
        # Only now that the device has work again, wait for the loss of the step before.
        previous = self._pending
        self._pending = _Pending(self.step, values, count_targets(batch), count_examples(batch))
        if previous is not None:
            self._record(previous)

    def _step_for(self, batch: Mapping[str, jax.Array]) -> Callable:
        """The train step compiled for a batch of these shapes."""
        shapes = tuple(sorted((name, x.shape) for name, x in batch.items()))
        if shapes not in self._compiled:
            rows = batch["targets"].shape[0]
            if rows % self._num_microbatches:
                raise UserError(
                    f"A batch of {counted(rows, 'row')} has no {self._num_microbatches} equal"
                    " microbatches.",
                    where="utils.run.batch_size",
                    fix="Choose a batch size that is a multiple of the number of microbatches.",
                )
            with self._active():
                self._compiled[shapes] = self._train_step.lower(self._state, batch).compile()
        return self._compiled[shapes]

    def _on_devices(self, batch: NumpyBatch) -> dict[str, jax.Array]:
        """Sends the features that the model reads to the devices."""
        features = _features(batch)
        if self._partitioning is None:
            return jax.device_put(features)
        return self._partitioning.put_batch(features)

    def _active(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which what is traced is divided among the devices."""
        return (
            contextlib.nullcontext() if self._partitioning is None else self._partitioning.active()
        )

    def _record(self, pending: _Pending) -> None:
        """Waits for a step's loss, then writes its metrics and passes them to the actions."""
        values = jax.device_get(pending.values)
        now = time.perf_counter()
        metrics = StepMetrics(
            step=pending.step,
            loss=float(values["loss"]),
            learning_rate=float(values["learning_rate"]),
            target_tokens=pending.target_tokens,
            examples=pending.examples,
            seconds=round(now - self._read_at, 6),
        )
        self._read_at = now
        if not math.isfinite(metrics.loss) and not self._may_be_nan:
            raise UserError(
                f"The loss of step {metrics.step} is {metrics.loss}.",
                where="training",
                fix="Start again from an earlier checkpoint with a lower learning rate.",
            )
        if self._metrics is not None:
            self._metrics.write_step(metrics)
        for action in self._actions:
            action.on_values(pending.step, values, metrics.seconds)
            action.on_metrics(metrics)


def _features(batch: NumpyBatch) -> dict[str, np.ndarray]:
    """The features that the model reads."""
    missing = [name for name in ("inputs", "targets") if name not in batch]
    if missing:
        raise UserError(
            f"A batch has no {' and no '.join(missing)}; it has {', '.join(sorted(batch))}.",
            where="the batches",
            fix="Train an encoder-decoder model on a task with inputs and targets.",
        )
    return {name: batch[name] for name in FEATURES if name in batch}
