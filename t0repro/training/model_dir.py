"""What a model_dir holds, which must fit the run that is about to train in it.

Training that continues from the wrong state does not fail by itself: Mesh TensorFlow starts at
step 0 beside the JAX stack's checkpoints, which it does not see; slots of another optimizer
become zeros; swapping two activations leaves the parameters' names and shapes the same. Both
backends train inside `lock_for_training`, which reports each of these before anything is
restored or written.

`trained_with.json` in model_dir records the settings of the last training there. Without it, for
instance if another program wrote the checkpoint, only what the tensors show can be checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from t0repro import storage
from t0repro.config.optimizer import OptaxConfig
from t0repro.config.run import TrainRun
from t0repro.converters import finding, sources
from t0repro.converters.adapter_files import (
    AdapterReader,
    is_adapter,
)
from t0repro.converters.own_tokenizer import OTHER_SETTINGS, TRAINED_WITH, VOCABULARY
from t0repro.converters.tensors import CheckpointReader, CheckpointRef, compare_shapes
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ALL_HEURISTIC
from t0repro.partitioning.processes import enter_in_first, is_first
from t0repro.progress import say
from t0repro.storage import explain_errors, lock_folder, output_path, write_atomically
from t0repro.training.train_state import (
    TrainState,
    check_parameters,
    flat_slots,
)
from t0repro.words import some

Backend = Literal["mtf", "jax"]
# Fields of ModelConfig that may change between runs in a folder: they concern only the loss or
# dropout, which is said, or memory use, and `norm_names` only a spelling.
_SAID = frozenset(
    ["dropout_rate", "label_smoothing", "z_loss", "loss_denominator"]
    + ["loss_on_targets_only", "choice_loss"]
)
_MAY_CHANGE = _SAID | {"recompute", "scan_layers", "norm_names"}

# Raises UserError unless a state of these shapes can be trained; returns what records the run.
Check = Callable[[TrainState | None], Callable[[], None]]


@contextlib.contextmanager
def lock_for_training(
    model_dir: str | os.PathLike[str],
    backend: Backend,
    config: TrainRun | None,
    *,
    allow_changed: bool = False,
    vocabulary: tuple[str | None, int | None] | None = None,
) -> Iterator[Check]:
    """Locks model_dir while training, after checking what it holds.

    Yields the last check, to be called with the shapes of the state that is about to be trained, or
    None if they are not known: the checkpoint must have that state's slots. The check returns the
    function that records the run's settings, to be called once nothing else can refuse the run.

    Args:
      model_dir: a folder or an address; created if it does not exist.
      backend: see `check_model_dir`.
      config: see `check_model_dir`; None records nothing.
      allow_changed: see `check_model_dir`.
      vocabulary: the tasks', for the record; see t0repro.data.vocabulary_checks.vocabulary_of.

    Raises:
      UserError: if another run holds the folder, or if a check raises one.
    """
    reader: CheckpointReader | None = None

    @contextlib.contextmanager
    def lock_and_check() -> Iterator[None]:
        nonlocal reader
        fix = "Wait for it to end, or train in another --model_dir."
        with lock_folder(output_path(model_dir), "training", fix=fix):
            reader = check_model_dir(model_dir, backend, config, allow_changed=allow_changed)
            yield

    def check(shapes: TrainState | None) -> Callable[[], None]:
        if is_first() and reader is not None and shapes is not None and not allow_changed:
            check_slots(reader, shapes)
        return record

    def record() -> None:
        if config is None or not is_first():
            return
        # A run with no step left leaves the record of what trained the checkpoints.
        if finding.list_checkpoints(model_dir) and config.plan.relative_steps is None:
            if (finding.find_checkpoint(model_dir).step or 0) >= config.train_steps:
                return
        with explain_errors(path := output_path(model_dir) / TRAINED_WITH):
            _say_changes(path, config)
            others = {**_other_settings(config), VOCABULARY: vocabulary}
            settings = {**_settings(config), OTHER_SETTINGS: others}
            write_atomically(path, json.dumps(settings, indent=1) + "\n")

    with enter_in_first(lock_and_check):
        yield check


def check_model_dir(
    model_dir: str | os.PathLike[str],
    backend: Backend,
    config: TrainRun | None,
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
    folder = os.fspath(model_dir)
    refs = finding.list_checkpoints(model_dir) if storage.is_directory(folder) else []
    if not refs:
        if other := finding.checkpoint_at(folder):
            raise UserError(
                f"The folder is a checkpoint itself, of the format {other.format}; training would"
                " start from initialized parameters beside it.",
                where=folder,
                fix="Give another --model_dir, and start from this one:"
                f" utils.run.init_checkpoint = '{folder}'.",
            )
        return None
    _check_stack(refs, backend, folder)
    ref = finding.find_checkpoint(model_dir)
    # Only an optax chain itself can name its state.
    of_optax = config is not None and isinstance(config.optimizer, OptaxConfig)
    _check_kind(ref, config)
    if config is not None and config.model.adapter is not None:
        reader = AdapterReader(ref)
        if not allow_changed:
            _check_step(ref, reader)
            _check_record(output_path(model_dir) / TRAINED_WITH, config)
        reader.check_shape(config.model.adapter, config.model.shape)
        return None if of_optax else reader
    reader = None if of_optax else _open(ref, backend)
    if reader is not None and config is not None:
        check_parameters(reader.tensors, config.model.shape.parameters(), reader.ref.path)
    if not allow_changed:
        _check_step(ref, reader)
        if config is not None:
            _check_record(output_path(model_dir) / TRAINED_WITH, config)
    return reader


def check_steps_left(config: TrainRun, step: int) -> None:
    """Refuses a run that ends before the step of the checkpoint that it would start from.

    T5X refuses it too; Mesh TensorFlow's Estimator just ends without training.

    Raises:
      UserError: with the place of the number of steps.
    """
    plan = config.plan
    if config.train_steps >= step or plan.may_start_past_end or plan.relative_steps is not None:
        return
    raise UserError(
        f"total_steps is {config.train_steps:,}, but the checkpoint is of step {step:,}.",
        where=config.provenance.get("train_steps"),
        fix="TRAIN_STEPS counts the checkpoint's steps too; or set relative_steps.",
    )


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
            fix="Move one kind elsewhere, or continue with --backend=mtf.",
        )


def _check_kind(ref: CheckpointRef, config: TrainRun | None) -> None:
    """Refuses to train an adapter beside checkpoints of whole models, and the other way round."""
    trains = config is not None and config.model.adapter is not None
    if trains != is_adapter(ref):
        kinds = ("whole models", "an adapter")
        raise UserError(
            f"The folder holds checkpoints of {kinds[not trains]}, and the run trains"
            f" {('a whole model', kinds[1])[trains]}.",
            where=ref.path,
            fix="Give another --model_dir.",
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
    saved_slots = {
        key: info.shape for key, info in reader.tensors.items() if key.startswith(naming.SLOTS)
    }
    if not saved_slots or not isinstance(shapes.slots, dict):
        return  # parameters alone, as a conversion may write; or the state of optax's optimizers
    needed_slots = {
        naming.slot_key(path, name): tuple(value.shape)
        for path, slot in flat_slots(shapes.slots).items()
        for name in naming.SLOT_NAMES
        if (value := getattr(slot, name)) is not None
    }
    wrong = compare_shapes(saved_slots, needed_slots)
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


def _settings(config: TrainRun) -> dict[str, Any]:
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


def _other_settings(config: TrainRun) -> dict[str, Any]:
    """What else decides a step's numbers and may change in a run: dotted field -> value."""
    model, schedule = dataclasses.asdict(config.model), config.schedule
    settings = {f"model.{name}": model[name] for name in sorted(_SAID)} | {
        "dtypes.activation": config.dtypes.activation,
        "num_microbatches": config.num_microbatches,
        "plan.random_seed": config.plan.random_seed,
        "schedule.name": schedule and schedule.name,
        "schedule.arguments": schedule and schedule.arguments,
    }
    return json.loads(json.dumps(settings))


def _say_changes(path: Path, config: TrainRun) -> None:
    """Says which of these settings differ from those of the run's last start."""
    before, now = _read_record(path).get(OTHER_SETTINGS, {}), _other_settings(config)
    before.pop(VOCABULARY, None)  # the same one may have two addresses
    if changes := _list_changes(before, now, config):
        say(f"note: changed since the last start in this folder: {changes}")


def _read_record(path: Path) -> dict[str, Any]:
    """The settings that a folder records; {} if it records none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (ValueError, TypeError) as error:
        raise UserError(
            f"The record of this folder's training cannot be read: {error}.",
            where=str(path),
            fix="Delete it to continue without comparing settings.",
        ) from error


def _list_changes(before: Mapping[str, Any], now: Mapping[str, Any], config: TrainRun) -> str:
    """The settings that both sides have with other values; "" for none."""
    # Skip settings that only one side has: they come from another version of this program, or from
    # another optimizer, which the setting "optimizer" reports.
    changed = []
    for name in now.keys() & before.keys():
        was, is_now, place = before[name], now[name], config.provenance.get(name)
        fields = [("", was, is_now)]
        if isinstance(was, dict) and isinstance(is_now, dict):
            fields = [(f".{key}", was.get(key), is_now.get(key)) for key in was | is_now]
        changed += [
            f"{name}{field} was {old!r} and is {new!r}{f' ({place})' if place else ''}"
            for field, old, new in fields
            if old != new
        ]
    return some(sorted(changed), separator="; ")


def _spread_arithmetic(settings: dict[str, Any]) -> dict[str, Any]:
    """Gives each setting of the arithmetic a name of its own: another version has more or fewer."""
    arithmetic = settings.pop("model.arithmetic", {})
    return settings | {f"model.arithmetic.{name}": value for name, value in arithmetic.items()}


def _check_record(path: Path, config: TrainRun) -> None:
    """Refuses model or optimizer settings that differ from those that trained the checkpoints."""
    before = _spread_arithmetic(_read_record(path))
    if changes := _list_changes(before, _spread_arithmetic(_settings(config)), config):
        raise UserError(
            f"The checkpoints of this folder were trained with other settings: {changes}.",
            where=str(path),
            fix="Bind these as they were, or give another"
            " --model_dir; or add --allow_changed to continue with"
            " the new settings.",
        )
