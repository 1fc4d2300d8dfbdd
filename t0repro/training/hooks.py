"""What happens between training steps: saving, stopping on a signal, the progress line.

And, where an update is NaN or Inf, the report of it, which `t0repro replay` reruns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import flax.linen
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from t0repro.adapters import joined
from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import SaveConfig
from t0repro.converters import sources
from t0repro.converters.adapter_files import AdapterNote
from t0repro.errors import UserError
from t0repro.files import atomic_directory, output_path
from t0repro.model.t5 import T5, adapter_shapes, frozen_shapes, own_features, parameter_shapes
from t0repro.model.towers import by_layer, rows, stacks_in
from t0repro.partitioning.devices import fetched
from t0repro.partitioning.processes import SharedSignal, from_first, is_alone, is_first
from t0repro.progress import say, working
from t0repro.training.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    load_tree,
    metric_by_step,
    remove_superfluous,
    start_checkpoint,
)
from t0repro.training.metrics import StepMetrics, step_line
from t0repro.training.models import T5Model, model_of
from t0repro.training.train_state import TrainState, base_parameters, parameters_from_flat_tree
from t0repro.training.train_step import microbatch_keys, parameters_of, split_into_microbatches
from t0repro.words import without_passwords

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from t0repro.training.loop import RunProgress, TrainingLoop
    from t0repro.training.trainer import NumpyBatch


# Seconds from a preemption notice until the machine is gone. Google Cloud's preemptible machines
# get no more; Kubernetes pods get this by default.
NOTICE_SECONDS = 30.0


class Hook:
    """Something that a TrainingLoop does between steps; methods do nothing unless overridden."""

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Called when training starts, with the global step at which it will end."""

    def before_first_step(self, loop: TrainingLoop) -> None:
        """Called when the first batch has been read, before its update is compiled."""

    def after_step(self, loop: TrainingLoop) -> None:
        """Called after each update, while the device may still be computing it."""

    def is_due(self, step: int) -> bool:
        """Whether `after_step` has work after this step, which a call of `train` must not pass."""
        del step
        return False

    def after_train(self, summary: concurrent.futures.Future) -> None:
        """Called with what a trainer's own `train` returned, before its last `after_step`."""

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Called with each step's metrics once they have been read, one step late."""

    def on_bad_update(self, loop: TrainingLoop, batch: NumpyBatch, metrics: StepMetrics) -> None:
        """Called when an update was held back because its loss or a gradient is NaN or Inf.

        The state is the one before the update.
        """

    def wait(self) -> None:
        """Waits for the hook's background work and raises its error."""

    def finish(self, loop: TrainingLoop) -> None:
        """Called after the last step unless an exception ended training: completes pending work."""

    def end(self, loop: TrainingLoop) -> None:
        """Called when training has ended, even by an exception: undoes what `start` set up."""


class SaveCheckpoints(Hook):
    """Saves the state as often as the rules say, and after the last step.

    A step waits only until the state is copied to the host; a thread writes the copy, one at a
    time. An error of that thread, such as a full disk, ends training: it is raised after the next
    step, before the next save or at the end, whichever comes first.

    Args:
      model_dir: where checkpoint_<step> directories are written.
      save: when to save, in which dtype, and what to keep. (Pinned checkpoints, which have a file
        `PINNED`, are kept whatever this says.)
      save_data: writes the position in the data into a folder of the checkpoint.
      progress: gives the step at which the run first began, and notes for the checkpoint; None if
        periods do not count from there.
      note: writes a further file into a checkpoint's folder.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        save: SaveConfig,
        save_data: Callable[[Path], None] | None = None,
        *,
        progress: RunProgress | None = None,
        note: Callable[[Path], None] | None = None,
    ):
        self._model_dir, self._rules, self._note = model_dir, save, note
        self._progress = progress if save.from_first_step else None
        self._save_data = save_data
        self._is_slow = False
        self._first = self._saved = self._last = 0
        self._writing: concurrent.futures.Future[None] | None = None
        self._started_at = 0.0
        self._ended_at: float | None = None

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Saves the initial state of a new run, if the folder has no checkpoint of it yet."""
        self._first = self._saved = loop.step
        self._last, self._loop = last_step, loop
        if self._progress is None:
            return
        self._first = self._progress.first_step
        steps = from_first(lambda: list_checkpoints(self._model_dir))
        if self._rules.period and loop.step not in steps:
            self._save(loop)

    def after_step(self, loop: TrainingLoop) -> None:
        """Saves if a checkpoint is due, after writing the metrics of all steps so far."""
        # Raises the error of a save that failed, such as a full disk, now and not at the next save.
        if self._writing is not None and self._writing.done():
            self.wait()
        if self.is_due(loop.step):
            self._save(loop)

    def wait(self) -> None:
        """Waits until the checkpoint being written is complete."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()
            seconds = (self._ended_at or time.monotonic()) - self._started_at
            manager = self._loop.trainer.train_metrics_manager
            manager.write_event("timing/checkpoint_seconds", seconds, self._saved)

    def finish(self, loop: TrainingLoop) -> None:
        """Saves if training ended before its last step, and waits until that is done."""
        if loop.step > self._saved:
            self._save(loop)
        self.wait()

    def end(self, loop: TrainingLoop) -> None:
        """Waits after an exception too, so that no save continues while the next run starts."""
        self.wait()

    def is_due(self, step: int) -> bool:
        """Whether the rules save this step."""
        period = self._rules.period
        due = period and ((step - self._first) % period == 0 or step == self._last)
        return bool(due) or step in self._rules.steps

    def _save(self, loop: TrainingLoop) -> None:
        # Metrics first: a checkpoint on disk then implies the metrics of all its steps.
        loop.flush()
        self.wait()
        self._started_at, self._ended_at = time.monotonic(), None
        self._saved = loop.step
        self._writing = self._started(loop.held_state)
        self._writing.add_done_callback(lambda _: self._note_end())

    def _note_end(self) -> None:
        """Warns once if a save takes longer than a preempted machine has left."""
        self._ended_at = time.monotonic()
        seconds = self._ended_at - self._started_at
        if seconds > NOTICE_SECONDS and not self._is_slow:
            self._is_slow = True
            say(
                f"warning: a save takes {seconds:.0f} s; a machine that is preempted"
                f" {NOTICE_SECONDS:.0f} s after the notice would lose the steps since the"
                " previous checkpoint"
            )

    def _started(self, state: TrainState) -> concurrent.futures.Future[None]:
        model_dir, rules = self._model_dir, self._rules
        # Read the metrics now: an evaluation may add to them while the checkpoint is written.
        values = metric_by_step(model_dir, rules.best.metric) if rules.best else {}
        return start_checkpoint(
            model_dir,
            state,
            save_data=self._save_data,
            save_notes=self._save_notes,
            dtype=rules.dtype,
            then=lambda: remove_superfluous(model_dir, rules, values),
        )

    def _save_notes(self, folder: Path) -> None:
        if self._progress is not None:
            self._progress.save(folder)
        if self._note is not None:
            self._note(folder)


class StoppedBySignal(SystemExit):
    """A signal ended training early, after a save if the run saves checkpoints.

    The exit code is 130 for Ctrl-C (SIGINT), and PREEMPTED for SIGTERM and for a notice that the
    machine is about to be preempted: nothing is wrong, and the same command continues. Where
    nothing was saved it would start over, and the code is 143 as for any process that SIGTERM ends.
    """

    def __init__(self, number: int, saved: bool = True):
        shell = number == signal.SIGINT or not saved
        super().__init__(128 + number if shell else PREEMPTED)


# sysexits.h's EX_TEMPFAIL, "try again later". A shell reports 143 for a process that SIGTERM ended
# at once, without a save.
PREEMPTED = 75


class StopOnSignal(Hook):
    """Ends training after the step in which SIGTERM or SIGINT arrives, so that it is saved.

    A second signal has its usual effect. With several processes, all end after the same step. So
    they do when jax itself reports that one of their machines is about to be preempted.

    Args:
      saves: whether the run saves checkpoints at all.

    Attributes:
      received: the number of the signal that ended training, or None.
    """

    def __init__(self, saves: bool = True):
        self._saves = saves
        self.received: int | None = None
        self._noted: int | None = None
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}
        self._shared: SharedSignal | None = None

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Installs the signal handlers; Python allows that only in the main thread."""
        del loop, last_step
        self._shared = None if is_alone() else SharedSignal()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # Keep the caller's own handlers, to restore them later.
                self._before[number] = signal.signal(number, self._note)

    def after_step(self, loop: TrainingLoop) -> None:
        """Asks the loop to stop if a signal has come, to any of the processes."""
        if self._shared is not None:
            # Every process must call this at every step; it is true at the one step they agree on.
            if _jax_agreed_to_end(loop.step) and self._noted is None:
                self._noted, self._noted_at = signal.SIGTERM, time.monotonic()
                say("stopping: jax reported that a machine is about to be preempted")
            self.received = self._shared.after_step(self._noted or 0) or None
        else:
            self.received = self._noted
        if self.received is not None:
            loop.stop(f"a signal, {signal.Signals(self.received).name}")

    def end(self, loop: TrainingLoop) -> None:
        """Restores the previous signal handlers."""
        self._restore()
        if self._noted is not None and self._saves and not loop.failed:
            seconds = time.monotonic() - self._noted_at
            late = f", more than the {NOTICE_SECONDS:.0f} s that a preempted machine gets"
            say(f"saved {seconds:.1f} s after the signal{late if seconds > NOTICE_SECONDS else ''}")

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self._noted, self._noted_at = number, time.monotonic()
        # Restore now, so that a second signal interrupts the step.
        self._restore()
        again = " (Ctrl-C again stops at once)" if number == signal.SIGINT else ""
        saved = " and saved" if self._saves else ""
        # A signal may come in the middle of a line, and Python writes no line within another.
        with contextlib.suppress(RuntimeError):
            say(f"stopping: the current step is finished{saved} first{again}")

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


def _jax_agreed_to_end(step: int) -> bool:
    """Whether jax's processes agreed to end at this step; False if jax's service for it is off."""
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # jax's service for it is switched off
        return False


class ShowProgress(Hook):
    """Shows a live line on a terminal, and elsewhere prints a line every few seconds.

    Until the first step's metrics arrive, it shows that the step is being compiled.

    Each line has the step, the loss per target token, examples and target tokens per second over
    the latest steps, and the time left.

    Args:
      interval: seconds between lines when there is no terminal.
      stream: where to write; defaults to standard error.
    """

    def __init__(self, interval: float = 5.0, stream: TextIO | None = None):
        self._interval = interval
        self._stream = stream or sys.stderr
        self._recent: deque[StepMetrics] = deque(maxlen=20)
        self._bar: Bar | None = None
        self._compiling = contextlib.ExitStack()
        self._first = self._last = 0
        self._shown_at = 0.0

    def start(self, loop: TrainingLoop, last_step: int) -> None:
        """Opens the live line if the stream is a terminal."""
        self._first, self._last = loop.step, last_step
        self._shown_at = time.monotonic()
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
            # Without a total the bar moves to and fro.
            self._bar.add_task("compiling the train step", total=None)

    def before_first_step(self, loop: TrainingLoop) -> None:
        """Says, where there is no bar, that the step is being compiled."""
        if self._bar is None:
            self._compiling.enter_context(working("compiling the train step", self._stream))

    def on_metrics(self, metrics: StepMetrics) -> None:
        """Shows the step: always on a terminal, otherwise if the last line is old enough."""
        self._recent.append(metrics)
        self._compiling.close()
        if self._bar is not None:
            done, total = metrics.step - self._first, self._last - self._first
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total, description=self._text())
        elif time.monotonic() - self._shown_at >= self._interval or metrics.step == self._last:
            self._shown_at = time.monotonic()
            print(self._text(self._seconds_left()), file=self._stream, flush=True)

    def end(self, loop: TrainingLoop) -> None:
        """Closes the live line and prints its last state."""
        self._compiling.close()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            if self._recent:
                print(self._text(), file=self._stream, flush=True)

    def _text(self, seconds_left: float | None = None) -> str:
        latest = self._recent[-1]
        # If no time was measured, infinity makes the speed 0 and avoids a division by zero.
        seconds = sum(row.seconds for row in self._recent) or float("inf")
        examples = sum(row.examples for row in self._recent) / seconds
        tokens = sum(row.target_tokens for row in self._recent) / seconds
        per_token = latest.loss_per_target_token
        return step_line(
            latest.step, self._last, per_token, latest.loss, (examples, tokens), seconds_left
        )

    def _seconds_left(self) -> float:
        per_step = sum(row.seconds for row in self._recent) / len(self._recent)
        return (self._last - self._recent[-1].step) * per_step


# ---- An update whose loss or gradient is NaN or Inf: the tensor that went bad first, and a replay
#
# `bad_update_<step>/` in a run's folder holds what reproduces the update: the batch, the dropout
# key, and the run's configuration. The state is the checkpoint of the step before. `t0repro replay`
# reruns the update.

BATCH_FILE, NOTES_FILE = "batch.npz", "update.json"


@dataclasses.dataclass(frozen=True)
class BadTensor:
    """The first tensor of an update that is NaN or Inf.

    Attributes:
      kind: "parameter", "activation", "loss" or "gradient".
      name: its path.
      microbatch: the microbatch that it belongs to; None for a parameter.
      bad: how many of its entries are NaN or infinite.
      size: number of its entries.
    """

    kind: str
    name: str
    microbatch: int | None
    bad: int
    size: int

    def __str__(self) -> str:
        place = "" if self.microbatch is None else f" in microbatch {self.microbatch}"
        return f"the {self.kind} {self.name}{place}: {self.bad:,} of {self.size:,} are NaN or Inf"


class ReportBadUpdate(Hook):
    """Stops at an update that was held back, names the tensor, and saves what reproduces it.

    List it after the hook that saves checkpoints, whose checkpoint of this step is then used.

    Args:
      config: the run's configuration.
      note: as that of SaveCheckpoints.
    """

    def __init__(self, config: RunConfig, note: Callable[[Path], None] | None = None):
        self._config, self._note, self._is_reported = config, note, False

    def on_bad_update(self, loop: TrainingLoop, batch: NumpyBatch, metrics: StepMetrics) -> None:
        """Writes the folder and stops."""
        model_dir, trainer = output_path(self._config.model_dir), loop.trainer
        model = trainer.model
        assert isinstance(model, T5Model)
        key, count = trainer.step_rng(loop.step), self._config.num_microbatches
        features = {name: fetched(x) for name, x in model.features(batch).items()}
        bad = first_bad_tensor(model, parameters_of(model, loop.held_state), features, key, count)
        folder = model_dir / f"bad_update_{metrics.step}"
        if is_first() and not folder.exists():
            write_bad_update(folder, self._config, loop.step, features, key)
        nothing = "loss and gradients are finite when recomputed: the optimizer overflowed"
        what = nothing if bad is None else str(bad)
        say(f"step {metrics.step} was skipped: {what}; `t0repro replay {folder}` reproduces it")
        loop.stop(f"step {metrics.step} is NaN or Inf: {what}")
        self._is_reported = True

    def finish(self, loop: TrainingLoop) -> None:
        """Saves the state for the replay unless a checkpoint of this step exists already."""
        path = checkpoint_path(self._config.model_dir, loop.step)
        # One process decides, because a save needs all of them.
        if self._is_reported and not from_first(path.exists):
            start_checkpoint(
                self._config.model_dir, loop.held_state, save_notes=self._note
            ).result()


def write_bad_update(
    folder: Path, config: RunConfig, step: int, batch: Mapping[str, np.ndarray], key: jax.Array
) -> None:
    """Writes what is needed to reproduce an update.

    Args:
      folder: must not exist; it appears once it is complete.
      config: the run.
      step: the global step before the update, whose checkpoint is in config.model_dir.
      batch: the features that the model reads.
      key: the step's PRNG key.
    """
    # T5X's keys (PRNGKey) are bare words already; those of jax.random.key wrap them.
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if typed else key
    notes = {
        "step": step,
        "key": np.asarray(data).tolist(),
        "config": json.loads(without_passwords(config.to_json())),
    }
    with atomic_directory(folder) as temporary:
        arrays: dict[str, Any] = dict(batch)
        np.savez(temporary / BATCH_FILE, **arrays)
        (temporary / NOTES_FILE).write_text(json.dumps(notes, indent=1))


def replay(folder: str | os.PathLike[str]) -> BadTensor | None:
    """Recomputes a bad update from its folder; None if every tensor is finite this time.

    Raises:
      UserError: if the folder or the checkpoint is missing.
    """
    folder = Path(folder)
    try:
        notes = json.loads((folder / NOTES_FILE).read_text())
        with np.load(folder / BATCH_FILE, allow_pickle=False) as arrays:
            batch = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise UserError(
            f"This is not a bad_update folder: {error}.",
            where=str(folder),
            fix="Name a bad_update_<step> folder, which TerminateOnNanAction writes.",
        ) from error
    config = RunConfig.from_json(json.dumps(notes["config"]), where=str(folder / NOTES_FILE))
    module = T5(config.model, config.dtypes)
    # The checkpoint is beside the folder, even if the run was moved.
    path = checkpoint_path(folder.parent, notes["step"])
    like, base = parameter_shapes(module), None
    if config.model.adapter is not None:
        like, base = adapter_shapes(module), AdapterNote.read(path)
    params = parameters_from_flat_tree(load_tree(path), like, where=str(path))
    if base is not None:
        assert config.model.adapter is not None
        tree = sources.open_any(base.base, slots=False)
        frozen, digest = base_parameters(tree, frozen_shapes(module), base.base)
        base.check_base(digest, base.base)
        params = joined(frozen, params, config.model.adapter.scale)
    key = jnp.asarray(notes["key"], jnp.uint32)
    model = model_of(module, user_class=config.plan.user_classes.get("model"))
    return first_bad_tensor(model, params, batch, key, config.num_microbatches)


def first_bad_tensor(
    model: T5Model,
    params: Any,
    batch: Mapping[str, np.ndarray],
    key: jax.Array,
    num_microbatches: int,
) -> BadTensor | None:
    """The first tensor of an update that is NaN or Inf.

    Searches the parameters; then, for each microbatch, the activations in the order in which they
    are computed, the loss, and the gradients in the order in which the backward pass finishes them.

    Args:
      model: the model.
      params: parameters before the update, by layer or stacked.
      batch: the features that the model reads.
      key: the step's PRNG key.
      num_microbatches: number of equal parts into which the batch is split.
    """
    for name, value in _flat(params).items():
        bad = _bad("parameter", name, None, value)
        if bad is not None:
            return bad
    whole, loss_fn = model.whole_batch({name: jnp.asarray(x) for name, x in batch.items()})
    parts, keys = split_into_microbatches(whole, num_microbatches), microbatch_keys(key)
    backward = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    for index in range(num_microbatches):
        part = {name: x[index] for name, x in parts.items()}
        for kind, name, value in _computed(model, backward, params, part, keys(index)):
            bad = _bad(kind, name, index, value)
            if bad is not None:
                return bad
    return None


def _computed(
    model: T5Model, backward: Callable, params: Any, part: Mapping[str, jax.Array], key: Any
) -> Iterator[tuple[str, str, Any]]:
    """(kind, name, value) of activations as computed, of the loss, and of gradients by path.

    The backward pass runs only after the caller has consumed the last activation.
    """
    dropout = model.module.config.draws_dropout
    activations: list[tuple[str, str, Any]] = []

    def record(function: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        result = function(*args, **kwargs)
        name = "/".join(context.module.path) or "logits"
        # Inside a scan over layers, values are still tracers: only the scan's result is checked.
        values = [x for x in jax.tree.leaves(result) if not isinstance(x, jax.core.Tracer)]
        if context.method_name == "__call__":
            activations.extend(("activation", name, value) for value in values)
        return result

    # Record calls in order; the intermediates that flax captures do not keep it.
    with flax.linen.intercept_methods(record):
        model.module.apply(
            {"params": params},
            own_features(part),
            deterministic=not dropout,
            rngs={"dropout": key} if dropout else {},
        )
    yield from activations
    (loss, _), gradients = backward(params, part, key)
    yield "loss", "loss", loss
    order = _backward_order(gradients := _flat(gradients), [name for _, name, _ in activations])
    yield from (("gradient", name, gradients[name]) for name in order)


def _backward_order(parameters: Iterable[str], calls: Sequence[str]) -> list[str]:
    """Parameters in the order in which the backward pass finishes their gradients.

    Args:
      parameters: names.
      calls: names of the modules in the order of their calls.
    """
    # The embedding is called again for the logits, but its gradient is complete only once the
    # backward pass reaches its first call.
    first = {name: place for place, name in reversed(list(enumerate(calls)))}

    def place(parameter: str) -> int:
        path = parameter.split("/")
        around = ("/".join(path[:length]) for length in range(len(path), 0, -1))
        return next((first[name] for name in around if name in first), -1)

    return sorted(parameters, key=place, reverse=True)


def _flat(tree: Any) -> dict[str, Any]:
    """Parameters or their gradients by name; stacked layers are copied to the host first."""

    def on_host(stack: jax.Array) -> list[np.ndarray]:
        return [fetched(layer) for layer in rows(stack)]

    tree = by_layer(tree, stacks_in(tree), on_host)
    return flax.traverse_util.flatten_dict(tree, sep="/")


def _bad(kind: str, name: str, microbatch: int | None, value: Any) -> BadTensor | None:
    # All processes check the same tensors, so they can gather one that is sharded across them.
    whole = fetched(value) if isinstance(value, jax.Array) else value
    # bfloat16 widens to float32 exactly, NaN and infinity included.
    array = np.asarray(whole, np.float32)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    return BadTensor(kind, name, microbatch, bad, array.size) if bad else None
