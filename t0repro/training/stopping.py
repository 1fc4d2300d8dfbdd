"""Actions on metrics, with T5X's names: early stopping, and stopping at NaN or Inf."""

from __future__ import annotations

import abc
import contextlib
import enum
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from t0repro.config.run import ActionConfig, TerminateOnNanConfig, UserClass
from t0repro.progress import say
from t0repro.training.metric_classes import Scalar
from t0repro.training.metrics import kind_of
from t0repro.training.train_state import unstack_state

Results = Mapping[str, Mapping[str, Any]]  # task -> metric -> value


class ActionMode(enum.Enum):
    """What triggers an action: a summary of training, or one of the two evaluations."""

    TRAIN = 1
    TRAIN_EVAL = 2
    INFER_EVAL = 3


class BaseAction(abc.ABC):
    """Reads metrics and decides whether the run stops."""

    @abc.abstractmethod
    def run(self, train_state: Any, metrics_by_task: Results) -> bool:
        """Whether to stop, given these metrics.

        Args:
          train_state: the current state.
          metrics_by_task: task -> metric -> value; the training run's own task is `train`.
            A number is a Scalar; other values are arrays, or clu's texts, images and so on.
        """

    def state_dict(self) -> dict[str, Any]:
        """The action's memory, in types that JSON can hold; saved in checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned before an interruption."""
        del state


ActionMapType = Mapping[ActionMode, Sequence[BaseAction]]


class EarlyStoppingAction(BaseAction):
    """Stops when a metric has not improved for a while.

    An improvement is a change for the better by more than atol + rtol * |value compared with|.

    - reference="previous" is T5X's rule to the letter: it keeps the latest `patience` values and
      stops when none improves on the one before it. A patience of 3 thus means three values and two
      comparisons, 1 or 0 stops at once, and one lucky dip on a plateau starts over. The comparison
      is in float32, in which NaN counts as an improvement.
    - reference="best" stops after `patience` evaluations in a row without an improvement on the
      best value before them. NaN never counts as an improvement, not even on nothing.

    Args:
      metric: (task, metric) to watch.
      mode: whether smaller ("min") or larger ("max") values are better.
      patience: see above.
      atol, rtol: tolerances, not negative.
      reference: what a value is compared with.

    Raises:
      ValueError: for another mode or reference, or a negative tolerance or patience.
    """

    def __init__(
        self,
        metric: tuple[str, str],
        mode: str,
        patience: int = 3,
        atol: float = 0.0,
        rtol: float = 0.0,
        *,
        reference: Literal["best", "previous"] = "previous",
    ):
        if mode not in ("min", "max"):
            raise ValueError(f"mode is 'min' or 'max', not {mode!r}.")
        if reference not in ("best", "previous"):
            raise ValueError(f"reference is 'best' or 'previous', not {reference!r}.")
        if atol < 0 or rtol < 0 or patience < 0:
            raise ValueError("atol, rtol and patience are at least 0.")
        self._task, self._metric = metric
        self._mode, self._patience, self._atol, self._rtol = mode, patience, atol, rtol
        self._reference = reference
        self._history: list[float] = []  # previous: the window; best: the best, and what came since

    def run(self, train_state: Any, metrics_by_task: Results) -> bool:
        """Whether to stop; False, with a message, if the metric is missing or no number."""
        del train_state
        value = _value(metrics_by_task, self._task, self._metric)
        if value is None:
            return False
        follow = self._compare_with_best if self._reference == "best" else self._compare_in_window
        stops = follow(value)
        if stops:
            values = ", ".join(f"{value:g}" for value in self._history)
            say(
                f"stopping early: {self._metric} of {self._task} has not improved in"
                f" {self._patience} evaluations: {values}"
            )
        return stops

    def state_dict(self) -> dict[str, Any]:
        """The values that later ones are compared with."""
        return {"history": self._history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the history."""
        self._history = [float(value) for value in state["history"]]

    def _compare_with_best(self, value: float) -> bool:
        if not self._history or self._improves(value, self._history[0]):
            self._history = [value]
        else:
            self._history.append(value)
        return len(self._history) > self._patience

    def _improves(self, value: float, best: float) -> bool:
        # Nothing compares as better than NaN, so a first NaN would never be improved on.
        if math.isnan(best):
            return not math.isnan(value)
        delta = self._atol + self._rtol * abs(best)
        return value < best - delta if self._mode == "min" else value > best + delta

    def _compare_in_window(self, value: float) -> bool:
        values = self._history
        values.append(value)
        if len(values) < self._patience:
            return False
        # A patience of 1 or 0 makes no pairs, and all() of none is true: T5X stops at once, too.
        pairs = zip(values[1:], values[:-1], strict=True)
        if all(self._is_no_better(current, before) for current, before in pairs):
            return True
        values.pop(0)
        return False

    def _is_no_better(self, current: float, before: float) -> bool:
        delta = self._atol + self._rtol * abs(before)
        # A comparison with NaN is false, so NaN is not "no better" and training continues.
        if self._mode == "min":
            return bool(np.float32(current) >= np.float32(before - delta))
        return bool(np.float32(current) <= np.float32(before + delta))


class TerminateOnNanAction(BaseAction):
    """Stops when a metric is NaN or infinite.

    Args:
      task: the task; `train` for the training run's own metrics.
      metric: the metric.
    """

    def __init__(self, task: str, metric: str = "loss"):
        self._task, self._metric = task, metric

    def run(self, train_state: Any, metrics_by_task: Results) -> bool:
        """Whether to stop; False, with a message, if the metric is missing or no number."""
        del train_state
        value = _value(metrics_by_task, self._task, self._metric)
        if value is None or math.isfinite(value):
            return False
        say(f"stopping: {self._metric} of {self._task} is {value}")
        return True


class RunActions:
    """The actions of one mode; all of them run, even after one has decided to stop."""

    def __init__(self, actions: Sequence[BaseAction]):
        self.actions = tuple(actions)
        # These read metrics alone, so no state is copied for them.
        metrics_only = (EarlyStoppingAction, TerminateOnNanAction)
        self._reads_state = any(type(action) not in metrics_only for action in self.actions)

    def __call__(self, train_state: Any, results: Results) -> bool:
        """Whether any action decides to stop.

        Args:
          train_state: as a trainer stores it; a user's action gets every layer by its own name.
          results: see `BaseAction.run`.
        """
        if self._reads_state:
            train_state = unstack_state(train_state)
        # The tasks' own metrics are plain numbers.
        wrap = lambda x: Scalar(x) if isinstance(x, int | float) else x  # noqa: E731
        results = {
            task: {name: wrap(x) for name, x in values.items()} for task, values in results.items()
        }
        # A list, so that every action runs even after one has decided to stop.
        return any([action.run(train_state, results) for action in self.actions])


def make_actions(configs: Sequence[ActionConfig]) -> RunActions:
    """The actions that a plan describes."""
    return RunActions([_make_action(config) for config in configs])


def _make_action(config: ActionConfig) -> BaseAction:
    if isinstance(config, UserClass):
        # It may ask for clu's class inside a method, where it imports clu only then.
        with contextlib.suppress(ImportError):
            importlib.import_module("clu.values")
        return config.made({}, "train.actions")
    if isinstance(config, TerminateOnNanConfig):
        return TerminateOnNanAction(config.task, config.metric)
    return EarlyStoppingAction(
        (config.task, config.metric),
        config.mode,
        config.patience,
        config.atol,
        config.rtol,
        reference=config.reference,
    )


def _value(results: Results, task: str, metric: str) -> float | None:
    if task not in results:
        say(f"warning: no results of {task}; there are {', '.join(results) or 'none'}")
        return None
    if metric not in results[task]:
        say(f"warning: {task} has no metric {metric}")
        return None
    # clu's values are objects that have what was measured as `.value`.
    value = getattr(results[task][metric], "value", results[task][metric])
    if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
        return float(value)
    kind = kind_of(results[task][metric])
    say(f"warning: {metric} of {task} is not a number but {kind}: nothing stops on it")
    return None
