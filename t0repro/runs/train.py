"""Training on the JAX stack, from a TrainRun and batches to checkpoints."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from t0repro.config.run import Replaced, TrainingPlan, TrainRun
from t0repro.config.settings import check_field
from t0repro.errors import UserError
from t0repro.model.t5 import T5
from t0repro.partitioning.devices import Partitioning, choose, describe_devices
from t0repro.partitioning.processes import is_first, output_folder
from t0repro.progress import say
from t0repro.training.checkpoints import checkpoint_path, latest_step
from t0repro.training.compile_ahead import compile_in_background
from t0repro.training.feed import Batches, Feed
from t0repro.training.hooks.collect_garbage import CollectGarbage
from t0repro.training.hooks.evaluate import Evaluate, Evaluations
from t0repro.training.hooks.record_run_state import RecordRunState
from t0repro.training.hooks.report_bad_update import ReportBadUpdate
from t0repro.training.hooks.run_progress import RunProgress, last_evaluated
from t0repro.training.hooks.save import SaveCheckpoints
from t0repro.training.hooks.show_progress import ShowProgress
from t0repro.training.hooks.stop_on_signal import StopOnSignal, StoppedBySignal
from t0repro.training.hooks.summarize import Summarize
from t0repro.training.loop import Hook, TrainingLoop
from t0repro.training.metrics import (
    METRICS_FILE,
    MetricLog,
    OpenWriter,
    SplitMetrics,
    Writer,
    sum_trained,
)
from t0repro.training.model_dir import Check, check_steps_left
from t0repro.training.models import model_of
from t0repro.training.optimizers import make_optimizer, skips_nan
from t0repro.training.partitioner import Partitioner
from t0repro.training.rematerialization import batch_shapes, choose_remat
from t0repro.training.schedules import make_schedule
from t0repro.training.start import RestoreFrom, choose_seed, make_keys, new_state, restore_or_create
from t0repro.training.stopping import make_actions
from t0repro.training.train_state import TrainState, stack_state, state_shapes
from t0repro.training.trainer import BaseTrainer, PreemptionError, Trainer
from t0repro.training.weight_metrics import WeightMetricsComputer
from t0repro.words import counted

# Writes the files in which a run describes itself.
Describe = Callable[[TrainState, Partitioning], None]


def train(
    config: TrainRun,
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
    check: Check | None = None,
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
        the first process only, if there is a step left to train or an evaluation due.
      vocabularies: SeqIO's, of inputs and targets, for a user's model.
      check: Called with the state's shapes before a checkpoint is restored; raises a UserError if
        the state in model_dir is of another kind; returns what records the run, called beside
        `describe` (t0repro.training.model_dir).

    Raises:
      UserError: If the configuration cannot be trained, a checkpoint does not fit, or a loss is NaN
        or Inf.
      StoppedBySignal: After SIGTERM or SIGINT, once the state has been saved.
    """
    plan, model_dir = config.plan, os.fspath(config.model_dir)
    evaluations = evaluations or Evaluations()

    def part(name: Replaced, own: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """An object of the user's class for a part of the run, or else of this project's."""
        user_class = plan.user_classes.get(name)
        where = config.provenance.get(f"plan.user_classes.{name}")
        return user_class.made(arguments, where) if user_class else own(**arguments)

    # ---- Devices, and what they get of a batch --------------------------------------------------
    rows, where = config.batch_size // config.num_microbatches, config.provenance.get("layout")
    partitioning = choose(config.layout, config.model, rows=rows, where=where)
    devices, features = describe_devices(partitioning, config.layout), batch_shapes(config)

    # ---- Model, optimizer, schedule -------------------------------------------------------------
    if config.optimizer is None or config.schedule is None:
        raise UserError(
            "There is no optimizer or no learning-rate schedule.",
            where="utils.run",
            fix="Bind utils.run.optimizer and utils.run.learning_rate_schedule.",
        )
    optimizer, schedule = make_optimizer(config.optimizer), make_schedule(config.schedule)
    # Shapes only: a restored run never allocates the parameters that it would throw away.
    shapes = state_shapes(T5(config.model, config.dtypes), optimizer)
    held = stack_state(config.model, shapes)
    config, why = choose_remat(config, held, features, partitioning, partitioning.memory)
    user_class = plan.user_classes.get("model")
    model = model_of(
        T5(config.model, config.dtypes),
        optimizer,
        user_class,
        where=config.provenance.get("plan.user_classes.model"),
        vocabularies=vocabularies,
        decoding=plan.decoding,
    )
    seed = choose_seed(plan) if seed is None else seed
    check_field(TrainingPlan, "random_seed", seed, "seed", shown="seed")
    initial_key, dropout_key = make_keys(seed, plan.keys)
    fresh = functools.partial(new_state, model, initial_key)
    if user_class is not None:  # it may have other parameters, and variables that are not trained
        shapes = jax.eval_shape(fresh).replace(frozen=shapes.frozen)
    shapes, adapter = partitioning.shapes_on_devices(shapes), config.model.adapter
    count, frozen = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (shapes.params, shapes.frozen)
    )
    beside = ""
    if adapter is not None:
        of_base = counted(frozen, "frozen parameter")
        beside = f" of an adapter beside {of_base} in {adapter.base_dtype}"
    say(f"model: {counted(count, 'parameter')}{beside}, activations {config.dtypes.activation}")
    say(devices)
    if why:
        say(why)

    # ---- Data -----------------------------------------------------------------------------------
    feed = Feed(batches, config.batch_size, model, partitioning)

    # ---- Restore --------------------------------------------------------------------------------
    record = None if check is None else check(shapes)
    restoring = time.perf_counter()
    start = restore_or_create(config, shapes, fresh, restore_from)
    seconds = time.perf_counter() - restoring
    if start.is_new:
        say(f"start: parameters initialized from seed {seed}")
    end_step = config.train_steps
    if plan.relative_steps is not None:
        end_step = start.step + plan.relative_steps
    check_steps_left(config, start.step)
    written = output_folder(model_dir)
    evaluated = last_evaluated(written)
    nothing = (
        f"nothing to train: step {start.step:,}, train_steps {end_step:,}, which includes the"
        " steps of the checkpoint. To train on, bind more."
    )
    # As in T5X, a run with no step left to train may still evaluate.
    if start.step >= end_step and not evaluations.still_due(plan, start, evaluated):
        say(nothing)
        return fresh(start.state) if start.is_new else start.state
    if record is not None:
        record()
    if describe is not None and is_first():
        describe(shapes, partitioning)

    microbatches = counted(config.num_microbatches, "microbatch", "microbatches")
    parts = f"{counted(config.batch_size, 'sequence')} in {microbatches}"
    say(f"train: steps {start.step:,} to {end_step:,}, a batch is {parts}")

    # ---- Updates --------------------------------------------------------------------------------
    # Only a held update preserves the state that explains it, and no step may follow it.
    holds = plan.stops_on_nan
    # Something other than the trainer may handle a NaN or Inf: an action, or the optimizer.
    may_be_nan = holds or skips_nan(config.optimizer)
    log = files = None
    if plan.log == "steps":
        log = MetricLog(written, start.step, writers)
    else:
        opener = open_writers and open_writers(start.step)
        per_token = getattr(model, "summary_loss_per_target_token", None)
        files = SplitMetrics(written, start.step, opener, evaluated, per_token)
    weights, every = None, {"every": config.weight_metrics_every}
    if config.weight_metrics_every:
        weights = part("weight_metrics_computer", WeightMetricsComputer, every)
    arguments = {
        "model": model,
        "train_state": start.state,
        "partitioner": part("partitioner", Partitioner, {"partitioning": partitioning}),
        "eval_names": list(evaluations.train_eval),
        "summary_dir": None,
        "train_state_axes": None,
        "rng": dropout_key,
        "learning_rate_fn": schedule,
        "num_microbatches": config.num_microbatches,
        "weight_metrics_computer": weights,
    }
    trainer: BaseTrainer = part("trainer", Trainer, arguments)
    # Not constructor arguments: a user's class has T5X's constructor, which takes neither.
    trainer.hold_if_not_finite = holds
    if files is not None:
        trainer.write_to(files)

    # ---- Between steps, in the order in which T5X does it ---------------------------------------
    on_metrics = {mode: make_actions(items) for mode, items in plan.actions.items()}
    actions = {mode: run.actions for mode, run in on_metrics.items()}
    progress = RunProgress(model_dir, start.step, actions, start.checkpoint)
    if plan.log == "steps":
        progress.trained = sum_trained(Path(written) / METRICS_FILE)
    between: list[Hook] = [ShowProgress(), RecordRunState(written, progress.trained)]
    if plan.log == "summaries":
        # T5X's default: the shortest of the run's periods.
        period = plan.stats_period or plan.shortest_period(end_step - start.step)
        between.append(Summarize(period, progress, on_metrics.get("TRAIN")))
    if plan.gc_period:
        between.append(CollectGarbage(plan.gc_period))
    if plan.save is None:
        say("no checkpoint will be saved: utils.CheckpointConfig.save is None")
    else:
        between.append(
            SaveCheckpoints(model_dir, plan.save, feed.save, progress=progress, note=start.note)
        )
    if holds:
        between.append(ReportBadUpdate(config, start.note))
    # After the save, as in T5X, so that a metric that fails loses no step.
    if evaluations:
        assert files is not None, "a run that evaluates writes summaries"
        between.append(
            Evaluate(
                plan.eval_period,
                files,
                train_eval=evaluations.train_eval,
                infer_eval=evaluations.infer_eval,
                run_actions=on_metrics,
                progress=progress,
                before_training=plan.run_eval_before_training,
            )
        )
    # The last of the hooks: it reports how long the others took to save.
    signals = StopOnSignal(plan.save is not None)

    # ---- Train and save -------------------------------------------------------------------------
    loop = TrainingLoop(
        trainer,
        log=log,
        files=files,
        hooks=[*between, *hooks, signals],
        may_be_nan=may_be_nan,
        start_step=start.step,
        synchronous=holds,
    )

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

    # Only this project's own data has shapes that are known before reading it.
    known = feed.is_source and {"inputs", "targets"} <= (config.sequence_length or {}).keys()
    compiling = contextlib.nullcontext()
    known = known and plan.converter == "encoder_decoder"
    if known and not config.model.decoder_only and start.step < end_step:
        compiling = compile_in_background(trainer, features)
    try:
        # The compiling thread uses the trainer, so it ends before the loop closes that.
        with loop, compiling:
            done = loop.run(open_batches(), end_step - start.step)
    except PreemptionError as error:
        raise StoppedBySignal(signal.SIGTERM, plan.save is not None) from error

    # ---- How it ended ---------------------------------------------------------------------------
    if start.step >= end_step:
        say(nothing)
        return trainer.release()
    saved = checkpoint_path(model_dir, loop.step)
    if signals.received is not None and loop.step < end_step:
        if plan.save is not None:
            say(f"stopped by a signal: the same command continues from {saved}")
        else:
            say(f"stopped by a signal, without saving: {_how_to_continue(model_dir)}")
        raise StoppedBySignal(signals.received, plan.save is not None)
    if not done and loop.stop_reason is None:
        data = plan.train_data
        of = data and f"{data.mixture_or_task_name}, split {data.split!r}"
        # T5X's dialect saves the state before the first step.
        kept = f"; {saved} holds the state that it started from." if saved.is_dir() else None
        raise UserError(
            f"There are no batches to train on{kept or ', and nothing was saved.'}",
            where=of or "the training data",
            fix="Check that the task has rows in this split, and that they are not filtered out.",
        )
    if loop.step < end_step:
        why = loop.stop_reason or "the batches ended"
        say(f"stopped after {counted(done, 'step')}, at step {loop.step:,}: {why}")
    if saved.is_dir():
        say(f"checkpoint: {saved}")
    return trainer.release()


def _how_to_continue(model_dir: str) -> str:
    """The checkpoint from which the same command would continue: the latest."""
    saved = latest_step(model_dir)
    place = "the start" if saved is None else str(checkpoint_path(model_dir, saved))
    return f"the same command continues from {place}"
