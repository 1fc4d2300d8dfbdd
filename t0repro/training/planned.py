"""The parts of a training that its plan decides: keys, saving, metrics, evaluations and the end."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax

from t0repro.config.run_config import AdafactorConfig, RunConfig
from t0repro.config.training_plan import TerminateOnNanConfig, TrainingPlan
from t0repro.errors import UserError
from t0repro.partitioning.processes import from_first
from t0repro.training.actions import Action, SaveCheckpoints
from t0repro.training.bad_update import ReportBadUpdate
from t0repro.training.loop import TrainingLoop
from t0repro.training.metrics import SplitMetrics
from t0repro.training.progress_notes import Progress
from t0repro.training.stopping import make_actions
from t0repro.training.summaries import Evaluate, InferEval, Summarise
from t0repro.training.trainer import NumpyBatch


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """What the evaluations of a training read.

    Attributes:
      train_eval: Batches by task, for evaluations with the training's metrics.
      infer_eval: Evaluates the tasks' own metrics; None for no such evaluation.
    """

    train_eval: Mapping[str, Iterable[NumpyBatch]] = dataclasses.field(default_factory=dict)
    infer_eval: InferEval | None = None


def chosen_seed(plan: TrainingPlan, say: Callable[[str], None]) -> int:
    """The plan's seed, or one drawn from the clock, with a message."""
    if plan.random_seed is not None:
        return plan.random_seed
    # Of several processes, one clock decides: all must draw the same parameters.
    seed = from_first(lambda: int(time.time()))
    say(f"seed: {seed}, since random_seed is None")
    return seed


def keys(seed: int, how: Literal["split", "folded"]) -> tuple[jax.Array, jax.Array]:
    """The PRNG keys of the initial parameters and of dropout; see `TrainingPlan.keys`."""
    if how == "folded":
        initial = jax.random.key(seed)
        # Fold in a constant, because parameters are drawn with the seed's key itself.
        return initial, jax.random.fold_in(initial, 1)
    initial, training = jax.random.split(jax.random.PRNGKey(seed))
    return initial, training


def last_step(config: RunConfig, start_step: int) -> int:
    """The step at which a training that starts at a step ends.

    Raises:
      UserError: If it is past that step already, and the plan does not allow that.
    """
    plan = config.plan
    if plan.relative_steps is not None:
        return start_step + plan.relative_steps
    if config.train_steps < start_step and not plan.may_start_past_end:
        raise UserError(
            f"total_steps is {config.train_steps:,}, but the checkpoint is of step {start_step:,}.",
            where=config.provenance.get("train_steps"),
            fix="TRAIN_STEPS counts the checkpoint's steps too; or set relative_steps.",
        )
    return config.train_steps


def shortest_period(plan: TrainingPlan, steps: int) -> int:
    """The shortest of the periods in force, which summaries follow unless they have their own."""
    # A period that nothing follows is not in force.
    evaluated = plan.train_eval_data or plan.infer_eval_data
    periods = (
        plan.eval_period if evaluated else 0,
        plan.save.period if plan.save else 0,
        plan.gc_period,
    )
    # Without any period there is one summary, at the end.
    return min((period for period in periods if period), default=max(1, steps))


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Where a training begins, in steps and in files.

    Attributes:
      step: The global step that it starts from.
      last_step: The step at which it ends.
      checkpoint: The checkpoint in model_dir that it continues from; None for a new run.
      save_data: Writes the position in the data into a checkpoint's folder.
    """

    step: int
    last_step: int
    checkpoint: Path | None
    save_data: Callable[[Path], None] | None


def planned_actions(
    config: RunConfig,
    inputs: Evaluations,
    files: SplitMetrics | None,
    beginning: Beginning,
    say: Callable[[str], None],
) -> Sequence[Action]:
    """What happens between steps, in the order in which T5X does it.

    Args:
      config: The run.
      inputs: What evaluations read.
      files: Where summaries are written; None if each step has a line instead.
      beginning: Where the training begins.
      say: Receives lines about what is being done.
    """
    plan = config.plan
    on_metrics = {mode: make_actions(items, say) for mode, items in plan.actions.items()}
    progress = Progress(
        config.model_dir,
        beginning.step,
        {mode: run.actions for mode, run in on_metrics.items()},
        beginning.checkpoint,
    )
    steps = beginning.last_step - beginning.step
    actions: list[Action] = []
    if plan.log == "summaries":
        period = plan.stats_period or shortest_period(plan, steps)
        actions.append(Summarise(period, progress, on_metrics.get("TRAIN")))
    if plan.gc_period:
        actions.append(CollectGarbage(plan.gc_period))
    if plan.save is not None:
        actions.append(
            SaveCheckpoints(
                config.model_dir, plan.save, beginning.save_data, progress=progress, say=say
            )
        )
    if stops_on_nan(plan):
        actions.append(ReportBadUpdate(config, say))
    # After the save, as in T5X, so that a metric that fails costs no training.
    if inputs.train_eval or inputs.infer_eval:
        assert files is not None, "a run that evaluates writes summaries"
        actions.append(
            Evaluate(
                plan.eval_period,
                files,
                train_eval=inputs.train_eval,
                infer_eval=inputs.infer_eval,
                run_actions=on_metrics,
                progress=progress,
                before_training=plan.run_eval_before_training,
            )
        )
    return actions


def may_be_nan(config: RunConfig) -> bool:
    """Whether something other than the trainer deals with a loss that is not finite."""
    optimizer = config.optimizer
    # Either the optimizer passes over NaN entries, or an action stops the training by itself.
    skips = isinstance(optimizer, AdafactorConfig) and optimizer.skip_nan_updates
    return skips or stops_on_nan(config.plan)


def stops_on_nan(plan: TrainingPlan) -> bool:
    """Whether an action watches for values that are not finite."""
    actions = [action for items in plan.actions.values() for action in items]
    return any(isinstance(action, TerminateOnNanConfig) for action in actions)


class CollectGarbage(Action):
    """Collects Python's garbage every `period` steps, and at no other time."""

    def __init__(self, period: int):
        self._period, self._first = period, 0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Takes over from Python's own collection."""
        self._first = loop.step
        gc.disable()

    def after_step(self, loop: TrainingLoop) -> None:
        """Collects if it is time."""
        if (loop.step - self._first) % self._period == 0:
            gc.collect()

    def end(self, loop: TrainingLoop) -> None:
        """Leaves it to Python again."""
        gc.enable()
