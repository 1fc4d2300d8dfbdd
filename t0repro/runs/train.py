"""Training on the JAX stack, from a RunConfig and batches to checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding

from t0repro.config.run_config import RunConfig, TrainDataConfig
from t0repro.errors import UserError
from t0repro.model.t5 import T5, count_parameters, initial_parameters
from t0repro.partitioning.devices import choose, line_of
from t0repro.partitioning.processes import from_first, output_folder
from t0repro.runs.plan import (
    PlannedInputs,
    chosen_seed,
    keys,
    last_step,
    may_be_nan,
    planned_actions,
)
from t0repro.training.actions import Action, SaveCheckpoints, ShowProgress, StopOnSignal
from t0repro.training.checkpoints import (
    checkpoint_path,
    data_folder,
    latest_step,
    load_tree,
    remove_interrupted_saves,
)
from t0repro.training.metrics import MetricsManager, Writer
from t0repro.training.optimizers import Optimizer, make_optimizer
from t0repro.training.run_state import RecordRunState
from t0repro.training.schedules import make_schedule
from t0repro.training.summaries import SplitMetrics
from t0repro.training.train_state import FlatTree, TrainState, from_flat_tree, new_train_state
from t0repro.training.train_step import Measured
from t0repro.training.trainer import NumpyBatch, Trainer
from t0repro.words import counted


@runtime_checkable
class BatchSource(Protocol):
    """Batches whose position is saved in checkpoints, so that a resumed run continues from it."""

    def open(
        self, step: int, saved: Path | None, say: Callable[[str], None]
    ) -> Iterable[NumpyBatch]:
        """Batches for the updates after a global step.

        Args:
          step: The global step that training starts from.
          saved: The folder that `save` wrote, in the checkpoint that training resumes from; None if
            there is no such folder, or if training begins in this model_dir.
          say: Receives one line about what is being done.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint's folder how many batches have been used."""
        ...


class StoppedBySignal(SystemExit):
    """A signal ended training early, after a save; the exit code is 128 plus its number."""

    def __init__(self, number: int):
        super().__init__(128 + number)


def train(
    config: RunConfig,
    batches: Iterable[NumpyBatch] | Callable[[], Iterable[NumpyBatch]] | BatchSource,
    *,
    restore_from: FlatTree | str | Path | None = None,
    seed: int = 0,
    actions: Sequence[Action] = (),
    writers: Sequence[Writer] = (),
    say: Callable[[str], None] | None = None,
    planned: PlannedInputs | None = None,
) -> TrainState:
    """Trains until the global step reaches config.train_steps and returns the last state.

    Starts from the latest checkpoint in config.model_dir; without one, from `restore_from`,
    including its slots and step; without that, from freshly drawn parameters.

    Args:
      config: A configuration with mode "train".
      batches: Numpy batches as in t0repro.model.t5; or a function that opens them, called only if
        there is a step to take; or a source that knows its position.
      restore_from: A flat tree, which converters can read from any checkpoint, or the path of a JAX
        checkpoint: config.init_checkpoint in a form that this stack can read.
      seed: Seed for the initial parameters and for dropout.
      actions: Actions to run between steps, in addition to the standard ones (saving, progress).
      writers: Receive metrics in addition to metrics.jsonl, for instance TensorBoard event files.
      say: Receives lines about what is being done; prints to standard error by default.
      planned: What a run with a plan reads and writes beside these; its plan's seed wins over
        `seed`, and its metrics go to `planned.open_writer`'s writers in place of `writers`.

    Raises:
      UserError: If the configuration cannot be trained, a checkpoint does not fit, or a loss is not
        finite.
      StoppedBySignal: After SIGTERM or SIGINT, once the state has been saved.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))

    # ---------------------------------------------------------------- model and optimizer
    if config.optimizer is None or config.schedule is None:
        raise UserError(
            "There is no optimizer or no learning-rate schedule.",
            where="utils.run",
            fix="Bind utils.run.optimizer and utils.run.learning_rate_schedule.",
        )
    model, optimizer = T5(config.model, config.dtypes), make_optimizer(config.optimizer)
    schedule = make_schedule(config.schedule)
    plan, initial_key, dropout_key = config.plan, jax.random.key(seed), None
    if plan is not None:
        seed = chosen_seed(plan, say)
        initial_key, dropout_key = keys(seed)
    # Shapes only: a restored run never allocates the parameters that it would throw away.
    fresh = jax.eval_shape(lambda: _fresh_state(model, optimizer, initial_key))
    count = counted(count_parameters(fresh.params), "parameter")
    say(f"model: {count}, activations {config.dtypes.activation}")

    # ---------------------------------------------------------------- devices
    rows, where = config.batch_size // config.num_microbatches, config.provenance.get("layout")
    partitioning = choose(config.layout, config.model, rows=rows, where=where)
    say(line_of(partitioning, config.layout))
    fresh = partitioning.placed(fresh)

    # ---------------------------------------------------------------- where to start
    model_dir = Path(config.model_dir)
    # Whoever starts training holds model_dir's lock, so these are leftovers of killed saves.
    remove_interrupted_saves(model_dir)
    found = from_first(lambda: latest_step(model_dir))
    written = output_folder(model_dir)
    saved_data = None
    if found is not None:
        restore_from = checkpoint_path(model_dir, found)
        saved_data = data_folder(restore_from)
    if restore_from is None:
        state = _fresh_state(model, optimizer, initial_key, fresh)
        say(f"start: new parameters from seed {seed}")
    else:
        where = "init_checkpoint"
        if isinstance(restore_from, str | Path):
            where, restore_from = str(restore_from), load_tree(restore_from)
        state = from_flat_tree(restore_from, fresh, where=where)
        say(f"start: step {int(state.step):,} of {where}")

    # ---------------------------------------------------------------- anything to do?
    start_step = int(state.step)
    end_step = config.train_steps if plan is None else last_step(config, start_step)
    evaluate_only = plan is not None and plan.run_eval_before_training
    if start_step >= end_step and not evaluate_only:
        say(f"nothing to train: step {start_step:,}, train_steps {end_step:,}")
        return state

    # ---------------------------------------------------------------- the loop
    microbatches = counted(config.num_microbatches, "microbatch", "microbatches")
    parts = f"{counted(config.batch_size, 'sequence')} in {microbatches}"
    say(f"train: steps {start_step:,} to {end_step:,}, a batch is {parts}")
    source = batches if isinstance(batches, BatchSource) else None
    if isinstance(batches, BatchSource):
        batches = batches.open(start_step, saved_data, say) if start_step < end_step else ()
    elif callable(batches):
        batches = batches() if start_step < end_step else ()
    signals = StopOnSignal(say)
    save_data = None if source is None else source.save
    metrics: MetricsManager | SplitMetrics
    if plan is None:
        metrics = MetricsManager(written, start_step, writers)
        period, keep = config.save_checkpoints_steps, config.keep_checkpoint_max
        standard: Sequence[Action] = [SaveCheckpoints(model_dir, period, keep, save_data)]
    else:
        planned = planned or PlannedInputs()
        metrics = SplitMetrics(written, start_step, planned.open_writer)
        steps = end_step - start_step
        standard = planned_actions(config, planned, metrics, save_data, steps, say)
    trainer = Trainer(
        model,
        state,
        optimizer=optimizer,
        schedule=schedule,
        num_microbatches=config.num_microbatches,
        seed=seed,
        metrics=metrics,
        actions=[ShowProgress(), RecordRunState(written), *standard, *actions, signals],
        dropout_key=dropout_key if config.model.dropout_rate else None,
        measured=None if plan is None else Measured(weights=plan.weight_metrics),
        may_be_nan=may_be_nan(config),
        partitioning=partitioning,
    )
    try:
        with trainer:
            done = trainer.train(batches, end_step - start_step)
    except KeyboardInterrupt:  # the second Ctrl-C
        saved = latest_step(model_dir)
        place = "the start" if saved is None else f"{checkpoint_path(model_dir, saved)}"
        say(f"stopped at once, without saving: the same command continues from {place}")
        raise

    # ---------------------------------------------------------------- the end
    if start_step >= end_step:
        say(f"nothing to train: step {start_step:,}, train_steps {end_step:,}")
        return trainer.train_state
    if signals.received is not None and trainer.step < end_step:
        saved = checkpoint_path(model_dir, trainer.step)
        say(f"stopped by a signal: the same command continues from {saved}")
        raise StoppedBySignal(signals.received)
    if not done:
        raise UserError(
            "There was not one batch to train on, and nothing was saved.",
            where="the training data" if config.train_data is None else _data_of(config.train_data),
            fix="Check that the task has rows in this split, and that they are not filtered out.",
        )
    if trainer.step < end_step:
        say(f"the batches ended after {counted(done, 'step')}, at step {trainer.step:,}")
    if checkpoint_path(model_dir, trainer.step).is_dir():
        say(f"checkpoint: {checkpoint_path(model_dir, trainer.step)}")
    return trainer.train_state


def _data_of(data: TrainDataConfig) -> str:
    return f"{data.mixture_or_task_name}, split {data.split!r}"


def _fresh_state(
    model: T5, optimizer: Optimizer, key: jax.Array, like: TrainState | None = None
) -> TrainState:
    """Parameters drawn from the key, zero slots, step 0; divided among devices as `like` is."""
    if like is not None and isinstance(like.step.sharding, NamedSharding):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
        return jax.jit(lambda: _fresh_state(model, optimizer, key), out_shardings=shardings)()
    return new_train_state(initial_parameters(model, key), optimizer)
