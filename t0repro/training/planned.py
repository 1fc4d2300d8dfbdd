"""What a run's plan does between steps: summaries, evaluations, and what they remember."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from t0repro.config.run_config import AdafactorConfig, MultiOptimizerConfig, OptimizerConfig
from t0repro.config.training_plan import TerminateOnNanConfig, TrainingPlan
from t0repro.files import output_path, write_atomically
from t0repro.partitioning.processes import from_first, is_first
from t0repro.training.hooks import Hook
from t0repro.training.loop import TrainingLoop
from t0repro.training.metrics import SplitMetrics, StepMetrics
from t0repro.training.start import Start
from t0repro.training.stopping import BaseAction, RunActions
from t0repro.training.trainer import NumpyBatch


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """What the evaluations of a training run read.

    Attributes:
      train_eval: Batches by task, for evaluations with the training run's metrics.
      infer_eval: Evaluates the tasks' own metrics; None for no such evaluation.
    """

    train_eval: Mapping[str, Iterable[NumpyBatch]] = dataclasses.field(default_factory=dict)
    infer_eval: InferEval | None = None


def shortest_period(plan: TrainingPlan, steps: int) -> int:
    """The shortest period in force; summaries follow it unless they have a period of their own."""
    # An evaluation period is in force only if something is evaluated.
    evaluated = plan.train_eval_data or plan.infer_eval_data
    periods = (
        plan.eval_period if evaluated else 0,
        plan.save.period if plan.save else 0,
        plan.gc_period,
    )
    # Without any period there is one summary, at the end.
    return min((period for period in periods if period), default=max(1, steps))


def still_evaluates(
    plan: TrainingPlan, evaluations: Evaluations, start: Start, evaluated: int
) -> bool:
    """Whether the last step's evaluation is still due, although every step is done.

    Args:
      plan: The run's plan.
      evaluations: What its evaluations read.
      start: Where it starts.
      evaluated: The step of its latest finished evaluation; see `last_evaluated`.
    """
    if not (evaluations.train_eval or evaluations.infer_eval):
        return False
    # The run died while it evaluated its last step.
    was_interrupted = (
        start.checkpoint is not None and bool(plan.eval_period) and evaluated < start.step
    )
    return plan.run_eval_before_training or was_interrupted


def passes_nan(plan: TrainingPlan, optimizer: OptimizerConfig | None) -> bool:
    """Whether something other than the trainer handles a loss that is NaN or Inf."""
    # Either the optimizer skips NaN entries, or an action stops the run.
    several = isinstance(optimizer, MultiOptimizerConfig)
    each = [part.optimizer for part in optimizer.parts] if several else [optimizer]
    skips = any(isinstance(one, AdafactorConfig) and one.skip_nan_updates for one in each)
    return skips or stops_on_nan(plan)


def stops_on_nan(plan: TrainingPlan) -> bool:
    """Whether an action watches for values that are NaN or Inf."""
    actions = [action for items in plan.actions.values() for action in items]
    return any(isinstance(action, TerminateOnNanConfig) for action in actions)


class CollectGarbage(Hook):
    """Runs Python's garbage collection every `period` steps, and at no other time."""

    def __init__(self, period: int):
        self._period, self._first = period, 0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Switches off Python's automatic collection."""
        self._first = loop.step
        # Otherwise each process collects after another step, and all of them wait every time.
        gc.disable()

    def after_step(self, loop: TrainingLoop) -> None:
        """Collects if a collection is due."""
        if (loop.step - self._first) % self._period == 0:
            gc.collect()

    def end(self, loop: TrainingLoop) -> None:
        """Restores automatic collection."""
        gc.enable()


# ---- What a run remembers ------------------------------------------------------------------------

# A checkpoint's `progress.json` has the step from which periods are counted, and the state of its
# actions, such as the history of early stopping. A checkpoint is written before the evaluation of
# its step, so model_dir/evaluated.json repeats both as they are after the latest evaluation.


PROGRESS_FILE = "progress.json"
EVALUATED_FILE = "evaluated.json"


class RunProgress:
    """Saves and restores a run's progress: where periods start, and the state of its actions.

    Args:
      model_dir: the run's folder.
      step: the step that training is about to start from.
      actions: the actions of each mode; their saved state is restored here.
      checkpoint: the checkpoint in model_dir that training continues from; None for a new run.

    Attributes:
      path: model_dir/evaluated.json.
      first_step: the step at which the run first began, from which periods are counted.
      evaluated: the step of the latest finished evaluation, if it is `step`; else None.
      stopped: whether an action stopped the run after that evaluation.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        step: int,
        actions: Mapping[str, Sequence[BaseAction]],
        checkpoint: Path | None,
    ):
        self.path, self._actions = output_path(model_dir) / EVALUATED_FILE, actions
        self.first_step, self.evaluated, self.stopped = step, None, False
        if checkpoint is None:
            if is_first():
                # A file that an earlier run left would make this run's first evaluation look done.
                self.path.unlink(missing_ok=True)
            return
        # For the same step, these notes are newer: a checkpoint is written before its step is
        # evaluated and the actions run.
        after = _read(self.path)
        notes = after if after.get("step") == step else _read(checkpoint / PROGRESS_FILE)
        self.first_step = notes.get("first_step", step)
        if notes is after:
            self.evaluated, self.stopped = step, bool(after["stopped"])
        for mode, states in notes.get("actions", {}).items():
            # Matched by position; if the run resumes with more actions, the new ones start empty.
            for action, state in zip(actions.get(mode, ()), states, strict=False):
                action.load_state_dict(state)

    def notes(self) -> dict[str, Any]:
        """The progress as of now, in types that JSON can hold."""
        states = {
            mode: [item.state_dict() for item in items] for mode, items in self._actions.items()
        }
        return {"first_step": self.first_step, "actions": states}

    def save(self, folder: Path) -> None:
        """Writes the progress into a checkpoint that is being written."""
        write_atomically(folder / PROGRESS_FILE, json.dumps(self.notes()))

    def note_evaluated(self, step: int, *, stopped: bool) -> None:
        """Records that the evaluation of a step is done, and so are the actions on it."""
        notes = {"step": step, "stopped": stopped, **self.notes()}
        if is_first():
            write_atomically(self.path, json.dumps(notes))


def last_evaluated(folder: Path) -> int:
    """The step of the latest finished evaluation of a run; -1 if there is none.

    Args:
      folder: the run's folder, which only the first process reads.
    """
    return from_first(lambda: int(_read(folder / EVALUATED_FILE).get("step", -1)))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


# ---- Summaries and evaluations -------------------------------------------------------------------

# A summary at step k covers the steps since the summary before it, up to k, and the state after k
# updates. Splits are TensorBoard's runs: `train`, `training_eval/<task>`,
# `inference_eval/<task>`.


InferEval = Callable[["TrainingLoop"], Mapping[str, Mapping[str, float]]]


class Summarise(Hook):
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

    def after_step(self, loop: TrainingLoop) -> None:
        """Starts to write a summary in the background if one is due."""
        due = (loop.step - self._progress.first_step) % self._period == 0
        if due or loop.step == self._last:
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
            and self._run_actions(self._loop.held_state, {"train": values})
        ):
            self._loop.stop("an action on the training run's metrics")

    def finish(self, loop: TrainingLoop) -> None:
        """Summarises the steps that no summary covers yet, after a stop."""
        loop.trainer.train_metrics_manager.write_summary(loop.step)


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
        self._last = 0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Evaluates the initial step, if the plan says so or that evaluation was interrupted."""
        self._last = last_step
        if self._progress.evaluated == loop.step and self._progress.stopped:
            file = self._progress.path.name
            loop.stop(f"an action had stopped it at this step; remove {file} to train on")
            return
        missed = loop.step > self._progress.first_step and self._is_due(loop.step)
        if (missed and self._progress.evaluated != loop.step) or self._before:
            self.evaluate(loop)

    def after_step(self, loop: TrainingLoop) -> None:
        """Evaluates if an evaluation is due."""
        if self._is_due(loop.step):
            self.evaluate(loop)

    def _is_due(self, step: int) -> bool:
        since_first = step - self._progress.first_step
        return bool(self._period) and (since_first % self._period == 0 or step == self._last)

    def evaluate(self, loop: TrainingLoop) -> None:
        """Writes the results of both kinds of evaluation; stops training if an action says so."""
        # Write the metrics of earlier steps to the file first.
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
        # Wait for this step's checkpoint: a run that dies resumes from a checkpoint, and would find
        # here the notes of a lost step instead of those of its own.
        loop.wait()
        self._progress.note_evaluated(loop.step, stopped=loop.trainer.stop_training)

    def _run(
        self, mode: str, loop: TrainingLoop, results: Mapping[str, Mapping[str, float]]
    ) -> None:
        run = self._run_actions.get(mode)
        if run is not None and results and run(loop.held_state, results):
            loop.stop(f"an action on the metrics of {mode}")
