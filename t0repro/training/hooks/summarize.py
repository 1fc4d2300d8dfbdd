"""Writes summaries of training's metrics.

A summary at step k covers the steps since the summary before it, up to k, and the state after k
updates. Splits are TensorBoard's runs: `train`, `training_eval/<task>`,
`inference_eval/<task>`.
"""

from __future__ import annotations

import concurrent.futures

from t0repro.training.hooks.run_progress import RunProgress
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.metrics import StepMetrics
from t0repro.training.stopping import RunActions


class Summarize(Hook):
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
            and self._run_actions(self._loop.stacked_state, {"train": values})
        ):
            self._loop.stop("an action on the training run's metrics")

    def finish(self, loop: TrainingLoop) -> None:
        """Summarizes the steps that no summary covers yet, after a stop."""
        loop.trainer.train_metrics_manager.write_summary(loop.step)
