"""This project's JAX checkpoints, `checkpoint_<step>/`: T5X's tree in an Orbax directory.

T5X's tree holds all four slots of every parameter; those that the optimizer does not use are zeros
of shape (1,). They are taken out on reading and put in on writing, so that the rest of this
package knows only slots that mean something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from t0repro.converters import layout
from t0repro.converters.family import unknown_variable
from t0repro.converters.tensors import CheckpointRef, TensorInfo

_DUMMY_SHAPE = (1,)


class JaxReader:
    """Reads a JAX checkpoint.

    Args:
      path: a `checkpoint_<step>` directory.
      norm_names: what the directory's conversion manifest says of Mesh TensorFlow's spelling.

    Raises:
      UserError: if the directory cannot be read or holds a name that is in no row of the table.
    """

    def __init__(self, path: str, norm_names: layout.NormNames | None = None):
        self.norm_names: layout.NormNames | None = norm_names
        from t0repro.training import checkpoints

        self._tree = checkpoints.load_tree(path)
        _check_keys(self._tree, path)
        for key in dummies(self._tree):
            del self._tree[key]
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(array.shape, array.dtype) for key, array in self._tree.items()
        }
        step = int(self._tree[layout.STEP]) if layout.STEP in self._tree else None
        self.ref = CheckpointRef("jax", path, step)

    def read(self, key: str) -> np.ndarray:
        """One tensor, as it is stored."""
        return self._tree[key]

    def native_name(self, key: str) -> str:
        """Flat keys are this format's own names."""
        return key


def _check_keys(tree: Mapping[str, np.ndarray], path: str) -> None:
    unknown = [key for key in tree if key != layout.STEP and not _is_known(key)]
    if unknown:
        numbers = {int(n) for key in tree for n in re.findall(r"/layers_(\d+)/", key)} | {0}
        known = [
            layout.PARAMETERS + layout.name_of(row, layer, "t5x")
            for row in layout.TABLE
            for layer in (sorted(numbers) if row.tower else [None])
        ]
        raise unknown_variable(unknown, [*known, layout.STEP], path)


def _is_known(key: str) -> bool:
    try:
        path, _ = layout.split_key(key)
    except ValueError:
        return False
    return layout.find_row(path, "t5x") is not None


def dummies(tree: Mapping[str, np.ndarray]) -> list[str]:
    """The slots of a tree that stand for slots that are not there: zeros of shape (1,).

    A slot of that shape is a dummy unless its parameter's own slots have that shape: `v` and `m`
    of a parameter of shape (1,), or the factored slots of a matrix of which one side is 1.
    """
    # Momentum is kept for all parameters or for none, so any matrix tells.
    momentum = any(
        key.endswith("/m") and array.ndim > 1
        for key, array in tree.items()
        if key.startswith(layout.SLOTS)
    )
    return [
        key
        for key, array in tree.items()
        if key.startswith(layout.SLOTS)
        and array.shape == _DUMMY_SHAPE
        and _is_dummy(key, tree, momentum)
    ]


def _is_dummy(key: str, tree: Mapping[str, np.ndarray], momentum: bool) -> bool:
    path, slot = layout.split_key(key)
    parameter = tree.get(layout.PARAMETERS + path)
    if parameter is None or slot is None:
        return False
    if slot == "m":
        return not momentum
    if parameter.ndim < 2:
        return slot != "v"
    if slot == "v":
        return True
    unfactored = tree.get(layout.slot_key(path, "v"))
    return unfactored is not None and unfactored.shape == parameter.shape


def write_jax(
    directory: Path,
    step: int,
    tensors: Mapping[str, TensorInfo],
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes `checkpoint_<step>/` into a directory, with dummies for the slots that are not used.

    Args:
      directory: an existing directory.
      step: the global step, for the directory's name.
      tensors: shapes and types of what `arrays` yields.
      arrays: flat key and value of each tensor.
    """
    from t0repro.training import checkpoints

    tree = {key: array.astype(np.int32) if key == layout.STEP else array for key, array in arrays}
    checkpoints.save_tree(str(directory / f"checkpoint_{step}"), with_dummies(tree))


def with_dummies(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A tree with zeros of shape (1,) for the slots that T5X expects and nothing uses.

    A tree without any slot is returned as it is.
    """
    complete = dict(tree)
    if not any(key.startswith(layout.SLOTS) for key in tree):
        return complete
    for key in tree:
        if key.startswith(layout.PARAMETERS):
            for slot in layout.SLOT_NAMES:
                slot_key = layout.slot_key(key.removeprefix(layout.PARAMETERS), slot)
                complete.setdefault(slot_key, np.zeros(_DUMMY_SHAPE, np.float32))
    return complete


def jax_steps(directory: Path) -> list[int]:
    """Steps of the whole checkpoints in a directory, ascending."""
    if not any(directory.glob("checkpoint_*")):
        return []  # without importing JAX

    from t0repro.training import checkpoints

    return checkpoints.list_checkpoints(directory)
