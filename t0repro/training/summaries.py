"""T5X's rhythm of training: summaries and evaluations every few steps, and actions on them.

A summary at step k covers the steps since the summary before it, up to k, and the state after k
updates. Splits are TensorBoard's runs: `train`, `training_eval/<task>`, `inference_eval/<task>`.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from t0repro.training.actions import Action
from t0repro.training.metrics import SplitMetrics, StepMetrics
from t0repro.training.progress_notes import Progress
from t0repro.training.stopping import RunActions

if TYPE_CHECKING:
    from t0repro.training.loop import TrainingLoop

InferEval = Callable[["TrainingLoop"], Mapping[str, Mapping[str, float]]]


class Summarise(Action):
    """Writes a summary every `period` steps and after the last step.

    Args:
      period: steps between summaries.
      progress: gives the step that they are counted from.
      run_actions: is given each summary as the metrics of the task `train`.
    """

    def __init__(self, period: int, progress: Progress, run_actions: RunActions | None = None):
        self._period, self._progress, self._run_actions = period, progress, run_actions
        self._last = 0
        self._written: concurrent.futures.Future | None = None

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Notes where training ends."""
        self._last, self._loop = last_step, loop

    def after_step(self, loop: TrainingLoop) -> None:
        """Starts to write a summary in the background if one is due."""
        due = (loop.step - self._progress.first_step) % self._period == 0
        if due or loop.step == self._last:
            self._written = loop.trainer.train_metrics_manager.write_summary(loop.step)

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Runs the actions on a summary once it is there."""
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
            self._loop.stop("an action on the training's metrics")

    def finish(self, loop: TrainingLoop) -> None:
        """Summarises the steps that no summary covers yet, after a stop."""
        loop.trainer.train_metrics_manager.write_summary(loop.step)


class Evaluate(Action):
    """Evaluates every `period` steps and after the last step.

    An evaluation that was interrupted is done again when training continues, so that its results,
    and the stops that follow from them, are those of an undisturbed run.

    Args:
      period: steps between evaluations; 0 for none.
      metrics: where results are written.
      train_eval: batches by task, evaluated with the training's metrics.
      progress: knows what was done before an interruption.
      infer_eval: evaluates the tasks' own metrics: {task: {metric: value}}.
      run_actions: what is done with the results of `TRAIN_EVAL` and `INFER_EVAL`.
      before_training: whether to evaluate before the first step too.
    """

    def __init__(
        self,
        period: int,
        metrics: SplitMetrics,
        *,
        train_eval: Mapping[str, Any],
        progress: Progress,
        infer_eval: InferEval | None = None,
        run_actions: Mapping[str, RunActions] | None = None,
        before_training: bool = False,
    ):
        self._period, self._metrics, self._before = period, metrics, before_training
        self._train_eval, self._infer_eval = train_eval, infer_eval
        self._run_actions, self._progress = run_actions or {}, progress
        self._last = 0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Evaluates where training starts, if that is wanted or was interrupted."""
        self._last = last_step
        if self._progress.evaluated == loop.step and self._progress.stopped:
            file = self._progress.path.name
            loop.stop(f"an action had stopped it at this step; remove {file} to train on")
            return
        missed = loop.step > self._progress.first_step and self._is_due(loop.step)
        if (missed and self._progress.evaluated != loop.step) or self._before:
            self.evaluate(loop)

    def after_step(self, loop: TrainingLoop) -> None:
        """Evaluates if that is due."""
        if self._is_due(loop.step):
            self.evaluate(loop)

    def _is_due(self, step: int) -> bool:
        since_first = step - self._progress.first_step
        return bool(self._period) and (since_first % self._period == 0 or step == self._last)

    def evaluate(self, loop: TrainingLoop) -> None:
        """Writes the results of both kinds of evaluation; stops training if an action says so."""
        # The metrics of the steps before come first in the file.
        loop.flush()
        self._run("TRAIN_EVAL", loop, loop.trainer.eval(self._train_eval))
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
        # Only once its checkpoint is whole: a run that dies goes on from a checkpoint, and would
        # find the notes of a step that was lost in place of those of its own.
        loop.wait()
        self._progress.note_evaluated(loop.step, stopped=loop.trainer.stop_training)

    def _run(
        self, mode: str, loop: TrainingLoop, results: Mapping[str, Mapping[str, float]]
    ) -> None:
        run = self._run_actions.get(mode)
        if run is not None and results and run(loop.held_state, results):
            loop.stop(f"an action on the metrics of {mode}")
