"""How a training run starts: in a locked folder that fits it, with its state, step and batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding

from t0repro.config.run_config import OptaxConfig, RunConfig
from t0repro.config.training_plan import TrainingPlan
from t0repro.converters import sources, storage
from t0repro.converters.adapter_files import (
    AdapterNote,
    AdapterReader,
    is_adapter,
)
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, FlatTree, differing_shapes
from t0repro.errors import UserError, of_command
from t0repro.files import check_is_no_pattern, folder_lock, output_path, write_atomically, writing
from t0repro.model.t5 import initial_adapter, initial_parameters
from t0repro.parameters import naming
from t0repro.parameters.shape import ALL_HEURISTIC
from t0repro.partitioning.devices import Partitioning, put
from t0repro.partitioning.processes import from_first, held_by_first, is_alone, is_first
from t0repro.progress import say
from t0repro.training.checkpoints import (
    checkpoint_path,
    data_folder,
    latest_step,
    load_sharded_tree,
    load_tree,
    remove_interrupted_saves,
)
from t0repro.training.models import T5Model, is_own
from t0repro.training.train_state import (
    OpenTree,
    TrainState,
    base_parameters,
    check_parameters,
    flat_slots,
    from_flat_tree,
    new_train_state,
    to_flat_tree,
)
from t0repro.training.trainer import NumpyBatch

# ---- What a model_dir holds, which must fit the run that is about to train in it -----------------
#
# Training that continues from the wrong state does not fail by itself: Mesh TensorFlow starts at
# step 0 beside the JAX stack's checkpoints, which it does not see; slots of another optimizer
# become zeros; swapping two activations leaves the parameters' names and shapes the same. Both
# backends train inside `locked_for_training`, which reports each of these before anything is
# restored or written.
#
# `trained_with.json` in model_dir records the settings of the last training there. Without it, for
# instance if another program wrote the checkpoint, only what the tensors show can be checked.

Backend = Literal["mtf", "jax"]

RECORD = "trained_with.json"
# Fields of ModelConfig that may change between runs in a folder: they concern only the loss,
# dropout or memory use, and `norm_names` only a spelling.
_MAY_CHANGE = frozenset(
    ["dropout_rate", "label_smoothing", "z_loss", "loss_denominator", "recompute"]
    + ["scan_layers", "loss_on_targets_only", "norm_names", "choice_loss"]
)


@contextlib.contextmanager
def locked_for_training(
    model_dir: str | os.PathLike[str],
    backend: Backend,
    config: RunConfig | None,
    *,
    allow_changed: bool = False,
) -> Iterator[Callable[[TrainState | None], None]]:
    """Locks model_dir while training, after checking what it holds.

    Yields the last check, to be called with the shapes of the state that is about to be trained, or
    None if they are not known: the checkpoint must have that state's slots. Then the check records
    the run's settings.

    Args:
      model_dir: a folder or an address; created if it does not exist.
      backend: see `check_model_dir`.
      config: see `check_model_dir`; None records nothing.
      allow_changed: see `check_model_dir`.

    Raises:
      UserError: if another run holds the folder, or if a check raises one.
    """
    reader: CheckpointReader | None = None

    @contextlib.contextmanager
    def checked() -> Iterator[None]:
        nonlocal reader
        fix = f"Wait for it to end, or train in another {of_command('--model_dir', 'MODEL_DIR')}."
        with folder_lock(output_path(model_dir), "training", fix=fix):
            reader = check_model_dir(model_dir, backend, config, allow_changed=allow_changed)
            yield

    def check(shapes: TrainState | None) -> None:
        if config is None or not is_first():
            return
        if reader is not None and shapes is not None and not allow_changed:
            check_slots(reader, shapes)
        # Only now: a refused run must leave the record of what trained the checkpoints.
        with writing(output_path(model_dir) / RECORD):
            settings = json.dumps(_settings(config), indent=1)
            write_atomically(output_path(model_dir) / RECORD, settings + "\n")

    with held_by_first(checked):
        yield check


def check_model_dir(
    model_dir: str | os.PathLike[str],
    backend: Backend,
    config: RunConfig | None,
    *,
    allow_changed: bool = False,
) -> CheckpointReader | None:
    """Checks that training can continue from model_dir's checkpoints, except for their slots.

    Args:
      model_dir: the run's folder; it need not exist.
      backend: the stack that is about to train.
      config: the configuration of the run about to train; None for one that only Mesh TensorFlow
        supports, which cannot be compared here.
      allow_changed: accept another optimizer, other settings or a renamed checkpoint. Checkpoints
        of the other stack or of another model are refused even so: training cannot read them.

    Returns:
      The latest checkpoint, for `check_slots`; None if there is none, or none that can be compared.

    Raises:
      UserError: if something does not fit; the message says what.
    """
    refs = sources.list_checkpoints(model_dir) if storage.is_directory(os.fspath(model_dir)) else []
    if not refs:
        return None
    _check_stack(refs, backend, os.fspath(model_dir))
    ref = sources.find_checkpoint(model_dir)
    # Only an optax chain itself can name its state.
    of_optax = config is not None and isinstance(config.optimizer, OptaxConfig)
    _check_kind(ref, config)
    if config is not None and config.model.adapter is not None:
        reader = AdapterReader(ref)
        if not allow_changed:
            _check_step(ref, reader)
            _check_record(output_path(model_dir) / RECORD, config)
        reader.check_shape(config.model.adapter, config.model.shape)
        return None if of_optax else reader
    reader = None if of_optax else _open(ref, backend)
    if reader is not None and config is not None:
        check_parameters(reader.tensors, config.model.shape.parameters(), reader.ref.path)
    if not allow_changed:
        _check_step(ref, reader)
        if config is not None:
            _check_record(output_path(model_dir) / RECORD, config)
    return reader


# ---- Checkpoints --------------------------------------------------------------------------------


def _check_stack(refs: list[CheckpointRef], backend: Backend, model_dir: str) -> None:
    """Refuses checkpoints that this backend would ignore although they are the latest."""
    # References come in ascending order of steps, so the latest of each kind stays.
    latest: dict[bool, CheckpointRef] = {ref.format == "mtf": ref for ref in refs}
    mesh, ours = latest.get(True), latest.get(False)
    if ours is None:
        return  # JAX continues from Mesh TensorFlow's checkpoints too
    if backend == "mtf" and (mesh is None or (ours.step or 0) >= (mesh.step or 0)):
        start = "initialized parameters" if mesh is None else f"step {mesh.step:,}"
        raise UserError(
            f"The folder holds checkpoints of the JAX stack, the latest of step {ours.step:,}."
            f" Mesh TensorFlow does not read them: it would start from {start}.",
            where=ours.path,
            fix="Continue with --backend=jax. To continue with Mesh TensorFlow: t0repro convert"
            f" {model_dir} NEW_DIR --to mtf, then --model_dir=NEW_DIR.",
        )
    if backend == "jax" and mesh is not None and (mesh.step or 0) > (ours.step or 0):
        raise UserError(
            f"{mesh.path} is later than the JAX checkpoints beside it.",
            where=model_dir,
            fix=of_command(
                "Move one kind elsewhere, or continue with --backend=mtf.",
                "Move one kind elsewhere.",
            ),
        )


def _check_kind(ref: CheckpointRef, config: RunConfig | None) -> None:
    """Refuses to train an adapter beside checkpoints of whole models, and the other way round."""
    trains = config is not None and config.model.adapter is not None
    if trains != is_adapter(ref):
        kinds = ("whole models", "an adapter")
        raise UserError(
            f"The folder holds checkpoints of {kinds[not trains]}, and the run trains"
            f" {('a whole model', kinds[1])[trains]}.",
            where=ref.path,
            fix=f"Give another {of_command('--model_dir', 'MODEL_DIR')}.",
        )


def _open(ref: CheckpointRef, backend: Backend) -> CheckpointReader | None:
    """The checkpoint's reader; None for a Mesh TensorFlow model that this package cannot read."""
    try:
        return sources.open_checkpoint(ref)
    except UserError:
        if backend == "mtf" and ref.format == "mtf":
            return None
        raise


def _check_step(ref: CheckpointRef, reader: CheckpointReader | None) -> None:
    if reader is None or ref.step is None or naming.STEP not in reader.tensors:
        return
    step = int(reader.read(naming.STEP))
    if step != ref.step:
        name = os.path.basename(ref.path)
        raise UserError(
            f"{name} holds step {step:,}: it was renamed, or its contents were replaced.",
            where=ref.path,
            fix=f"Give it its own name, {name.replace(str(ref.step), str(step))}; or add"
            f" --allow_changed to continue from step {step:,}.",
        )


def check_slots(reader: CheckpointReader, shapes: TrainState) -> None:
    """Refuses slots that the optimizer would ignore or would restart at zero.

    Args:
      reader: the checkpoint that training continues from.
      shapes: shapes of the state of the run about to train.

    Raises:
      UserError: if the checkpoint's slots are not those of the state.
    """
    found = {
        key: info.shape for key, info in reader.tensors.items() if key.startswith(naming.SLOTS)
    }
    if not found or not isinstance(shapes.slots, dict):
        return  # parameters alone, as a conversion may write; or the state of optax's optimizers
    wanted = {
        naming.slot_key(path, name): tuple(value.shape)
        for path, slot in flat_slots(shapes.slots).items()
        for name in naming.SLOT_NAMES
        if (value := getattr(slot, name)) is not None
    }
    wrong = differing_shapes(found, wanted)
    if not wrong:
        return
    key, then, now = wrong[0]
    path, slot = naming.split_key(key)
    raise UserError(
        f"The checkpoint was trained with another optimizer, or with other options of it:"
        f" {len(wrong)} slots differ. Of {path}, the slot {slot}: {then} there, {now} now.",
        where=reader.ref.path,
        fix="Bind run.optimizer and its options as they were; or add --allow_changed to continue,"
        " with zeros for the missing slots.",
    )


# ---- Settings -----------------------------------------------------------------------------------


def _settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a checkpoint depends on: dotted field -> value, as JSON represents it."""
    parts = {"model": config.model, "optimizer": config.optimizer}
    settings: dict[str, Any] = {"optimizer": type(config.optimizer).__name__}
    for part, value in parts.items():
        for name, item in (dataclasses.asdict(value) if value is not None else {}).items():
            if not (part == "model" and name in _MAY_CHANGE):
                settings[f"{part}.{name}"] = item
    # T5's parameters have at most two axes, for which the rules of both dialects are the same.
    if settings.get("optimizer.factor_map") == ALL_HEURISTIC:
        settings["optimizer.factor_map"] = ()
    # Through JSON, so that tuples equal the lists that `_check_record` reads back.
    return json.loads(json.dumps(settings))


def _check_record(path: Path, config: RunConfig) -> None:
    """Refuses model or optimizer settings that differ from those that trained the checkpoints."""
    if not path.is_file():
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"The record of this folder's training cannot be read: {error}.",
            where=str(path),
            fix="Delete it to continue without comparing settings.",
        ) from error
    now, places = _settings(config), config.provenance
    # Skip settings that only one side has: they come from another version of this program, or from
    # another optimizer, which the setting "optimizer" reports.
    changed = [name for name in now if name in before and now[name] != before[name]]
    if changed:
        shown = "; ".join(
            f"{name} was {before[name]!r} and is {now[name]!r}"
            + (f" ({places[name]})" if name in places else "")
            for name in changed[:5]
        )
        raise UserError(
            "The checkpoints of this folder were trained with other settings:"
            f" {shown}{'; ...' if len(changed) > 5 else ''}.",
            where=str(path),
            fix="Bind these as they were, or give another"
            f" {of_command('--model_dir', 'MODEL_DIR')}; or add --allow_changed to continue with"
            " the new settings.",
        )


# ---- The state that a run starts from, and what follows from its seed ----------------------------

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


def started(
    config: RunConfig,
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
    found, start = from_first(lambda: latest_step(model_dir)), None
    if found is not None:
        path = checkpoint_path(model_dir, found)
        start = _restored(path, shapes)
        start = dataclasses.replace(start, checkpoint=path, data=data_folder(path))
    if start is not None and config.model.adapter is None:
        return start
    tree = restore_from
    if callable(tree):
        tree = tree(lambda: to_flat_tree(fresh()))
    if config.model.adapter is not None:
        return _beside_base(config, shapes, fresh, tree, start)
    return Start(shapes, 0, is_new=True) if tree is None else _restored(tree, shapes)


def _restored(
    tree: OpenTree | str | Path, shapes: TrainState, where: str = "init_checkpoint"
) -> Start:
    if isinstance(tree, str | os.PathLike):
        where, tree = str(tree), load_sharded_tree(tree, shapes)
    state = from_flat_tree(tree, shapes, where=where)
    say(f"start: step {int(state.step):,} of {where}")
    return Start(state, int(state.step))


def new_state(model: T5Model, key: jax.Array, like: TrainState | None = None) -> TrainState:
    """Parameters initialized from the key, zero slots, step 0; sharded across devices as `like`."""
    assert model.optimizer_def is not None
    if is_own(model) and model.module.config.adapter is not None:
        return new_train_state(initial_adapter(model.module, key), model.optimizer_def)
    if like is None or not isinstance(like.step.sharding, NamedSharding):
        return TrainState.create(model.optimizer_def, model.get_initial_variables(key, {}))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    if not is_own(model):
        # Under jit, so that no device has to hold a user's model alone.
        return jax.jit(lambda key: new_state(model, key), out_shardings=shardings)(key)
    params = initial_parameters(model.module, key, shardings.params)
    # Under jit each device makes its own part of the slots.
    make = functools.partial(new_train_state, optimizer=model.optimizer_def)
    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)


def chosen_seed(plan: TrainingPlan) -> int:
    """The plan's seed, or one taken from the clock, with a message."""
    if plan.random_seed is not None:
        return plan.random_seed
    # One process's clock sets the seed: all processes must initialize the same parameters.
    seed = from_first(lambda: int(time.time()))
    say(f"seed: {seed}, because random_seed is None")
    return seed


def keys(seed: int, how: Literal["split", "folded"]) -> tuple[jax.Array, jax.Array]:
    """The PRNG keys of the initial parameters and of dropout; see `TrainingPlan.keys`."""
    if how == "folded":
        initial = jax.random.key(seed)
        # Fold in a constant, because parameters are initialized with the seed's key itself.
        return initial, jax.random.fold_in(initial, 1)
    initial, training = jax.random.split(jax.random.PRNGKey(seed))
    return initial, training


# ---- An adapter beside its base ------------------------------------------------------------------


def _beside_base(
    config: RunConfig,
    shapes: TrainState,
    fresh: Callable[[], TrainState],
    tree: OpenTree | str | Path | None,
    start: Start | None,
) -> Start:
    """Where the training of an adapter starts.

    Args:
      config: The run.
      shapes: See `started`.
      fresh: See `started`.
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
            fix=of_command(
                "Bind utils.run.init_checkpoint to a checkpoint in any format.",
                "Bind utils.RestoreCheckpointConfig.path to a checkpoint in any format.",
            ),
        )
    where = "init_checkpoint"
    if isinstance(tree, str | os.PathLike):
        where, tree = os.fspath(tree), load_tree(tree)
    elif restore is not None:
        # The checkpoint itself: another may become the latest of its folder.
        where = sources.find_checkpoint(str(restore.path)).path
    where = storage.absolute(where)
    base, digest = base_parameters(tree, shapes.frozen, where)
    note = AdapterNote(adapter, where, digest)
    if start is not None:
        assert start.checkpoint is not None
        AdapterNote.read(start.checkpoint).check_base(digest, where)
    elif restore is not None and restore.adapter is not None:
        own = sources.restored_adapter(restore.adapter, adapter, config.model.shape, digest, where)
        start = _restored(own, shapes, "the restored adapter")
    say(f"base: {where}, frozen, in {adapter.base_dtype}, of hash {digest}")
    if start is None:
        # Small, so it is made at once rather than while the step is compiled.
        start = Start(fresh(), 0)
        say("start: a new adapter")
        if isinstance(shapes.step.sharding, NamedSharding):
            places = jax.tree.map(lambda leaf: leaf.sharding, shapes.replace(frozen=None))
            start = dataclasses.replace(start, state=jax.tree.map(put, start.state, places))
    return dataclasses.replace(start, state=start.state.replace(frozen=base), note=note.write)


# ---- Its batches ---------------------------------------------------------------------------------


_TOKENS = {"inputs", "targets"}


@runtime_checkable
class BatchSource(Protocol):
    """Batches whose position is saved in checkpoints, so that a resumed run continues from it."""

    def open(self, step: int, saved: Path | None) -> Iterable[NumpyBatch]:
        """Batches for the updates after a global step.

        Args:
          step: The global step that training starts from.
          saved: The folder that `save` wrote, in the checkpoint that training resumes from; None if
            there is no such folder, or if training begins in this model_dir.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint's folder how many batches have been used."""
        ...


@runtime_checkable
class ShardedBatchSource(BatchSource, Protocol):
    """Batches whose rows come in `num_shards` equal shards, each of which can be left out."""

    num_shards: int

    def make_only(self, shards: Sequence[int]) -> None:
        """Leaves the rows of all other shards zeros; called before `open`."""
        ...


Batches = Iterable[NumpyBatch] | Callable[[], Iterable[NumpyBatch]] | BatchSource


class Feed:
    """Opens batches for a run's updates.

    With several processes, each builds only the shards of a source that have rows on its devices.
    For any other kind of batches, every process builds the full batch.

    Args:
      batches: The batches to train on.
      rows: Rows of a batch.
      model: Names the features that it reads, and knows so many tokens.
      partitioning: The devices.

    Attributes:
      is_source: Whether the batches know their position, and their shapes before they are read.
      save: Writes that position into a checkpoint's folder; None for other batches.
    """

    def __init__(
        self,
        batches: Batches,
        rows: int,
        model: T5Model,
        partitioning: Partitioning,
    ):
        self._batches, self._model = batches, model
        self._vocab_size = model.module.config.vocab_size
        self._put, self._is_sharded = partitioning.put_batch, False
        self.is_source = isinstance(batches, BatchSource)
        self.save = batches.save if isinstance(batches, BatchSource) else None
        if is_alone() or not isinstance(batches, ShardedBatchSource) or batches.num_shards == 1:
            return
        count = batches.num_shards
        here = {row // (rows // count) for row in partitioning.rows_here(rows)}
        batches.make_only(sorted(here))
        self._is_sharded = True
        say(f"data: {count} shards, of which this process reads {len(here)}")

    def open(self, start: Start) -> Iterable[Any]:
        """The batches from where training continues, each checked before use."""
        batches = self._batches
        if isinstance(batches, BatchSource):
            batches = batches.open(start.step, start.data)
        elif callable(batches):
            batches = batches()
        checked = self._checked(batches)
        if not self._is_sharded:
            return checked
        # From here on a batch holds the rows of every process.
        return (self._put(self._model.features(batch)) for batch in checked)

    def _checked(self, batches: Iterable[NumpyBatch]) -> Iterator[NumpyBatch]:
        """The batches, each checked for token ids out of range."""
        vocab_size = self._vocab_size
        for batch in batches:
            for name in _TOKENS & batch.keys():
                # XLA clamps an index out of range: the run would train on the last embedding.
                if (largest := batch[name].max(initial=0)) >= vocab_size:
                    raise UserError(
                        f"A batch has the token {largest:,}, but the model's vocabulary is"
                        f" {vocab_size:,}.",
                        where=name,
                        fix="Give the model the vocabulary of the tasks, padded to a multiple of"
                        " 128.",
                    )
            yield batch
