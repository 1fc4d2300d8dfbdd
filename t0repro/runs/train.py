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

from t0repro.config.run_config import RunConfig, TrainDataConfig
from t0repro.errors import UserError
from t0repro.files import check_is_no_pattern
from t0repro.model.t5 import T5, count_parameters, initial_parameters
from t0repro.partitioning.devices import Partitioning, choose, line_of
from t0repro.partitioning.processes import from_first, is_alone, output_folder
from t0repro.partitioning.topologies import memory_of
from t0repro.runs.compile_ahead import compiled_beside
from t0repro.runs.plan import (
    Beginning,
    PlannedInputs,
    chosen_seed,
    keys,
    last_step,
    may_be_nan,
    planned_actions,
    stops_on_nan,
)
from t0repro.runs.recomputation import decided
from t0repro.training.actions import Action, SaveCheckpoints, ShowProgress, StopOnSignal
from t0repro.training.assembling import model_of, trainer_of
from t0repro.training.checkpoints import (
    checkpoint_path,
    data_folder,
    latest_step,
    load_divided_tree,
    remove_interrupted_saves,
)
from t0repro.training.loop import TrainingLoop
from t0repro.training.metrics import MetricLog, SplitMetrics, Writer
from t0repro.training.models import T5Model, is_own
from t0repro.training.optimizers import make_optimizer
from t0repro.training.progress_notes import last_evaluated
from t0repro.training.run_state import RecordRunState
from t0repro.training.schedules import Schedule, make_schedule
from t0repro.training.train_state import OpenTree, TrainState, from_flat_tree, new_train_state
from t0repro.training.trainer import BaseTrainer, NumpyBatch, PreemptionError
from t0repro.words import counted

Say = Callable[[str], None]


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
class _Run:
    """What is made of a run's configuration before its checkpoint is looked for.

    Attributes:
      initial_key: PRNG key of new parameters.
      dropout_key: PRNG key of dropout, into which each step is folded.
      seed: what the keys were made of.
      shapes: the train state's, divided among the devices if there are several.
    """

    config: RunConfig
    model: T5Model
    schedule: Schedule
    partitioning: Partitioning
    shapes: TrainState
    initial_key: jax.Array
    dropout_key: jax.Array
    seed: int


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where training starts.

    Attributes:
      state: the state; of new parameters only the shapes, since the step is compiled while they are
        drawn.
      step: its global step.
      checkpoint: the checkpoint in model_dir that it came from.
      is_new: whether its parameters are to be drawn.
    """

    state: TrainState
    step: int
    checkpoint: Path | None
    is_new: bool = False


def train(
    config: RunConfig,
    batches: Batches,
    *,
    restore_from: OpenTree | str | Path | None = None,
    seed: int = 0,
    actions: Sequence[Action] = (),
    writers: Sequence[Writer] = (),
    say: Say | None = None,
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
    run = _prepared(config, seed, say, planned or PlannedInputs())
    restoring = time.perf_counter()
    start = _start(run, restore_from, say)
    seconds = time.perf_counter() - restoring
    end_step = config.train_steps if config.plan is None else last_step(config, start.step)
    nothing = f"nothing to train: step {start.step:,}, train_steps {end_step:,}"
    if start.step >= end_step and not _still_evaluates(config, start, planned):
        say(nothing)
        return _values(run, start)

    microbatches = counted(config.num_microbatches, "microbatch", "microbatches")
    parts = f"{counted(config.batch_size, 'sequence')} in {microbatches}"
    say(f"train: steps {start.step:,} to {end_step:,}, a batch is {parts}")
    is_divided = _divide(batches, run, say)
    save_data = batches.save if isinstance(batches, BatchSource) else None
    beginning = Beginning(start.step, end_step, start.checkpoint, save_data)
    if not _saves(config):
        say("no checkpoint will be saved: utils.CheckpointConfig.save is None")
    # The last of the actions: it reports how long the others took to save.
    signals = StopOnSignal(say, _saves(config))
    loop = (
        _plain_loop(run, start, beginning, writers, [*actions, signals], say)
        if config.plan is None
        else _planned_loop(run, start, beginning, planned, [*actions, signals], say)
    )

    def open_batches() -> Iterable[NumpyBatch]:
        # Only here, for the step is being compiled beside this; and the data first, since the first
        # batch is made while parameters are drawn.
        opened = _opened(batches, start, say) if start.step < end_step else ()
        opened = _within(opened, config.model.vocab_size)
        initializing = time.perf_counter()
        if start.is_new:
            loop.trainer.train_state = _values(run, start)
        loop.trainer.train_metrics_manager.write_event(
            "timing/init_or_restore_seconds",
            seconds + time.perf_counter() - initializing,
            start.step,
        )
        # From here on a batch is whole, whoever made its rows.
        return map(functools.partial(_on_all_devices, run), opened) if is_divided else opened

    # Only of this project's own data are the shapes known before they are read.
    ahead = isinstance(batches, BatchSource) and start.step < end_step
    beside = compiled_beside(loop.trainer, config) if ahead else contextlib.nullcontext()
    done = _run_loop(loop, beside, open_batches, end_step - start.step, config, say)
    if start.step >= end_step:
        say(nothing)
    else:
        _say_how_it_ended(loop, end_step, done, signals, config, say)
    return loop.trainer.release()


def _still_evaluates(config: RunConfig, start: _Start, planned: PlannedInputs | None) -> bool:
    """Whether there is something to evaluate though every step is done."""
    plan = config.plan
    if plan is None or planned is None or not (planned.train_eval or planned.infer_eval):
        return False
    # The run died while it evaluated its last step.
    was_interrupted = (
        start.checkpoint is not None
        and bool(plan.eval_period)
        and from_first(lambda: last_evaluated(config.model_dir)) < start.step
    )
    return plan.run_eval_before_training or was_interrupted


# ---- Before the loop ----------------------------------------------------------------------------


def _prepared(config: RunConfig, seed: int, say: Say, planned: PlannedInputs) -> _Run:
    """The model, its optimizer and schedule, the keys and the devices."""
    if config.optimizer is None or config.schedule is None:
        raise UserError(
            "There is no optimizer or no learning-rate schedule.",
            where="utils.run",
            fix="Bind utils.run.optimizer and utils.run.learning_rate_schedule.",
        )
    plan, optimizer = config.plan, make_optimizer(config.optimizer)
    schedule = make_schedule(config.schedule)
    rows, where = config.batch_size // config.num_microbatches, config.provenance.get("layout")
    partitioning = choose(config.layout, config.model, rows=rows, where=where)
    config, why = decided(config, partitioning, memory_of(partitioning.mesh.devices.flat[0]))
    module = T5(config.model, config.dtypes)
    model = model_of(
        config,
        module,
        optimizer,
        vocabularies=planned.vocabularies,
        decoding=planned.decoding,
    )
    if plan is None:
        initial_key = jax.random.key(seed)
        # Fold in a constant, because parameters are drawn with the seed's key itself.
        dropout_key = jax.random.fold_in(initial_key, 1)
    else:
        seed = chosen_seed(plan, say)
        initial_key, dropout_key = keys(seed)
    # Shapes only: a restored run never allocates the parameters that it would throw away.
    shapes = jax.eval_shape(lambda: _fresh_state(model, initial_key))
    count = counted(count_parameters(shapes.params), "parameter")
    say(f"model: {count}, activations {config.dtypes.activation}")
    say(line_of(partitioning, config.layout))
    if why:
        say(why)
    shapes = partitioning.placed(shapes)
    return _Run(config, model, schedule, partitioning, shapes, initial_key, dropout_key, seed)


def _start(run: _Run, restore_from: OpenTree | str | Path | None, say: Say) -> _Start:
    """The state of the latest checkpoint, of `restore_from`, or of new parameters."""
    model_dir = Path(run.config.model_dir)
    # Now, rather than at the first save.
    check_is_no_pattern(model_dir, "Checkpoints")
    # Whoever starts training holds model_dir's lock, so these are leftovers of killed saves.
    remove_interrupted_saves(model_dir)
    found = from_first(lambda: latest_step(model_dir))
    checkpoint = None if found is None else checkpoint_path(model_dir, found)
    restore_from = restore_from if checkpoint is None else checkpoint
    if restore_from is None:
        say(f"start: new parameters from seed {run.seed}")
        return _Start(run.shapes, 0, None, is_new=True)
    where = "init_checkpoint"
    if isinstance(restore_from, str | Path):
        where, restore_from = str(restore_from), load_divided_tree(restore_from, run.shapes)
    state = from_flat_tree(restore_from, run.shapes, where=where)
    say(f"start: step {int(state.step):,} of {where}")
    return _Start(state, int(state.step), checkpoint)


def _values(run: _Run, start: _Start) -> TrainState:
    """The state that training starts from, with its values."""
    return _fresh_state(run.model, run.initial_key, start.state) if start.is_new else start.state


def _fresh_state(model: T5Model, key: jax.Array, like: TrainState | None = None) -> TrainState:
    """Parameters drawn from the key, zero slots, step 0; divided among devices as `like` is."""
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


def _opened(batches: Batches, start: _Start, say: Say) -> Iterable[NumpyBatch]:
    """The batches from where training continues."""
    if isinstance(batches, BatchSource):
        saved = None if start.checkpoint is None else data_folder(start.checkpoint)
        return batches.open(start.step, saved, say)
    return batches() if callable(batches) else batches


def _divide(batches: Batches, run: _Run, say: Say) -> bool:
    """Has each of several processes make the shards of its own rows; whether there are shards."""
    if is_alone() or not isinstance(batches, ShardedBatchSource) or batches.num_shards == 1:
        return False
    rows, count = run.config.batch_size, batches.num_shards
    here = {row // (rows // count) for row in run.partitioning.rows_here(rows)}
    batches.make_only(sorted(here))
    say(f"data: {count} shards, of which each process makes those of its rows, {len(here)} here")
    return True


def _on_all_devices(run: _Run, batch: NumpyBatch) -> Any:
    """A batch whose rows are divided among the processes' devices."""
    return run.partitioning.put_batch(run.model.features(batch))


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


# ---- The loop -----------------------------------------------------------------------------------


def _trainer(run: _Run, start: _Start, **options: Any) -> BaseTrainer:
    arguments = (run.config, run.model, start.state, run.partitioning, run.dropout_key)
    return trainer_of(*arguments, run.schedule, **options)


def _plain_loop(
    run: _Run,
    start: _Start,
    beginning: Beginning,
    writers: Sequence[Writer],
    actions: Sequence[Action],
    say: Say,
) -> TrainingLoop:
    """Mesh TensorFlow's kind of training: a line for every step, and checkpoints."""
    config, model_dir = run.config, Path(run.config.model_dir)
    written = output_folder(model_dir)
    period, keep = config.save_checkpoints_steps, config.keep_checkpoint_max
    return TrainingLoop(
        _trainer(run, start),
        log=MetricLog(written, start.step, writers),
        actions=[
            ShowProgress(),
            RecordRunState(written),
            SaveCheckpoints(model_dir, period, keep, beginning.save_data, say=say),
            *actions,
        ],
        may_be_nan=may_be_nan(config),
        start_step=start.step,
    )


def _planned_loop(
    run: _Run,
    start: _Start,
    beginning: Beginning,
    inputs: PlannedInputs | None,
    actions: Sequence[Action],
    say: Say,
) -> TrainingLoop:
    """T5X's kind of training, with summaries and evaluations."""
    config, inputs = run.config, inputs or PlannedInputs()
    plan, written = config.plan, output_folder(Path(config.model_dir))
    assert plan is not None
    # Only a held update leaves the state that explains it, and nothing must follow it.
    holds = stops_on_nan(plan)
    evaluated = from_first(lambda: last_evaluated(config.model_dir))
    files = SplitMetrics(written, start.step, inputs.open_writer, evaluated)
    names = list(inputs.train_eval)
    trainer = _trainer(run, start, eval_names=names, files=files, hold_if_not_finite=holds)
    standard = planned_actions(config, inputs, files, beginning, say)
    return TrainingLoop(
        trainer,
        files=files,
        actions=[ShowProgress(), RecordRunState(written), *standard, *actions],
        may_be_nan=may_be_nan(config),
        start_step=start.step,
        synchronous=holds,
    )


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
        raise StoppedBySignal(signal.SIGTERM, _saves(config)) from error
    except KeyboardInterrupt:  # the second Ctrl-C
        say(f"stopped at once, without saving: {_goes_on(config)}")
        raise


def _saves(config: RunConfig) -> bool:
    """Whether the training saves checkpoints; one of T5X's kind need not."""
    return config.plan is None or config.plan.save is not None


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
        if _saves(config):
            say(f"stopped by a signal: the same command continues from {saved}")
        else:
            say(f"stopped by a signal, without saving: {_goes_on(config)}")
        raise StoppedBySignal(signals.received, _saves(config))
    if not done and loop.stop_reason is None:
        data = config.train_data
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


def _data_of(data: TrainDataConfig) -> str:
    return f"{data.mixture_or_task_name}, split {data.split!r}"
