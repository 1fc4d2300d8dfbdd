"""Training on the JAX stack, from a RunConfig and batches to checkpoints."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import SeqioDataConfig, TrainDataConfig
from t0repro.errors import UserError
from t0repro.model.t5 import T5, count_parameters
from t0repro.partitioning.devices import Partitioning, choose, line_of
from t0repro.partitioning.processes import is_first
from t0repro.partitioning.topologies import memory_of
from t0repro.progress import say
from t0repro.training.checkpoints import checkpoint_path, latest_step
from t0repro.training.hooks import Hook, StopOnSignal, StoppedBySignal
from t0repro.training.loop import TrainingLoop
from t0repro.training.metrics import OpenWriter, Writer
from t0repro.training.models import model_of
from t0repro.training.optimizers import make_optimizer
from t0repro.training.planned import Evaluations, loop_of, still_evaluates
from t0repro.training.rematerialization import compiled_in_background, decided
from t0repro.training.schedules import make_schedule
from t0repro.training.start import (
    Batches,
    Feed,
    RestoreFrom,
    chosen_seed,
    keys,
    last_step,
    new_state,
    started,
)
from t0repro.training.train_state import TrainState, frozen_shapes
from t0repro.training.trainer import PreemptionError
from t0repro.words import counted

# Writes the files in which a run describes itself.
Describe = Callable[[TrainState, Partitioning], None]


def train(
    config: RunConfig,
    batches: Batches,
    *,
    restore_from: RestoreFrom = None,
    seed: int | None = None,
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
    evaluations: Evaluations | None = None,
    open_writers: Callable[[int], OpenWriter] | None = None,
    describe: Describe | None = None,
    vocabularies: tuple[Any, Any] = (None, None),
    check: Callable[[TrainState], None] | None = None,
) -> TrainState:
    """Trains until the global step reaches config.train_steps and returns the last state.

    Starts from the latest checkpoint in config.model_dir; without one, from `restore_from`,
    including its slots and step; without that, from newly initialized parameters.

    Args:
      config: A configuration with mode "train".
      batches: Numpy batches as in t0repro.model.t5; or a function that opens them, called only if
        there is a step to run; or a source that saves its position.
      restore_from: The plan's checkpoint in a form that this stack can read: a flat tree, which
        converters can read from any checkpoint; or the path of a JAX checkpoint; or a function that
        returns such a tree or None, given a function that makes a new state.
      seed: Seed for the initial parameters and for dropout, in place of the plan's.
      hooks: What to run between steps, in addition to the standard ones (saving, progress).
      writers: Receive the lines of steps in addition to metrics.jsonl, for instance TensorBoard
        event files.
      evaluations: What the plan's evaluations read.
      open_writers: Given the step that training starts from, opens the writers of summaries; None
        writes metrics.jsonl alone.
      describe: Called with the state's shapes and the devices once a checkpoint is found to fit, in
        the first process only.
      vocabularies: SeqIO's, of inputs and targets, for a user's model.
      check: Called with the state's shapes before a checkpoint is restored; raises a UserError if
        the state in model_dir is of another kind (t0repro.training.model_dir).

    Raises:
      UserError: If the configuration cannot be trained, a checkpoint does not fit, or a loss is NaN
        or Inf.
      StoppedBySignal: After SIGTERM or SIGINT, once the state has been saved.
    """
    plan, evaluations = config.plan, evaluations or Evaluations()

    # ---- Devices --------------------------------------------------------------------------------
    rows, where = config.batch_size // config.num_microbatches, config.provenance.get("layout")
    partitioning = choose(config.layout, config.model, rows=rows, where=where)
    devices = line_of(partitioning, config.layout)
    memory = memory_of(partitioning.mesh.devices.flat[0])

    # ---- Model, optimizer, schedule -------------------------------------------------------------
    if config.optimizer is None or config.schedule is None:
        raise UserError(
            "There is no optimizer or no learning-rate schedule.",
            where="utils.run",
            fix="Bind utils.run.optimizer and utils.run.learning_rate_schedule.",
        )
    optimizer, schedule = make_optimizer(config.optimizer), make_schedule(config.schedule)
    config, why = decided(config, partitioning, memory)
    module = T5(config.model, config.dtypes)
    model = model_of(config, module, optimizer, vocabularies=vocabularies, decoding=plan.decoding)
    seed = chosen_seed(plan) if seed is None else seed
    initial_key, dropout_key = keys(seed, plan.keys)
    fresh = functools.partial(new_state, model, initial_key)
    # Shapes only: a restored run never allocates the parameters that it would throw away.
    shapes = jax.eval_shape(fresh)
    adapter = config.model.adapter
    if adapter is not None:
        shapes = shapes.replace(frozen=frozen_shapes(module))
    shapes = partitioning.placed(shapes)
    count = counted(count_parameters(shapes.params), "parameter")
    beside = ""
    if adapter is not None:
        frozen = counted(count_parameters(shapes.frozen), "frozen parameter")
        beside = f" of an adapter beside {frozen} in {adapter.base_dtype}"
    say(f"model: {count}{beside}, activations {config.dtypes.activation}")
    say(devices)
    if why:
        say(why)

    # ---- Restore --------------------------------------------------------------------------------
    if check is not None:
        check(shapes)
    restoring = time.perf_counter()
    start = started(config, shapes, fresh, restore_from)
    seconds = time.perf_counter() - restoring
    if start.is_new:
        say(f"start: parameters initialized from seed {seed}")
    end_step = last_step(config, start.step)
    if describe is not None and is_first():
        describe(shapes, partitioning)
    nothing = f"nothing to train: step {start.step:,}, train_steps {end_step:,}"
    if start.step >= end_step and not still_evaluates(config, start, evaluations):
        say(nothing)
        return fresh(start.state) if start.is_new else start.state

    # ---- Data -----------------------------------------------------------------------------------
    microbatches = counted(config.num_microbatches, "microbatch", "microbatches")
    parts = f"{counted(config.batch_size, 'sequence')} in {microbatches}"
    say(f"train: steps {start.step:,} to {end_step:,}, a batch is {parts}")
    feed = Feed(batches, config, model, partitioning)

    # ---- Loop -----------------------------------------------------------------------------------
    # The last of the hooks: it reports how long the others took to save.
    signals = StopOnSignal(plan.save is not None)
    loop = loop_of(
        config,
        model,
        start,
        partitioning,
        end_step=end_step,
        rng=dropout_key,
        schedule=schedule,
        evaluations=evaluations,
        save_data=feed.save,
        hooks=[*hooks, signals],
        writers=writers,
        open_writers=open_writers,
    )
    trainer = loop.trainer

    def open_batches() -> Iterable[Any]:
        # Runs while the step is being compiled. Open the data first: it builds its first batch
        # while parameters are initialized.
        opened = feed.open(start) if start.step < end_step else ()
        initializing = time.perf_counter()
        if start.is_new:
            trainer.train_state = fresh(start.state)
        trainer.train_metrics_manager.write_event(
            "timing/init_or_restore_seconds",
            seconds + time.perf_counter() - initializing,
            start.step,
        )
        return opened

    # ---- Train and save -------------------------------------------------------------------------
    # Only this project's own data has shapes that are known before reading it.
    compiles_in_background = feed.is_source and start.step < end_step
    beside = (
        compiled_in_background(trainer, config)
        if compiles_in_background
        else contextlib.nullcontext()
    )
    try:
        with loop, beside:
            done = loop.run(open_batches(), end_step - start.step)
    except PreemptionError as error:
        raise StoppedBySignal(signal.SIGTERM, plan.save is not None) from error
    except KeyboardInterrupt:  # the second Ctrl-C
        say(f"stopped at once, without saving: {_how_to_continue(config)}")
        raise
    if start.step >= end_step:
        say(nothing)
    else:
        _report_end(loop, end_step, done, signals, config)
    return trainer.release()


# ---- How it ended -------------------------------------------------------------------------------


def _how_to_continue(config: RunConfig) -> str:
    """The checkpoint from which the same command would continue: the latest."""
    saved = latest_step(config.model_dir)
    place = "the start" if saved is None else str(checkpoint_path(config.model_dir, saved))
    return f"the same command continues from {place}"


def _report_end(
    loop: TrainingLoop,
    end_step: int,
    done: int,
    signals: StopOnSignal,
    config: RunConfig,
) -> None:
    """Reports where training ended and why.

    Raises:
      StoppedBySignal: If a signal ended it.
      UserError: If there was nothing to train on.
    """
    saved = checkpoint_path(config.model_dir, loop.step)
    if signals.received is not None and loop.step < end_step:
        if config.plan.save is not None:
            say(f"stopped by a signal: the same command continues from {saved}")
        else:
            say(f"stopped by a signal, without saving: {_how_to_continue(config)}")
        raise StoppedBySignal(signals.received, config.plan.save is not None)
    if not done and loop.stop_reason is None:
        data = config.plan.train_data
        # T5X's dialect saves the state before the first step.
        kept = f"; {saved} holds the state that it started from." if saved.is_dir() else None
        raise UserError(
            f"There are no batches to train on{kept or ', and nothing was saved.'}",
            where="the training data" if data is None else _data_of(data),
            fix="Check that the task has rows in this split, and that they are not filtered out.",
        )
    if loop.step < end_step:
        why = loop.stop_reason or "the batches ended"
        say(f"{why} after {counted(done, 'step')}, at step {loop.step:,}")
    if saved.is_dir():
        say(f"checkpoint: {saved}")


def _data_of(data: SeqioDataConfig | TrainDataConfig) -> str:
    return f"{data.mixture_or_task_name}, split {data.split!r}"
