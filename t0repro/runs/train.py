"""Training on the JAX stack, from a RunConfig and batches to checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding

from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import SeqioDataConfig, TrainDataConfig
from t0repro.errors import UserError
from t0repro.files import check_is_no_pattern
from t0repro.model.t5 import T5, count_parameters, initial_parameters
from t0repro.partitioning.devices import Partitioning, choose, line_of
from t0repro.partitioning.processes import from_first, is_alone, is_first, output_folder
from t0repro.partitioning.topologies import memory_of
from t0repro.training.actions import Action, ShowProgress, StopOnSignal
from t0repro.training.assembling import model_of, trainer_of
from t0repro.training.checkpoints import (
    checkpoint_path,
    data_folder,
    latest_step,
    load_divided_tree,
    remove_interrupted_saves,
)
from t0repro.training.loop import TrainingLoop
from t0repro.training.metrics import MetricLog, OpenWriter, SplitMetrics, Writer
from t0repro.training.models import T5Model, is_own
from t0repro.training.optimizers import make_optimizer
from t0repro.training.planned import (
    Beginning,
    Evaluations,
    chosen_seed,
    keys,
    last_evaluated,
    last_step,
    may_be_nan,
    planned_actions,
    stops_on_nan,
)
from t0repro.training.rematerialization import compiled_beside, decided
from t0repro.training.run_state import RecordRunState
from t0repro.training.schedules import make_schedule
from t0repro.training.train_state import OpenTree, TrainState, from_flat_tree, new_train_state
from t0repro.training.trainer import NumpyBatch, PreemptionError
from t0repro.words import counted

Say = Callable[[str], None]
RestoreFrom = OpenTree | str | Path | Callable[[Callable[[], TrainState]], OpenTree | None] | None
# Writes what a run records about itself.
Describe = Callable[[TrainState, Partitioning], None]


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


@runtime_checkable
class ShardedBatchSource(BatchSource, Protocol):
    """Batches whose rows are made in `num_shards` equal parts, each of which can be left out."""

    num_shards: int

    def make_only(self, shards: Sequence[int]) -> None:
        """Leaves the rows of all other shards zeros; called before `open`."""
        ...


Batches = Iterable[NumpyBatch] | Callable[[], Iterable[NumpyBatch]] | BatchSource


_TOKENS = {"inputs", "targets"}


class StoppedBySignal(SystemExit):
    """A signal ended training early, after a save if the training saves checkpoints.

    The exit code is 130 for Ctrl-C (SIGINT), and PREEMPTED for SIGTERM and for a notice that the
    machine is about to be taken away: nothing is wrong, and the same command continues. Where
    nothing was saved it would start over, and the code is 143 as for any process that SIGTERM ends.
    """

    def __init__(self, number: int, saved: bool = True):
        shell = number == signal.SIGINT or not saved
        super().__init__(128 + number if shell else PREEMPTED)


# sysexits.h's EX_TEMPFAIL, "try again later". A shell reports 143 for a process that SIGTERM ended
# at once, without a save.
PREEMPTED = 75


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where training starts.

    Attributes:
      state: The state; of new parameters only the shapes, since the step is compiled while they are
        initialized.
      step: Its global step.
      checkpoint: The checkpoint in model_dir that it came from.
      is_new: Whether its parameters are to be initialized.
    """

    state: TrainState
    step: int
    checkpoint: Path | None
    is_new: bool = False


def train(
    config: RunConfig,
    batches: Batches,
    *,
    restore_from: RestoreFrom = None,
    seed: int | None = None,
    actions: Sequence[Action] = (),
    writers: Sequence[Writer] = (),
    evaluations: Evaluations | None = None,
    open_writers: Callable[[int], OpenWriter] | None = None,
    describe: Describe | None = None,
    vocabularies: tuple[Any, Any] = (None, None),
    say: Say | None = None,
) -> TrainState:
    """Trains until the global step reaches config.train_steps and returns the last state.

    Starts from the latest checkpoint in config.model_dir; without one, from `restore_from`,
    including its slots and step; without that, from newly initialized parameters.

    Args:
      config: A configuration with mode "train".
      batches: Numpy batches as in t0repro.model.t5; or a function that opens them, called only if
        there is a step to take; or a source that knows its position.
      restore_from: A flat tree, which converters can read from any checkpoint, or the path of a JAX
        checkpoint; or a function that opens such a tree, given what makes a new state, and returns
        None for none. It is the plan's checkpoint in a form that this stack can read.
      seed: Seed for the initial parameters and for dropout, in place of the plan's.
      actions: Actions to run between steps, in addition to the standard ones (saving, progress).
      writers: Receive the lines of steps in addition to metrics.jsonl, for instance TensorBoard
        event files.
      evaluations: What the plan's evaluations read.
      open_writers: Given the step that training starts from, opens the writers of summaries; None
        writes metrics.jsonl alone.
      describe: Given the state's shapes and the devices once a checkpoint is found to fit; called
        in the first process alone.
      vocabularies: SeqIO's of inputs and targets, for a model of the user's.
      say: Receives lines about what is being done; prints to standard error by default.

    Raises:
      UserError: If the configuration cannot be trained, a checkpoint does not fit, or a loss is not
        finite.
      StoppedBySignal: After SIGTERM or SIGINT, once the state has been saved.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    plan, evaluations = config.plan, evaluations or Evaluations()

    # ---- Devices --------------------------------------------------------------------------------
    rows, where = config.batch_size // config.num_microbatches, config.provenance.get("layout")
    partitioning = choose(config.layout, config.model, rows=rows, where=where)

    # ---- Model, optimizer, schedule -------------------------------------------------------------
    if config.optimizer is None or config.schedule is None:
        raise UserError(
            "There is no optimizer or no learning-rate schedule.",
            where="utils.run",
            fix="Bind utils.run.optimizer and utils.run.learning_rate_schedule.",
        )
    optimizer, schedule = make_optimizer(config.optimizer), make_schedule(config.schedule)
    memory = memory_of(partitioning.mesh.devices.flat[0])
    config, why = decided(config, partitioning, memory)
    module = T5(config.model, config.dtypes)
    model = model_of(config, module, optimizer, vocabularies=vocabularies, decoding=plan.decoding)
    seed = chosen_seed(plan, say) if seed is None else seed
    initial_key, dropout_key = keys(seed, plan.keys)
    fresh = functools.partial(_fresh_state, model, initial_key)
    # Shapes only: a restored run never allocates the parameters that it would throw away.
    shapes = partitioning.placed(jax.eval_shape(fresh))
    count = counted(count_parameters(shapes.params), "parameter")
    say(f"model: {count}, activations {config.dtypes.activation}")
    say(line_of(partitioning, config.layout))
    if why:
        say(why)

    # ---- Restore --------------------------------------------------------------------------------
    restoring = time.perf_counter()
    start = _start(config, shapes, fresh, restore_from, say)
    seconds = time.perf_counter() - restoring
    if start.is_new:
        say(f"start: new parameters from seed {seed}")
    end_step = last_step(config, start.step)
    if describe is not None and is_first():
        describe(shapes, partitioning)
    nothing = f"nothing to train: step {start.step:,}, train_steps {end_step:,}"
    if start.step >= end_step and not _still_evaluates(config, start, evaluations):
        say(nothing)
        return fresh(start.state) if start.is_new else start.state

    # ---- Data -----------------------------------------------------------------------------------
    microbatches = counted(config.num_microbatches, "microbatch", "microbatches")
    parts = f"{counted(config.batch_size, 'sequence')} in {microbatches}"
    say(f"train: steps {start.step:,} to {end_step:,}, a batch is {parts}")
    put = partitioning.put_batch
    is_divided = _divide(batches, partitioning, config.batch_size, say)
    # Only of this project's own data are the shapes known before they are read.
    is_source = isinstance(batches, BatchSource)

    def open_batches() -> Iterable[Any]:
        # Called while the step is being compiled. The data come first: their first batch is made
        # while parameters are initialized.
        opened = _opened(batches, start, say) if start.step < end_step else ()
        opened = _within(opened, config.model.vocab_size)
        initializing = time.perf_counter()
        if start.is_new:
            trainer.train_state = fresh(start.state)
        trainer.train_metrics_manager.write_event(
            "timing/init_or_restore_seconds",
            seconds + time.perf_counter() - initializing,
            start.step,
        )
        # From here on a batch is whole, whoever made its rows.
        return (put(model.features(batch)) for batch in opened) if is_divided else opened

    # ---- Loop -----------------------------------------------------------------------------------
    written = output_folder(config.model_dir)
    log, files = None, None
    if plan.log == "steps":
        log = MetricLog(written, start.step, writers)
    else:
        evaluated = from_first(lambda: last_evaluated(config.model_dir))
        opener = open_writers and open_writers(start.step)
        files = SplitMetrics(written, start.step, opener, evaluated)
    # Only a held update leaves the state that explains it, and nothing must follow it.
    holds = stops_on_nan(plan)
    trainer = trainer_of(
        config,
        model,
        start.state,
        partitioning,
        dropout_key,
        schedule,
        eval_names=list(evaluations.train_eval),
        files=files,
        hold_if_not_finite=holds,
    )
    saves = plan.save is not None
    if not saves:
        say("no checkpoint will be saved: utils.CheckpointConfig.save is None")
    beginning = Beginning(
        start.step, end_step, start.checkpoint, batches.save if is_source else None
    )
    # The last of the actions: it reports how long the others took to save.
    signals = StopOnSignal(say, saves)
    planned = planned_actions(config, evaluations, files, beginning, say)
    loop = TrainingLoop(
        trainer,
        log=log,
        files=files,
        actions=[ShowProgress(), RecordRunState(written), *planned, *actions, signals],
        may_be_nan=may_be_nan(config),
        start_step=start.step,
        synchronous=holds,
    )

    # ---- Train and save -------------------------------------------------------------------------
    compiles_beside = is_source and start.step < end_step
    beside = compiled_beside(trainer, config) if compiles_beside else contextlib.nullcontext()
    done = _run_loop(loop, beside, open_batches, end_step - start.step, config, say)
    if start.step >= end_step:
        say(nothing)
    else:
        _say_how_it_ended(loop, end_step, done, signals, config, say)
    return trainer.release()


# ---- Restore ------------------------------------------------------------------------------------


def _start(
    config: RunConfig,
    shapes: TrainState,
    fresh: Callable[[], TrainState],
    restore_from: RestoreFrom,
    say: Say,
) -> _Start:
    """The state of the latest checkpoint, of `restore_from`, or a new one."""
    model_dir = Path(config.model_dir)
    # Now, rather than at the first save.
    check_is_no_pattern(model_dir, "Checkpoints")
    # Whoever starts training holds model_dir's lock, so these are leftovers of killed saves.
    remove_interrupted_saves(model_dir)
    found = from_first(lambda: latest_step(model_dir))
    checkpoint = None if found is None else checkpoint_path(model_dir, found)
    if checkpoint is not None:
        restore_from = checkpoint
    elif callable(restore_from):
        restore_from = restore_from(fresh)
    if restore_from is None:
        return _Start(shapes, 0, None, is_new=True)
    where = "init_checkpoint"
    if isinstance(restore_from, str | Path):
        where, restore_from = str(restore_from), load_divided_tree(restore_from, shapes)
    state = from_flat_tree(restore_from, shapes, where=where)
    say(f"start: step {int(state.step):,} of {where}")
    return _Start(state, int(state.step), checkpoint)


def _fresh_state(model: T5Model, key: jax.Array, like: TrainState | None = None) -> TrainState:
    """Parameters initialized from the key, zero slots, step 0; sharded across devices as `like`."""
    assert model.optimizer_def is not None
    if like is None or not isinstance(like.step.sharding, NamedSharding):
        return TrainState.create(model.optimizer_def, model.get_initial_variables(key, {}))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    if not is_own(model):
        return jax.jit(lambda key: _fresh_state(model, key), out_shardings=shardings)(key)
    params = initial_parameters(model.module, key, shardings.params)
    # Under jit each device makes its own part of the slots.
    make = functools.partial(new_train_state, optimizer=model.optimizer_def)
    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)


def _still_evaluates(config: RunConfig, start: _Start, evaluations: Evaluations) -> bool:
    """Whether there is something to evaluate though every step is done."""
    plan = config.plan
    if not (evaluations.train_eval or evaluations.infer_eval):
        return False
    # The run died while it evaluated its last step.
    was_interrupted = (
        start.checkpoint is not None
        and bool(plan.eval_period)
        and from_first(lambda: last_evaluated(config.model_dir)) < start.step
    )
    return plan.run_eval_before_training or was_interrupted


# ---- Data ---------------------------------------------------------------------------------------


def _opened(batches: Batches, start: _Start, say: Say) -> Iterable[NumpyBatch]:
    """The batches from where training continues."""
    if isinstance(batches, BatchSource):
        saved = None if start.checkpoint is None else data_folder(start.checkpoint)
        return batches.open(start.step, saved, say)
    return batches() if callable(batches) else batches


def _divide(batches: Batches, partitioning: Partitioning, rows: int, say: Say) -> bool:
    """Has each of several processes make the shards of its own rows; whether there are shards."""
    if is_alone() or not isinstance(batches, ShardedBatchSource) or batches.num_shards == 1:
        return False
    count = batches.num_shards
    here = {row // (rows // count) for row in partitioning.rows_here(rows)}
    batches.make_only(sorted(here))
    say(f"data: {count} shards, of which each process makes those of its rows, {len(here)} here")
    return True


def _within(batches: Iterable[NumpyBatch], vocab_size: int) -> Iterator[NumpyBatch]:
    """The batches; the devices would take a token beyond the embedding for its last row."""
    for batch in batches:
        for name in _TOKENS & batch.keys():
            if (largest := batch[name].max(initial=0)) >= vocab_size:
                raise UserError(
                    f"A batch has the token {largest:,}, but the model's vocabulary is"
                    f" {vocab_size:,}.",
                    where=name,
                    fix="Give the model the vocabulary of the tasks, padded to a multiple of 128.",
                )
        yield batch


def _run_loop(
    loop: TrainingLoop,
    beside: contextlib.AbstractContextManager[None],
    open_batches: Callable[[], Iterable[NumpyBatch]],
    num_steps: int,
    config: RunConfig,
    say: Say,
) -> int:
    """Opens the batches and runs the loop, in the given context; returns the steps done."""
    try:
        with loop, beside:
            return loop.run(open_batches(), num_steps)
    except PreemptionError as error:
        raise StoppedBySignal(signal.SIGTERM, config.plan.save is not None) from error
    except KeyboardInterrupt:  # the second Ctrl-C
        say(f"stopped at once, without saving: {_goes_on(config)}")
        raise


def _goes_on(config: RunConfig) -> str:
    """Where the same command would continue: from the latest checkpoint."""
    saved = latest_step(config.model_dir)
    place = "the start" if saved is None else str(checkpoint_path(config.model_dir, saved))
    return f"the same command continues from {place}"


# ---- After the loop -----------------------------------------------------------------------------


def _say_how_it_ended(
    loop: TrainingLoop,
    end_step: int,
    done: int,
    signals: StopOnSignal,
    config: RunConfig,
    say: Say,
) -> None:
    """Tells where training ended and why.

    Raises:
      StoppedBySignal: If a signal ended it.
      UserError: If there was nothing to train on.
    """
    saved = checkpoint_path(config.model_dir, loop.step)
    if signals.received is not None and loop.step < end_step:
        if config.plan.save is not None:
            say(f"stopped by a signal: the same command continues from {saved}")
        else:
            say(f"stopped by a signal, without saving: {_goes_on(config)}")
        raise StoppedBySignal(signals.received, config.plan.save is not None)
    if not done and loop.stop_reason is None:
        data = config.plan.train_data
        # T5X's kind of training saves the state before the first step.
        kept = f"; {saved} holds the state that it started from." if saved.is_dir() else None
        raise UserError(
            f"There was not one batch to train on{kept or ', and nothing was saved.'}",
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
