"""Evaluates between steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from t0repro.config.run import TrainingPlan
from t0repro.progress import say
from t0repro.training.hooks.run_progress import RunProgress
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.metrics import OWN_UNIT, SplitMetrics
from t0repro.training.start import Start
from t0repro.training.step_records import rename_for_trainer
from t0repro.training.stopping import RunActions
from t0repro.training.trainer import BaseTrainer, NumpyBatch

InferEval = Callable[[TrainingLoop], Mapping[str, Mapping[str, float]]]


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
        say(f"evaluating step {loop.step:,}")
        summaries = self._evaluate_training(loop.trainer)
        for task, summary in (summaries or {}).items():
            _say_results(task, _headline(loop.trainer.model, summary))
        self._run("TRAIN_EVAL", loop, summaries)
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
                _say_results(task, numbers)
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
                name: rename_for_trainer(batch)
                for name, each in batches.items()
                for batch in itertools.islice(each, 1)
            }
            trainer.compile_eval(first)
        if trainer.overrides("eval"):
            batches = {name: map(rename_for_trainer, each) for name, each in batches.items()}
        return trainer.eval(batches)

    def _run(
        self, mode: str, loop: TrainingLoop, results: Mapping[str, Mapping[str, float]]
    ) -> None:
        run = self._run_actions.get(mode)
        if run is not None and results and run(loop.stacked_state, results):
            loop.stop(f"an action on the metrics of {mode}")


def _headline(model: Any, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Of a summary, what says how good the model is; the rest is in metrics.jsonl."""
    per_token = getattr(model, "summary_loss_per_target_token", lambda summary: None)(summary)
    shown = {
        "loss per target token": per_token,
        f"loss{OWN_UNIT}": summary.get("loss") if per_token is None else None,
        "token accuracy": summary.get("accuracy"),
    }
    return {name: value for name, value in shown.items() if value is not None}


def _say_results(task: str, values: Mapping[str, Any]) -> None:
    shown = [f"{name} {x:.4g}" for name, x in values.items() if isinstance(x, int | float)]
    say("  ".join(["", task, *(shown or ["no metrics"])]))
