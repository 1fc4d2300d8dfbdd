"""A trainer's steps, compiled for batches of one set of shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from t0repro.partitioning.topologies import find_chip
from t0repro.training.metric_classes import Metric, TimeRate
from t0repro.training.partitioner import Partitioner
from t0repro.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step compiled for batches of one set of shapes.

    Attributes:
      function: what it calls.
      partitioner: gives the context that a function compiled at its first call needs; else None.
      rates: its FLOP/s and MFU, as metrics.
    """

    function: Callable
    partitioner: Partitioner | None
    rates: Mapping[str, Metric]

    def __call__(self, state: TrainState, features: Mapping[str, jax.Array]) -> Any:
        """Runs the step on a batch that is already on the devices."""
        if self.partitioner is not None:
            with self.partitioner.active():
                return self.function(state, features)
        # A constant left on the host would otherwise be sent at every step, unnoticed.
        with jax.transfer_guard("disallow"):
            return self.function(state, features)


def flops_rates(flops: int) -> dict[str, Metric]:
    """Metrics of a step with this many FLOPs: `timing/flops_per_second` and `timing/mfu`.

    The second is the share of all devices' published peak; it is left out if that peak is unknown.
    """
    chip = find_chip(jax.devices()[0].device_kind)
    rates: dict[str, Metric] = {"timing/flops_per_second": TimeRate(flops)}
    if chip is None:
        return rates
    return rates | {"timing/mfu": TimeRate(flops / (chip.flops * jax.device_count()))}


def shapes_of(features: Mapping[str, jax.Array]) -> tuple:
    """Names, shapes and types of a batch: the key under which compiled steps are cached."""
    return tuple(sorted((name, x.shape, str(x.dtype)) for name, x in features.items()))
