"""What the training loop reads of a batch and of an update's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from t0repro.errors import UserError
from t0repro.model.features import t5x_features
from t0repro.partitioning.devices import is_sharded
from t0repro.training.metric_classes import compute_values, fill_in_steps, is_metric_obj
from t0repro.training.metrics_manager import Fetched
from t0repro.training.token_losses import count_examples, count_inputs, count_targets
from t0repro.training.trainer import BaseTrainer, NumpyBatch


def number(values: Mapping[str, Any], name: str) -> float:
    """A metric that every update has.

    Raises:
      UserError: if there is none.
    """
    if name in values:
        value = values[name]
        return float(value.compute() if is_metric_obj(value) else getattr(value, "value", value))
    raise UserError(
        f"The train step returns no metric {name!r}; it returns {', '.join(sorted(values))}.",
        where="the trainer's _partitioned_train_step",
        fix="Return it: `apply_grads` adds the learning rate, and the model's loss_fn the loss.",
    )


def counts_of(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The fields of StepMetrics that count what is in a batch of a model."""
    return {
        "target_tokens": getattr(model, "count_targets", count_targets)(batch),
        "examples": count_examples(batch),
        "input_tokens": count_inputs(batch),
    }


_on_devices = jax.jit(counts_of, static_argnums=1)


def count_if_sharded(batch: NumpyBatch, model: Any) -> Mapping[str, Any] | None:
    """The same of a batch sharded across processes, all of which must call it; else None."""
    return _on_devices(batch, model) if any(map(is_sharded, batch.values())) else None


def other_metrics(fetched: Fetched) -> dict[str, float]:
    """A step's metrics that StepMetrics has no fields for."""
    values = compute_values(fill_in_steps(fetched.metrics, 1, fetched.seconds))
    for name in ("loss", "learning_rate", "learning_rate/current", "update_held"):
        values.pop(name, None)
    # A line of the log has room for numbers only.
    return {name: float(x) for name, x in values.items() if isinstance(x, int | float)}


def time_batches(batches: Iterator[NumpyBatch]) -> Iterator[tuple[NumpyBatch, float]]:
    """Each batch, with the seconds spent waiting for it."""
    while True:
        started = time.perf_counter()
        batch: Any = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - started


def rename_for_trainer(batch: NumpyBatch) -> NumpyBatch:
    """A batch as a user's method reads it; one that other processes share stays as it is."""
    return batch if any(map(is_sharded, batch.values())) else t5x_features(batch)


class TrainFeed:
    """The batches as a trainer's own `train` reads them, under T5X's names.

    Args:
      batches: the run's.
      model: the trainer's.
      before_first: called with the first batch before anything reads it.

    Attributes:
      first_wait: seconds that the first batch took.
      counts: those of each batch, since the list was cleared.
      latest: the batch read last.
    """

    def __init__(
        self,
        batches: Iterator[NumpyBatch],
        model: Any,
        before_first: Callable[[NumpyBatch], None],
    ):
        self._timed, self._model, self._before_first = time_batches(batches), model, before_first
        self.first_wait: float | None = None
        self.counts: list[Mapping[str, Any]] = []
        self.latest: NumpyBatch = {}

    def __iter__(self) -> Iterator[NumpyBatch]:
        return self

    def __next__(self) -> NumpyBatch:
        self.latest, wait = next(self._timed)
        counts = count_if_sharded(self.latest, self._model)
        self.counts.append(counts or counts_of(self.latest, self._model))
        batch = rename_for_trainer(self.latest)
        if self.first_wait is None:
            self.first_wait = wait
            self._before_first(batch)
        return batch

    def mean_counts(self, steps: int) -> dict[str, Any]:
        """The counts as means over some steps, as whole numbers."""
        totals = {name: sum(int(x[name]) for x in self.counts) for name in self.counts[0]}
        return {name: total // max(steps, 1) for name, total in totals.items()}


def train_error(trainer: BaseTrainer, what: str) -> UserError:
    """The error of a trainer whose own `train` did not do what it must."""
    kind = type(trainer)
    return UserError(
        f"{kind.__module__}.{kind.__qualname__}.train {what}.",
        where="the class of train.trainer_cls",
        fix="Do num_steps updates, for instance by super().train(...), and return its result.",
    )
