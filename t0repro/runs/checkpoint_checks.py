"""Checks of the checkpoints that a run reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t0repro import storage
from t0repro.config.checkpoints import RestoreConfig
from t0repro.config.model import ModelConfig
from t0repro.config.run import TrainRun
from t0repro.converters.adapter_files import is_adapter, open_adapter
from t0repro.converters.tensors import CheckpointRef, TensorInfo
from t0repro.errors import UserError
from t0repro.parameters.shape import both_sizes
from t0repro.words import counted, some

NO_CHECKPOINT_YET = "T0REPRO_NO_CHECKPOINT_YET"
"""Set where auxiliary jobs are checked before their training has saved the first checkpoint."""


def check_restored(
    restore: RestoreConfig, config: TrainRun, vocabularies: tuple[Any, Any]
) -> Iterator[str]:
    """The checkpoint that a training run starts from unless it resumes from one of its own."""
    from t0repro.converters import finding
    from t0repro.runs.restored_checkpoints import choose_checkpoints
    from t0repro.training.model_dir import check_steps_left

    if storage.is_directory(config.model_dir) and finding.list_checkpoints(config.model_dir):
        yield f"not read: {config.model_dir} has checkpoints"
        return
    model_from = config.provenance.get("model.d_model")
    yield from check_checkpoints(restore, config.model, vocabularies, model_from)
    # An adapter's steps count from 0, and a map may leave the step out.
    has_own_steps = config.model.adapter is not None or restore.assignment_map
    if not has_own_steps and NO_CHECKPOINT_YET not in os.environ:
        for ref in choose_checkpoints(restore):
            check_steps_left(config, ref.step or 0)


def check_own_checkpoints(config: TrainRun, allow_changed: bool) -> Iterator[str]:
    """The checkpoints and the data that a run continues from in its model_dir."""
    from t0repro.converters import finding
    from t0repro.data.train_data import train_batches
    from t0repro.training.checkpoints import checkpoint_path, data_folder, latest_step
    from t0repro.training.model_dir import check_model_dir, check_steps_left

    check_model_dir(config.model_dir, "jax", config, allow_changed=allow_changed)
    step = latest_step(config.model_dir)
    if step is None and storage.is_directory(config.model_dir):
        for ref in finding.list_checkpoints(config.model_dir)[-1:]:
            check_steps_left(config, ref.step or 0)
            yield f"training continues from {ref.path} ({ref.format})"
            return
    if step is None:
        yield f"{config.model_dir} has no checkpoint"
        return
    check_steps_left(config, step)
    folder = data_folder(checkpoint_path(config.model_dir, step))
    train_batches(config, resumed=True).check_resumable(step, folder)
    yield f"{config.model_dir} has checkpoints, the latest of step {step:,}"


def check_checkpoints(
    restore: RestoreConfig,
    model: ModelConfig,
    vocabularies: tuple[Any, Any],
    model_from: str | None = None,
) -> Iterator[str]:
    """The checkpoints found, and whether their parameters fit the model, set at `model_from`."""
    if NO_CHECKPOINT_YET in os.environ:
        yield "not saved yet"
        return
    from t0repro.converters.model_files import check_configured
    from t0repro.data.vocabulary_checks import check_own_tokenizer
    from t0repro.runs.restored_checkpoints import choose_checkpoints

    for ref in choose_checkpoints(restore):
        check_configured(ref, model)
        check_own_tokenizer(ref, *vocabularies)
        yield f"{ref.path} ({ref.format}): {_fit(ref, restore, model, model_from)}"


def _fix_of_shapes(
    ref: CheckpointRef, stored: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> str:
    """What to do about parameters that are missing or of other shapes."""
    from t0repro.converters.model_files import T5X_CONFIG

    embedding = "target/token_embedder/embedding"
    rows, wanted = (tuple(each.get(embedding, ())) for each in (stored, expected))
    if rows[1:] == wanted[1:] and rows[:1] != wanted[:1]:
        return f"Bind network.T5Config.vocab_size = {rows[0]}, and the vocabulary of its training."
    own = ref.beside(T5X_CONFIG)
    named = f", {own}," if storage.is_file(own) else ""
    return (
        f"Choose the gin file of the model that it was trained with{named} or map its names with"
        " utils.RestoreCheckpointConfig.assignment_map."
    )


def _fit(
    ref: CheckpointRef, restore: RestoreConfig, model: ModelConfig, model_from: str | None
) -> str:
    """How a checkpoint's parameters fill the model's.

    Raises:
      UserError: If one is missing or of another shape.
    """
    from t0repro.converters.model_files import map_layer_biases
    from t0repro.converters.restoring import assign_names

    # The checkpoint's index has names and shapes, so even a large one is checked at once.
    expected = {f"target/{name}": shape for name, shape in model.shape.parameters().items()}
    tensors = _tensors(ref, model)
    stored = {name: info.shape for name, info in tensors.items() if name.startswith("target/")}
    # A model with a position bias in each layer may start from one whose layers share it.
    repeated = map_layer_biases(stored, model)
    stored |= {name: stored[shared] for name, shared in repeated.items()}
    names = assign_names(expected, stored, restore.assignment_map)
    filled = {name: source for name, source in names.items() if source is not None}
    missing = [name for name in expected if name not in names]
    reshaped = [
        f"{name} {tuple(stored[source])} instead of {expected[name]}"
        for name, source in filled.items()
        if tuple(stored[source]) != tuple(expected[name])
    ]
    used = {*filled.values(), *repeated.values()}
    unused = [name for name in stored if name not in used]
    if reshaped or (missing and not restore.fallback_to_scratch):
        raise UserError(
            "The checkpoint does not fit the model: "
            + "; ".join(
                _list_names(what, each)
                for what, each in (
                    ("missing", missing), ("not used", unused), ("of another shape", reshaped),
                )
                if each
            )
            + f".{both_sizes(stored, expected)}",
            where=f"{ref.path}; the model: {model_from}" if model_from else str(ref.path),
            fix=_fix_of_shapes(ref, stored, expected),
        )  # fmt: skip
    initialized = [name for name in expected if name not in filled]
    return (
        f"{counted(len(filled), 'parameter')} of {len(expected)} match;"
        f" {_list_names('initialized', initialized)}; {_list_names('not used', unused)}"
    )


def _tensors(ref: CheckpointRef, model: ModelConfig) -> Mapping[str, TensorInfo]:
    """A checkpoint's names and shapes; an adapter's are its base's, of which no value is read.

    Raises:
      UserError: If an adapter is for another model, or another adapter than the one to be trained.
    """
    from t0repro.converters import sources

    if not is_adapter(ref):
        return sources.open_checkpoint(ref).tensors
    own = open_adapter(ref)
    if model.adapter is not None:
        own.check_continues(model.adapter, model.shape)
    else:
        own.check_shape(own.note.adapter, model.shape)
    return _tensors(sources.base_of(ref), model)


def _list_names(what: str, names: Sequence[str]) -> str:
    return f"{what}: {some(names) or 'none'}"
