"""An update whose loss or gradient is NaN or Inf: the tensor that went bad first, and a replay.

`bad_update_<step>/` in a run's folder holds what reproduces the update: the batch, the dropout key,
and the run's configuration. The state is the checkpoint of the step before. `t0repro replay` reruns
the update.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.adapters import join_adapter
from t0repro.config.run import TrainRun
from t0repro.converters import sources
from t0repro.converters.adapter_files import AdapterNote
from t0repro.errors import UserError
from t0repro.model.features import rename_features
from t0repro.model.layer_stacks import count_stacked_layers, split_rows, unstack
from t0repro.model.t5 import T5, adapter_shapes, frozen_shapes, parameter_shapes
from t0repro.partitioning.devices import fetch
from t0repro.storage.disk import atomic_directory
from t0repro.training.checkpoints import checkpoint_path, load_tree
from t0repro.training.models import model_of
from t0repro.training.t5_model import T5Model
from t0repro.training.train_state import base_parameters, parameters_from_flat_tree
from t0repro.training.train_step import microbatch_keys, split_into_microbatches
from t0repro.words import remove_passwords

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


def write_bad_update(
    folder: Path, config: TrainRun, step: int, batch: Mapping[str, np.ndarray], key: jax.Array
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
        "config": json.loads(remove_passwords(config.to_json())),
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
    if not (folder / NOTES_FILE).is_file():
        below = sorted(map(str, folder.glob("bad_update_*")))
        raise UserError(
            f"This is not a bad_update folder: it has no {NOTES_FILE}."
            if folder.exists()
            else "There is no such folder.",
            where=str(folder),
            fix=f"Name {' or '.join(below) or 'a bad_update_<step> folder'}, which"
            " TerminateOnNanAction writes.",
        )
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
    config = TrainRun.from_json(json.dumps(notes["config"]), where=str(folder / NOTES_FILE))
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
        params = join_adapter(frozen, params, config.model.adapter.scale)
    key = jnp.asarray(notes["key"], jnp.uint32)
    model = model_of(module, user_class=config.plan.user_classes.get("model"))
    return find_bad_tensor(model, params, batch, key, config.num_microbatches)


def find_bad_tensor(
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
        bad = _check_finite("parameter", name, None, value)
        if bad is not None:
            return bad
    features, loss_fn = model.whole_batch({name: jnp.asarray(x) for name, x in batch.items()})
    parts, keys = split_into_microbatches(features, num_microbatches), microbatch_keys(key)
    backward = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    for index in range(num_microbatches):
        microbatch = {name: x[index] for name, x in parts.items()}
        for kind, name, value in _compute_tensors(model, backward, params, microbatch, keys(index)):
            bad = _check_finite(kind, name, index, value)
            if bad is not None:
                return bad
    return None


def _compute_tensors(
    model: T5Model, backward: Callable, params: Any, microbatch: Mapping[str, jax.Array], key: Any
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
            rename_features(microbatch),
            deterministic=not dropout,
            rngs={"dropout": key} if dropout else {},
        )
    yield from activations
    (loss, _), gradients = backward(params, microbatch, key)
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

    def split_on_host(stack: jax.Array) -> list[np.ndarray]:
        return [fetch(layer) for layer in split_rows(stack)]

    tree = unstack(tree, count_stacked_layers(tree), split_on_host)
    return flax.traverse_util.flatten_dict(tree, sep="/")


def _check_finite(kind: str, name: str, microbatch: int | None, value: Any) -> BadTensor | None:
    # All processes check the same tensors, so they can gather one that is sharded across them.
    gathered = fetch(value) if isinstance(value, jax.Array) else value
    # bfloat16 widens to float32 exactly, NaN and infinity included.
    array = np.asarray(gathered, np.float32)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    return BadTensor(kind, name, microbatch, bad, array.size) if bad else None
