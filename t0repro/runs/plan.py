"""The parts of a training that its plan decides: keys, saving, metrics, evaluations and the end."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from t0repro.config.decoding_plan import DecodingPlan
from t0repro.config.run_config import AdafactorConfig, RunConfig
from t0repro.config.training_plan import TerminateOnNanConfig, TrainingPlan
from t0repro.errors import UserError
from t0repro.partitioning.processes import from_first
from t0repro.training.actions import Action, SaveByPlan
from t0repro.training.bad_update import ReportBadUpdate
from t0repro.training.loop import TrainingLoop
from t0repro.training.metrics import OpenWriter, SplitMetrics
from t0repro.training.progress_notes import Progress
from t0repro.training.stopping import make_actions
from t0repro.training.summaries import Evaluate, InferEval, Summarise
from t0repro.training.trainer import NumpyBatch


@dataclasses.dataclass(frozen=True)
class PlannedInputs:
    """What a planned training reads and writes beside its training batches.

    Attributes:
      train_eval: Batches by task, for evaluations with the training's metrics.
      infer_eval: Evaluates the tasks' own metrics; None for no such evaluation.
      open_writer: Opens the writer of a split's metrics; None writes metrics.jsonl alone.
      vocabularies: SeqIO's of inputs and targets, for a model of the user's.
      decoding: How a model of the user's generates.
    """

    train_eval: Mapping[str, Iterable[NumpyBatch]] = dataclasses.field(default_factory=dict)
    infer_eval: InferEval | None = None
    open_writer: OpenWriter | None = None
    vocabularies: tuple[Any, Any] = (None, None)
    decoding: DecodingPlan | None = None


def chosen_seed(plan: TrainingPlan, say: Callable[[str], None]) -> int:
    """The plan's seed, or one drawn from the clock, with a message."""
    if plan.random_seed is not None:
        return plan.random_seed
    # Of several processes, one clock decides: all must draw the same parameters.
    seed = from_first(lambda: int(time.time()))
    say(f"seed: {seed}, since random_seed is None")
    return seed


def keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """The keys of the initial parameters and of dropout, as T5X splits its seed's."""
    initial, training = jax.random.split(jax.random.PRNGKey(seed))
    return initial, training


def last_step(config: RunConfig, start_step: int) -> int:
    """The step at which a training that starts at a step ends.

    Raises:
      UserError: If it is past that step already.
    """
    assert config.plan is not None
    relative = config.plan.relative_steps
    if relative is not None:
        return start_step + relative
    if config.train_steps < start_step:
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
    """Where a planned training begins, in steps and in files.

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
    inputs: PlannedInputs,
    files: SplitMetrics,
    beginning: Beginning,
    say: Callable[[str], None],
) -> Sequence[Action]:
    """What happens between steps, in the order in which T5X does it.

    Args:
      config: The run, with a plan.
      inputs: What evaluations read.
      files: Where metrics are written.
      beginning: Where the training begins.
      say: Receives lines about what is being done.
    """
    plan = config.plan
    assert plan is not None
    on_metrics = {mode: make_actions(items, say) for mode, items in plan.actions.items()}
    progress = Progress(
        config.model_dir,
        beginning.step,
        {mode: run.actions for mode, run in on_metrics.items()},
        beginning.checkpoint,
    )
    steps = beginning.last_step - beginning.step
    actions: list[Action] = [
        Summarise(
            plan.stats_period or shortest_period(plan, steps), progress, on_metrics.get("TRAIN")
        )
    ]
    if plan.gc_period:
        actions.append(CollectGarbage(plan.gc_period))
    if plan.save is not None:
        actions.append(
            SaveByPlan(config.model_dir, plan.save, beginning.save_data, progress=progress, say=say)
        )
    if stops_on_nan(plan):
        actions.append(ReportBadUpdate(config, say))
    # After the save, as in T5X, so that a metric that fails costs no training.
    if inputs.train_eval or inputs.infer_eval:
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
    plan, optimizer = config.plan, config.optimizer
    if plan is None:
        return False
    # Either the optimizer passes over NaN entries, or an action stops the training by itself.
    skips = isinstance(optimizer, AdafactorConfig) and optimizer.skip_nan_updates
    return skips or stops_on_nan(plan)


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
