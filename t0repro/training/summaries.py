"""T5X's metrics of training: summaries every few steps, in metrics.jsonl and by TensorBoard's tags.

A summary at step k is of the steps up to k since the summary before it, and the state after k
updates. Splits are TensorBoard's runs: `train`, `training_eval/<task>`, `inference_eval/<task>`.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from t0repro.training.actions import Action
from t0repro.training.batch_sums import rates, summary
from t0repro.training.metrics import METRICS_FILE, JsonLines, StepMetrics, Writer

if TYPE_CHECKING:
    from t0repro.training.trainer import Trainer

OpenWriter = Callable[[str], Writer]
# What is done with the metrics of a mode, by task: whether to stop.
RunActions = Callable[[Mapping[str, Mapping[str, float]]], bool]


class SplitMetrics:
    """Writes model_dir/metrics.jsonl, and each split's values to a writer of its own.

    Args:
      model_dir: the directory; created if it does not exist.
      start_step: training's lines of later steps, left over from an interrupted run, are dropped.
      open_writer: opens a split's writer, for instance TensorBoard's events in model_dir/<split>;
        None writes lines alone.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        start_step: int,
        open_writer: OpenWriter | None = None,
    ):
        self._lines = JsonLines(Path(model_dir) / METRICS_FILE, start_step)
        self._open_writer, self._writers = open_writer, dict[str, Writer]()

    def write_step(self, metrics: StepMetrics) -> None:
        """Writes nothing: `Summarise` writes summaries."""

    def write(
        self, split: str, step: int, values: Mapping[str, float], *, events: bool = True
    ) -> None:
        """Writes a line and, with `events`, the values by their own names to the split's writer."""
        self._lines.write({"split": split, "step": step, **values})
        if self._open_writer is not None and events:
            if split not in self._writers:
                self._writers[split] = self._open_writer(split)
            self._writers[split].write_scalars(step, values)

    def flush(self) -> None:
        """Syncs what was written to disk and makes it visible to readers."""
        self._lines.sync()
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flushes and closes every file."""
        self._lines.close()
        for writer in self._writers.values():
            writer.close()


class Summarise(Action):
    """Writes a summary every `period` steps from the start and after the last step.

    Args:
      period: steps between summaries.
      metrics: where they are written.
      packed: whether rows hold several examples.
      run_actions: is given each summary as the metrics of the task `train`.
    """

    def __init__(
        self,
        period: int,
        metrics: SplitMetrics,
        *,
        packed: bool,
        run_actions: RunActions | None = None,
    ):
        self._period, self._metrics, self._packed = period, metrics, packed
        self._run_actions = run_actions
        self._first = self._last = 0
        self._clear()

    def start(self, trainer: Trainer, last_step: int) -> None:
        """Counts from the step that training starts at."""
        self._first, self._last = trainer.step, last_step
        self._trainer = trainer

    def on_values(self, step: int, values: Mapping[str, Any], seconds: float) -> None:
        """Adds a step's values; writes a summary if it is due."""
        for name, value in values["sums"].items():
            self._sums[name] += float(value)
        rate = float(values["learning_rate"])
        for name, value in [*values["weights"].items(), ("learning_rate", rate)]:
            self._means[name] += float(value)
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        if (step - self._first) % self._period and step != self._last:
            return
        metrics = {
            **summary(self._sums, self._steps, packed=self._packed),
            **{name: value / self._steps for name, value in self._means.items()},
            "learning_rate/current": rate,
            **rates(self._sums, self._steps, self._seconds, jax.device_count()),
        }
        self._metrics.write("train", step, metrics)
        self._clear()
        if self._run_actions is not None and self._run_actions({"train": metrics}):
            self._trainer.stop("an action on the training's metrics")

    def _clear(self) -> None:
        self._sums: dict[str, float] = collections.defaultdict(float)
        self._means: dict[str, float] = collections.defaultdict(float)
        self._steps, self._seconds = 0, 0.0


class Evaluate(Action):
    """Evaluates every `period` steps from the start and after the last step.

    Args:
      period: steps between evaluations; 0 for none.
      metrics: where results are written.
      train_eval: batches by task, evaluated with the training's metrics.
      packed: whether their rows hold several examples.
      infer_eval: evaluates the tasks' own metrics of a trainer's state: {task: {metric: value}}.
      run_actions: what is done with the results of `TRAIN_EVAL` and `INFER_EVAL`.
      before_training: whether to evaluate before the first step too.
    """

    def __init__(
        self,
        period: int,
        metrics: SplitMetrics,
        *,
        train_eval: Mapping[str, Any],
        packed: bool,
        infer_eval: Callable[[Trainer], Mapping[str, Mapping[str, float]]] | None = None,
        run_actions: Mapping[str, RunActions] | None = None,
        before_training: bool = False,
    ):
        self._period, self._metrics, self._before = period, metrics, before_training
        self._train_eval, self._packed, self._infer_eval = train_eval, packed, infer_eval
        self._run_actions = run_actions or {}
        self._first = self._last = 0

    def start(self, trainer: Trainer, last_step: int) -> None:
        """Counts from the step that training starts at; evaluates there if that is wanted."""
        self._first, self._last = trainer.step, last_step
        if self._before:
            self.evaluate(trainer)

    def after_step(self, trainer: Trainer) -> None:
        """Evaluates if that is due."""
        due = self._period and (trainer.step - self._first) % self._period == 0
        if due or (self._period and trainer.step == self._last):
            self.evaluate(trainer)

    def evaluate(self, trainer: Trainer) -> None:
        """Writes the results of both kinds of evaluation; stops training if an action says so."""
        # The metrics of the steps before come first in the file.
        trainer.flush()
        results = {
            name: trainer.eval_measured(batches, packed=self._packed)
            for name, batches in self._train_eval.items()
        }
        self._report("training_eval", "TRAIN_EVAL", trainer, results)
        if self._infer_eval is not None:
            self._report("inference_eval", "INFER_EVAL", trainer, self._infer_eval(trainer))
        self._metrics.flush()

    def _report(
        self,
        folder: str,
        mode: str,
        trainer: Trainer,
        results: Mapping[str, Mapping[str, float]],
    ) -> None:
        for task, values in results.items():
            numbers = {name: float(x) for name, x in values.items() if isinstance(x, int | float)}
            # SeqIO's loggers write the events of the tasks' own metrics themselves.
            events = mode == "TRAIN_EVAL"
            # T5X cuts names at 113 characters.
            self._metrics.write(f"{folder}/{task[:113]}", trainer.step, numbers, events=events)
        run = self._run_actions.get(mode)
        # A stop stays a stop, whatever another mode's actions say.
        if run is not None and results and run(results):
            trainer.stop(f"an action on the metrics of {mode}")
