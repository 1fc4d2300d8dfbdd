"""T5X's actions on metrics: early stopping, and stopping when a metric is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from t0repro.config.training_plan import ActionConfig, EarlyStoppingConfig, TerminateOnNanConfig

Results = Mapping[str, Mapping[str, float]]  # task -> metric -> value
Say = Callable[[str], None]


class EarlyStopping:
    """T5X's rule: stop when none of the latest `patience` values is better than the one before it.

    So a patience of 3 means three values and two comparisons, and a NaN counts as better. Values
    are compared in float32, as T5X does.
    """

    def __init__(self, config: EarlyStoppingConfig, say: Say):
        self._config, self._say = config, say
        self._values: list[float] = []

    def run(self, results: Results) -> bool:
        """Whether to stop after these results; False, with a message, if they lack the metric."""
        value = _value(results, self._config, self._say)
        if value is None:
            return False
        config, values = self._config, self._values
        values.append(value)
        if len(values) < config.patience:
            return False
        pairs = zip(values[1:], values[:-1], strict=True)
        if all(self._is_no_better(current, before) for current, before in pairs):
            self._say(
                f"stopping early: {config.metric} of {config.task} has not improved in"
                f" {config.patience} evaluations: {', '.join(f'{value:g}' for value in values)}"
            )
            return True
        values.pop(0)
        return False

    def _is_no_better(self, current: float, before: float) -> bool:
        delta = self._config.atol + self._config.rtol * abs(before)
        if self._config.mode == "min":
            return bool(np.float32(current) >= np.float32(before - delta))
        return bool(np.float32(current) <= np.float32(before + delta))


class TerminateOnNan:
    """Stops when a metric is NaN or infinite."""

    def __init__(self, config: TerminateOnNanConfig, say: Say):
        self._config, self._say = config, say

    def run(self, results: Results) -> bool:
        """Whether to stop after these results; False, with a message, if they lack the metric."""
        value = _value(results, self._config, self._say)
        if value is None or math.isfinite(value):
            return False
        self._say(f"stopping: {self._config.metric} of {self._config.task} is {value}")
        return True


def make_actions(configs: Sequence[ActionConfig], say: Say) -> Callable[[Results], bool] | None:
    """Runs the actions of a mode, all of them, and returns whether one says to stop."""
    if not configs:
        return None
    actions = [
        EarlyStopping(config, say)
        if isinstance(config, EarlyStoppingConfig)
        else TerminateOnNan(config, say)
        for config in configs
    ]
    # A list, so that none is skipped after the first that says to stop.
    return lambda results: any([action.run(results) for action in actions])


def _value(results: Results, config: ActionConfig, say: Say) -> float | None:
    if config.task not in results:
        say(f"warning: no results of {config.task}; there are {', '.join(results) or 'none'}")
        return None
    if config.metric not in results[config.task]:
        say(f"warning: {config.task} has no metric {config.metric}")
        return None
    return float(results[config.task][config.metric])
