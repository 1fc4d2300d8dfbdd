"""The trainer as a library, with T5X's names: subclass it, or call it from a loop of your own.

To make a trainer of your own, subclass `BaseTrainer` and define `_partitioned_train_step` and
`_partitioned_eval_step`, or subclass `Trainer` and override one of them. docs/trainer.md has an
example. The commands train with `Trainer` too, through t0repro.training.loop.
"""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from t0repro.model.layer_stacks import unstack_donating
from t0repro.partitioning.flops import count_flops
from t0repro.training.compiled_step import CompiledStep, flops_rates, shapes_of
from t0repro.training.metric_classes import Metric, MetricMap, Scalar, merge_metrics
from t0repro.training.metrics import OpenWriter, SplitMetrics, open_below
from t0repro.training.metrics_manager import MetricsManager
from t0repro.training.partitioner import Partitioner
from t0repro.training.stopping import (
    ActionMapType,
    ActionMode,
    BaseAction,
    EarlyStoppingAction,
    TerminateOnNanAction,
)
from t0repro.training.t5_model import BaseModel
from t0repro.training.train_state import TrainState, unstack_state
from t0repro.training.train_step import (
    accumulate_grads_microbatched,
    apply_grads,
    eval_step,
    stack_builtin_state,
    train_with_lr,
)
from t0repro.training.weight_metrics import WeightMetricsComputer

__all__ = [
    "ActionMapType",
    "ActionMode",
    "Array",
    "ArrayMapFuture",
    "BaseAction",
    "BaseTrainer",
    "BaseTrainerConstructor",
    "BatchSpec",
    "BatchType",
    "EarlyStoppingAction",
    "FlaxMutables",
    "LearningRateCallable",
    "MetricMapSpec",
    "MetricMapType",
    "MetricValueMapFuture",
    "MetricValueMapType",
    "MetricsManager",
    "ModelWeights",
    "MutableMetricMapType",
    "PartitionSpec",
    "PartitionedEvalCallable",
    "PartitionedTrainCallable",
    "PreemptionError",
    "PyTree",
    "PyTreeDef",
    "Rng",
    "SummarizeMetricsCallable",
    "TerminateOnNanAction",
    "TimeFuture",
    "Trainer",
    "WeightMetricsComputer",
    "accumulate_grads_microbatched",
    "apply_grads",
    "eval_step",
    "merge_metrics",
    "train_with_lr",
]

# The aliases at the head of t5x.trainer.
Array = np.ndarray | jax.Array
BatchSpec = Mapping[str, jax.ShapeDtypeStruct]
BatchType = Mapping[str, np.ndarray]
FlaxMutables = Mapping[str, Any]  # a frozen dictionary there
Rng = jax.Array
MetricMapType = MutableMapping[str, Metric]
MetricMapSpec = Mapping[str, jax.ShapeDtypeStruct]
MetricValueMapType = Mapping[str, Any]  # clu's values: a Scalar is one
ModelWeights = Any
MutableMetricMapType = dict[str, Metric]
PyTree = Any
PyTreeDef = jax.tree_util.PyTreeDef

NumpyBatch = BatchType
# How many updates may be queued on the device before `train` waits for the oldest.
_AHEAD = 2


class PreemptionError(Exception):
    """The machine is about to be preempted: save a checkpoint and end."""


class BaseTrainer(abc.ABC):
    """Steps a train state through batches, and evaluates it.

        with Trainer(...) as trainer:
            values = trainer.train(batch_iter, num_steps=1000).result()

    Metrics are fetched and written by background threads, so use it as a context manager or call
    `close`. Batches are sent to the devices explicitly; any other transfer during a compiled step
    is an error.

    Args:
      model: the model.
      train_state: where to start. The trainer owns it from now on and reuses its buffers.
      partitioner: the devices; None for the default one.
      eval_names: names of the evaluations, the keys of the argument of `eval`.
      summary_dir: where metrics are written: metrics.jsonl, and what `open_writer` opens in
        summary_dir/train and summary_dir/training_eval/<name>. None writes nothing.
      train_state_axes: where each array of the state belongs; None asks the partitioner.
      rng: PRNG key, into which each step is folded.
      open_writer: opens a folder's writer of TensorBoard's events, for instance
        t0repro.event_files.event_writer, which needs TensorBoard.
      files: where to write metrics, in place of `summary_dir` and `open_writer`.

    Attributes:
      stop_training: set it, or let an action set it, to end the loop around this trainer; a call of
        `train` during which it is set ends after that update.
      hold_if_not_finite: whether `Trainer` skips an update whose loss or gradient is NaN or Inf.
      on_update: called after each update with its batch and the future that `update` returns; the
        commands' loop sets it.
      train_metrics_manager: the manager of the split `train`.
      compilation_seconds: total time spent compiling steps so far.
      eval_metrics_managers: those of `training_eval/<name>`, by name.
    """

    # T5X's own `train`, from which overrides are copied, falls back on `_partitioned_train_step`.
    _compiled_train_step = None

    def __init__(
        self,
        model: BaseModel,
        train_state: TrainState,
        partitioner: Partitioner | None,
        eval_names: Sequence[str],
        summary_dir: str | None,
        train_state_axes: Any,
        rng: jax.Array,
        *,
        open_writer: OpenWriter | None = None,
        files: SplitMetrics | None = None,
    ):
        self._model, self._base_rng = model, rng
        self._partitioner = partitioner or Partitioner()
        train_state = self._stack(train_state)
        self._train_state_axes = train_state_axes
        if train_state_axes is None:
            self._train_state_axes = self._partitioner.get_mesh_axes(train_state)
        # Reentrant: `train` holds it while `update` takes it again.
        self._train_state, self._train_state_mutex = train_state, threading.RLock()
        self._compiled_train_steps: dict[Any, CompiledStep] = {}
        self._compiled_eval_steps: dict[Any, CompiledStep] = {}
        self._compiling = threading.Lock()
        self.stop_training = self.hold_if_not_finite = False
        self.on_update: Callable[[NumpyBatch, concurrent.futures.Future], None] | None = None
        self._own_files = None
        if files is None and summary_dir is not None and jax.process_index() == 0:
            writers = open_below(summary_dir, open_writer)
            files = self._own_files = SplitMetrics(summary_dir, None, writers)
        self.train_metrics_manager = MetricsManager("train", summary_dir, files=files)
        self.train_metrics_manager.report_uptime()
        self.compilation_seconds = 0.0
        # T5X cuts names at 113 characters.
        self.eval_metrics_managers = {
            name: MetricsManager(f"training_eval/{name[:113]}", summary_dir, files=files)
            for name in eval_names
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            if error is not None:  # the first error matters more than those that follow from it
                stack.enter_context(contextlib.suppress(Exception))
            self.close()

    def close(self) -> None:
        """Writes what is pending, and ends the background threads."""
        with contextlib.ExitStack() as stack:
            # Registered first, so closed last: the managers still write to it while they end.
            if self._own_files is not None:
                stack.callback(self._own_files.close)
            for manager in (self.train_metrics_manager, *self.eval_metrics_managers.values()):
                stack.callback(manager.close)

    def write_to(self, files: SplitMetrics) -> None:
        """Writes all later metrics to the caller's files, which the caller closes."""
        for manager in (self.train_metrics_manager, *self.eval_metrics_managers.values()):
            manager.write_to(files)

    @property
    def model(self) -> BaseModel:
        """The model."""
        return self._model

    @property
    def train_state(self) -> TrainState:
        """The state after the latest update; its arrays are valid until the next.

        Stacked layers are copied; `stacked_state` copies nothing.
        """
        with self._train_state_mutex:
            return unstack_state(self._train_state)

    @train_state.setter
    def train_state(self, train_state: TrainState) -> None:
        with self._train_state_mutex:
            self._train_state = self._stack(train_state)

    @property
    def stacked_state(self) -> TrainState:
        """The state as the trainer stores it, perhaps stacked (t0repro.model.layer_stacks)."""
        if type(self).train_state is not BaseTrainer.train_state:
            return self.train_state  # what a class of the user's makes of it
        with self._train_state_mutex:
            return self._train_state

    def release(self) -> TrainState:
        """Hands over the state after the latest update; the trainer cannot be used afterward."""
        with self._train_state_mutex:
            self._train_state = unstack_state(self._train_state, unstack_donating)
            return self._train_state

    def _stack(self, train_state: TrainState) -> TrainState:
        """A given state in the form that the trainer stores."""
        return train_state

    def overrides(self, method: str) -> bool:
        """Whether the method of this name is not BaseTrainer's."""
        return getattr(getattr(self, method), "__func__", None) is not getattr(BaseTrainer, method)

    def train(
        self, batch_iter: Iterator[NumpyBatch], num_steps: int, start_step: int | None = None
    ) -> concurrent.futures.Future:
        """Does updates, and writes a summary of them in the background.

        Args:
          batch_iter: the batches.
          num_steps: number of updates, or fewer if `stop_training` gets set; with 0, nothing is
            done or written.
          start_step: the global step before the first, if the caller knows it.

        Returns:
          A future of the metrics' values by name.
        """
        with self._train_state_mutex:
            first = int(self._train_state.step) if start_step is None else int(start_step)
            step, was_stopped = first, self.stop_training
            queued: collections.deque[concurrent.futures.Future] = collections.deque()
            while step < first + num_steps and self.stop_training == was_stopped:
                started = time.perf_counter()
                batch = next(batch_iter)
                wait = time.perf_counter() - started
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    queued.append(self.update(batch, wait, starts_clock=step == first))
                step += 1
                # Bound the number of batches in device memory, and raise the error of the oldest
                # update.
                if len(queued) > _AHEAD:
                    queued.popleft().result()
            return self.train_metrics_manager.write_summary(step)

    def update(
        self,
        batch: NumpyBatch,
        input_wait: float | None = None,
        *,
        starts_clock: bool = False,
    ) -> concurrent.futures.Future:
        """Does one update; returns a future of its metrics, a `Fetched`.

        They are part of the next summary of `train_metrics_manager`.

        Args:
          batch: the batch.
          input_wait: seconds that the caller waited for the batch, if known; the time to send it to
            the devices is added.
          starts_clock: whether the update's duration begins here, after its compilation, and not
            at the end of the one before.
        """
        with self._train_state_mutex:
            before = time.perf_counter()
            features = self._partitioner.put_batch(self._model.features(batch))
            if input_wait is not None:
                input_wait += time.perf_counter() - before
            step = self._train_step_for(features)
            if starts_clock:
                self.train_metrics_manager.start_duration_timer()
            self._train_state, metrics = step(self._train_state, features)
        fetched = self.train_metrics_manager.add({**metrics, **step.rates}, input_wait)
        if self.on_update is not None:
            self.on_update(batch, fetched)
        return fetched

    def compile_train(self, batch: NumpyBatch) -> None:
        """Compiles the train step for batches with this one's features and shapes.

        Without this call, that happens at the first such batch.

        Args:
          batch: an example, whose values do not matter.
        """
        self._compile(self._train_step_for, batch, self.train_metrics_manager)

    def prepare_train(self, batch: NumpyBatch) -> None:
        """Does what `compile_train` does, optionally in a thread, and writes no metric.

        An update with such a batch waits for the compilation to end.
        """
        self._train_step_for(self._partitioner.put_batch(self._model.features(batch)))

    def _train_step_for(self, features: Mapping[str, jax.Array]) -> CompiledStep:
        steps = self._compiled_train_steps
        return self._step_for(steps, lambda: self._partitioned_train_step, features)

    def eval(
        self, batch_iters: Mapping[str, Iterable[NumpyBatch]]
    ) -> dict[str, Mapping[str, Scalar]]:
        """Evaluates the state on batches, writes summaries, and returns {name: {metric: value}}.

        Args:
          batch_iters: batches by the name of an evaluation; each is read to its end. One without
            batches gives no metrics.
        """
        results = {}
        for name, batches in batch_iters.items():
            manager, state = self.eval_metrics_managers[name], self.stacked_state
            # Updates may still be queued: start the clock when the last of them is done.
            manager.start_duration_timer(block_on=state.step)
            queued: collections.deque[concurrent.futures.Future] = collections.deque()
            for batch in batches:
                features = self._partitioner.put_batch(self._model.features(batch))
                queued.append(manager.add(self._eval_step_for(features)(state, features)))
                if len(queued) > _AHEAD:
                    queued.popleft().result()
            results[name] = manager.write_summary(int(jax.device_get(state.step)))
        # Collect results at the end, so that no evaluation waits for the summary of the one before.
        return {name: future.result() for name, future in results.items()}

    def compile_eval(self, batches: Mapping[str, NumpyBatch]) -> None:
        """Compiles the evaluation step; evaluations with batches of equal shapes share one.

        Args:
          batches: an example by the name of an evaluation.
        """
        for name, batch in batches.items():
            self._compile(self._eval_step_for, batch, self.eval_metrics_managers[name])

    def _eval_step_for(self, features: Mapping[str, jax.Array]) -> CompiledStep:
        steps = self._compiled_eval_steps
        return self._step_for(steps, lambda: self._partitioned_eval_step, features)

    @property
    @abc.abstractmethod
    def _partitioned_train_step(self) -> Callable:
        """(state, batch) -> (state after an update, metrics), from `Partitioner.partition`."""

    @property
    @abc.abstractmethod
    def _partitioned_eval_step(self) -> Callable:
        """(state, batch) -> metrics, from `Partitioner.partition`."""

    def step_rng(self, step: Any) -> jax.Array:
        """The PRNG key of a step, the same however often training was interrupted."""
        return self._get_step_rng(step)

    def _get_step_rng(self, step: Any) -> jax.Array:
        # T5X's name, under which subclasses override it.
        return jax.random.fold_in(self._base_rng, step)

    def _compile(
        self,
        step_for: Callable[[Mapping[str, jax.Array]], CompiledStep],
        batch: NumpyBatch,
        manager: MetricsManager,
    ) -> None:
        """Compiles a step for batches of these shapes and writes how long that took."""
        started = time.perf_counter()
        step_for(self._partitioner.put_batch(self._model.features(batch)))
        seconds = time.perf_counter() - started
        manager.write_scalar("timing/compilation_seconds", seconds, int(self.stacked_state.step))

    def _step_for(
        self,
        steps: dict[Any, CompiledStep],
        function: Callable[[], Any],
        features: Mapping[str, jax.Array],
    ) -> CompiledStep:
        """The step for batches of these shapes, cached in `steps`."""
        key = shapes_of(features)
        # An update waits here for a compilation in the background instead of starting its own.
        with self._compiling:
            if key not in steps:
                started = time.perf_counter()
                steps[key] = self._compile_step(function(), features)
                self.compilation_seconds += time.perf_counter() - started
        return steps[key]

    def _compile_step(self, function: Any, features: Mapping[str, jax.Array]) -> CompiledStep:
        """A step for batches of these shapes, compiled if it is one jitted function."""
        if not hasattr(function, "trace"):
            return CompiledStep(function, self._partitioner, {})
        with self._partitioner.active():
            # Not through the property: an update holds its lock while it waits for this. Only
            # shapes are read here, and updates do not change them.
            traced = function.trace(self._train_state, features)
            return CompiledStep(
                traced.lower().compile(), None, flops_rates(count_flops(traced.jaxpr.jaxpr))
            )


class Trainer(BaseTrainer):
    """Trains on gradients of the model's loss, optionally in microbatches.

    Args:
      model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng: see
        BaseTrainer, also for what `options` may hold.
      learning_rate_fn: maps the global step before an update to its learning rate.
      num_microbatches: number of equal parts of a batch; None or 1 for the batch as a whole.
      weight_metrics_computer: measures parameters, gradients and updates; None for nothing.
      t5x_dropout_compat: repeats T5X's one dropout key for all microbatches of a step.
      hold_if_not_finite: whether to skip an update whose loss or gradient is NaN or Inf.
    """

    def __init__(
        self,
        model: BaseModel,
        train_state: TrainState,
        partitioner: Partitioner | None,
        eval_names: Sequence[str],
        summary_dir: str | None,
        train_state_axes: Any,
        rng: jax.Array,
        learning_rate_fn: LearningRateCallable,
        num_microbatches: int | None,
        weight_metrics_computer: WeightMetricsComputer | None = None,
        *,
        t5x_dropout_compat: bool = False,
        hold_if_not_finite: bool = False,
        **options: Any,
    ):
        self._learning_rate_fn, self._num_microbatches = learning_rate_fn, num_microbatches
        self._weight_metrics_computer = weight_metrics_computer
        self._t5x_dropout_compat = t5x_dropout_compat
        # A user's step, weight metrics, partitioner or axes expect a state by layer.
        self._stacks = (
            type(self) is Trainer
            and type(partitioner) in (Partitioner, type(None))
            and type(weight_metrics_computer) in (WeightMetricsComputer, type(None))
            and train_state_axes is None
        )
        super().__init__(
            model=model,
            train_state=train_state,
            partitioner=partitioner,
            eval_names=eval_names,
            summary_dir=summary_dir,
            train_state_axes=train_state_axes,
            rng=rng,
            **options,
        )
        self.hold_if_not_finite = hold_if_not_finite

    def _stack(self, train_state: TrainState) -> TrainState:
        return stack_builtin_state(self._model, train_state) if self._stacks else train_state

    @functools.cached_property
    def _partitioned_train_step(self) -> Callable:
        def train_step(state: TrainState, batch: Mapping[str, jax.Array]) -> Any:
            return train_with_lr(
                state,
                batch,
                learning_rate=self._learning_rate_fn(state.step),
                dropout_rng=self._get_step_rng(state.step),
                model=self._model,
                num_microbatches=self._num_microbatches,
                weight_metrics_computer=self._weight_metrics_computer,
                t5x_dropout_compat=self._t5x_dropout_compat,
                hold_if_not_finite=self.hold_if_not_finite,
                partitioning=self._partitioner.partitioning,
            )

        return self._partitioner.partition(
            train_step,
            in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
            out_axis_resources=(self._train_state_axes, None),
            donate_argnums=0,
        )

    @functools.cached_property
    def _partitioned_eval_step(self) -> Callable:
        return self._partitioner.partition(
            lambda state, batch: eval_step(self._model, state, batch),
            in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
        )


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
