"""The state that a training run starts from, and what follows from its seed."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import NamedSharding

from t0repro import storage
from t0repro.adapters import LORA_B
from t0repro.config.optimizer import AdafactorConfig
from t0repro.config.run import TrainingPlan, TrainRun
from t0repro.converters import finding, sources
from t0repro.converters.adapter_files import (
    AdapterNote,
)
from t0repro.converters.tensors import FlatTree
from t0repro.errors import UserError
from t0repro.model.t5 import initial_adapter, initial_parameters
from t0repro.partitioning.devices import put
from t0repro.partitioning.processes import broadcast_from_first
from t0repro.progress import say
from t0repro.storage.names import check_is_no_pattern
from t0repro.training.checkpoint_retention import remove_interrupted_saves
from t0repro.training.checkpoints import (
    checkpoint_path,
    data_folder,
    latest_step,
    load_sharded_tree,
    load_tree,
)
from t0repro.training.models import is_builtin
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import (
    OpenTree,
    TrainState,
    base_parameters,
    from_flat_tree,
    new_train_state,
    to_flat_tree,
)

# A tree; the path of a JAX checkpoint; or a function that returns a tree or None, given one that
# makes the tree of a new state.
RestoreFrom = OpenTree | str | Path | Callable[[Callable[[], FlatTree]], OpenTree | None] | None


@dataclasses.dataclass(frozen=True)
class Start:
    """Where training starts.

    Attributes:
      state: The state; before initialization only the shapes of its parameters, since the step is
        compiled meanwhile.
      step: Its global step.
      checkpoint: The checkpoint in model_dir that it came from.
      data: That checkpoint's folder for the position in the data, if it has one.
      is_new: Whether its parameters are to be initialized.
      note: Writes what a checkpoint says besides its arrays into its folder.
    """

    state: TrainState
    step: int
    checkpoint: Path | None = None
    data: Path | None = None
    is_new: bool = False
    note: Callable[[Path], None] | None = None


def restore_or_create(
    config: TrainRun,
    shapes: TrainState,
    fresh: Callable[[], TrainState],
    restore_from: RestoreFrom,
) -> Start:
    """The state of model_dir's latest checkpoint, or that of another checkpoint, or a new one.

    A run that trains an adapter reads its base in any case. Its state is that of its latest
    checkpoint, of another run's adapter, or of a new adapter.

    Args:
      config: The run.
      shapes: The state's shapes, with their shardings if there are several devices.
      fresh: Makes a newly initialized state, for whatever is not restored.
      restore_from: The other checkpoint; see `t0repro.runs.train.train`.

    Raises:
      UserError: If a checkpoint is damaged, or does not fit the run.
    """
    model_dir = os.fspath(config.model_dir)
    # Check now rather than at the first save.
    check_is_no_pattern(model_dir, "Checkpoints")
    # The process that trains holds model_dir's lock, so these are leftovers of killed saves.
    remove_interrupted_saves(model_dir)
    step, start = broadcast_from_first(lambda: latest_step(model_dir)), None
    if step is not None:
        path = checkpoint_path(model_dir, step)
        start = _restore(path, shapes)
        start = dataclasses.replace(start, checkpoint=path, data=data_folder(path))
    if start is not None and config.model.adapter is None:
        return start
    tree = restore_from
    if callable(tree):
        tree = tree(lambda: to_flat_tree(fresh()))
    if config.model.adapter is not None:
        return _start_adapter(config, shapes, fresh, tree, start)
    if tree is None:
        return Start(shapes, 0, is_new=True)
    restore = config.plan.restore
    return _restore(tree, shapes, str(restore.path) if restore else "init_checkpoint")


def _restore(tree: OpenTree | str | Path, shapes: TrainState, where: str = "") -> Start:
    if isinstance(tree, str | os.PathLike):
        where, tree = str(tree), load_sharded_tree(tree, shapes)
    state = from_flat_tree(tree, shapes, where=where)
    say(f"start: step {int(state.step):,} of {where}")
    return Start(state, int(state.step))


def new_state(model: T5Model, key: jax.Array, like: TrainState | None = None) -> TrainState:
    """Parameters initialized from the key, zero slots, step 0; sharded across devices as `like`."""
    assert model.optimizer_def is not None
    if is_builtin(model) and model.module.config.adapter is not None:
        return new_train_state(initial_adapter(model.module, key), model.optimizer_def)
    if like is None or not isinstance(like.step.sharding, NamedSharding):
        return TrainState.create(model.optimizer_def, model.get_initial_variables(key, {}))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    if not is_builtin(model):
        # Under jit, so that no device has to hold a user's model alone.
        return jax.jit(lambda key: new_state(model, key), out_shardings=shardings)(key)
    params = initial_parameters(model.module, key, shardings.params)
    # Under jit each device makes its own part of the slots.
    make = functools.partial(new_train_state, optimizer=model.optimizer_def)
    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)


def choose_seed(plan: TrainingPlan) -> int:
    """The plan's seed, or one taken from the clock, with a message."""
    if plan.random_seed is not None:
        return plan.random_seed
    # One process's clock sets the seed: all processes must initialize the same parameters.
    seed = broadcast_from_first(lambda: int(time.time()))
    say(f"seed: {seed}, because random_seed is None")
    return seed


def make_keys(seed: int, how: Literal["split", "folded"]) -> tuple[jax.Array, jax.Array]:
    """The PRNG keys of the initial parameters and of dropout; see `TrainingPlan.keys`."""
    if how == "folded":
        initial = jax.random.key(seed)
        # Fold in a constant, because parameters are initialized with the seed's key itself.
        return initial, jax.random.fold_in(initial, 1)
    initial, training = jax.random.split(jax.random.PRNGKey(seed))
    return initial, training


def _start_adapter(
    config: TrainRun,
    shapes: TrainState,
    fresh: Callable[[], TrainState],
    tree: OpenTree | str | Path | None,
    start: Start | None,
) -> Start:
    """Where the training of an adapter starts.

    Args:
      config: The run.
      shapes: See `restore_or_create`.
      fresh: See `restore_or_create`.
      tree: The base, or the path of its JAX checkpoint.
      start: The adapter's latest checkpoint in model_dir, if there is one.

    Raises:
      UserError: If nothing names the base, it is not the configured model's, or the adapter was
        trained on another.
    """
    adapter, restore = config.model.adapter, config.plan.restore
    assert adapter is not None
    if tree is None:
        raise UserError(
            "An adapter is trained on a base, and nothing names one.",
            where=config.provenance.get("model.adapter"),
            fix="Bind utils.run.init_checkpoint to a checkpoint in any format.",
        )
    where = "init_checkpoint"
    if isinstance(tree, str | os.PathLike):
        where, tree = os.fspath(tree), load_tree(tree)
    elif restore is not None:
        # The checkpoint itself: another may become the latest of its folder.
        where = finding.find_checkpoint(str(restore.path)).path
    where = storage.absolute(where)
    base, digest = base_parameters(tree, shapes.frozen, where)
    note = AdapterNote(adapter, where, digest)
    if start is not None:
        assert start.checkpoint is not None
        AdapterNote.read(start.checkpoint).check_base(digest, where)
    elif restore is not None and restore.adapter is not None:
        tree = sources.read_adapter(restore.adapter, adapter, config.model.shape, digest, where)
        start = _restore(tree, shapes, "the restored adapter")
    say(f"base: {where}, frozen, in {adapter.base_dtype}, of hash {digest}")
    if start is None:
        # Small, so it is made at once rather than while the step is compiled.
        start = Start(fresh(), 0)
        say("start: a new adapter")
        if adapter.kind == "lora":
            _warn_of_parameter_scale(config.optimizer)
        if isinstance(shapes.step.sharding, NamedSharding):
            places = jax.tree.map(lambda leaf: leaf.sharding, shapes.replace(frozen=None))
            start = dataclasses.replace(start, state=jax.tree.map(put, start.state, places))
    return dataclasses.replace(start, state=start.state.replace(frozen=base), note=note.write)


def _warn_of_parameter_scale(optimizer: object) -> None:
    """Says that LoRA's `lora_b` hardly moves if its updates are in proportion to its size."""
    scaled = isinstance(optimizer, AdafactorConfig) and optimizer.multiply_by_parameter_scale
    if scaled and not any(path.endswith(LORA_B) for path in optimizer.exclude_from_parameter_scale):
        say(
            f"note: {LORA_B} starts at zero, and Adafactor's updates are in proportion to a"
            " parameter's size, so that it moves about 1,000 times too slowly. Bind"
            " AdafactorOptimizer.multiply_by_parameter_scale = False (T5X: adafactor.Adafactor)."
        )
