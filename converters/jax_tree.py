"""Checkpoints with T5X's tree, `checkpoint_<step>/`: this project's JAX ones and T5X's own.

T5X has two layouts. The legacy one has T5X's msgpack file `checkpoint` with Zarr arrays beside it.
Orbax's, T5X's default since 2023, has the folder `state` and, if T5X saved its position in the
training data, the folder `dataset`. T5X distinguishes them by `_METADATA`, which only Orbax writes.

T5X's tree has all four slots of every parameter; slots that the optimizer does not use are zeros of
shape (1,). Reading removes these dummies and writing adds them, so that the rest of the package
sees only real slots. Adam's moments are where optax's adam keeps them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from t0repro.converters import scanning, storage, t5x_msgpack
from t0repro.converters.orbax_dir import OrbaxArrays, OrbaxWriter, is_orbax
from t0repro.converters.recognition import unknown_variable
from t0repro.converters.tensors import CheckpointRef, Output, TensorInfo
from t0repro.converters.witnesses import Manifest, check_manifest
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

Layout = Literal["legacy", "orbax"]  # of T5X's checkpoints
STATE = "state"  # the item of T5X's Orbax checkpoints that holds the tree
_DUMMY_SHAPE = (1,)


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class JaxReader:
    """Reads a checkpoint with T5X's tree: Orbax's layouts or T5X's msgpack, scanned or not.

    Args:
      ref: A `checkpoint_<step>` directory.
      norm_names: Mesh TensorFlow's spelling of the norms, from the conversion manifest.
      manifest: The conversion manifest; if the directory has no checksums of its own, every array
        read is compared with it.

    Raises:
      UserError: If the directory cannot be read, holds a name that is not in the table of names, or
        lacks an array that one of its files names.

    Attributes:
      stored: The arrays under the checkpoint's own names.
    """

    def __init__(
        self,
        ref: CheckpointRef,
        norm_names: naming.NormNames | None = None,
        manifest: Manifest | None = None,
    ):
        self.norm_names: naming.NormNames | None = norm_names
        self.ref = ref
        path = _tree_directory(ref.path)
        msgpack = storage.is_file(storage.join(path, t5x_msgpack.FILE))
        stored = t5x_msgpack.MsgpackArrays(path) if msgpack else OrbaxArrays(path)
        self.stored: scanning.Arrays = stored
        self.has_integrity = stored.has_integrity
        self.unchecked = stored.unchecked()  # see OrbaxArrays
        if manifest is not None:
            check_manifest(manifest, stored.tensors, os.path.dirname(ref.path), stored.place)
        source: scanning.Arrays = stored
        if manifest is not None and not stored.has_integrity:
            source = _Compared(stored, manifest, ref.path)
        arrays: scanning.Arrays = Renamed(source)
        if scanning.is_scanned(arrays.tensors):
            arrays = scanning.UnscannedArrays(arrays)
        self._arrays: scanning.Arrays = arrays
        self.tensors: Mapping[str, TensorInfo] = arrays.tensors
        _check_keys(self.tensors, ref.path)

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor as stored."""
        return self._arrays.read(key)

    def native_name(self, key: str) -> str:
        """Returns the key itself: flat keys are this format's own names."""
        return key


class _Compared:
    """Arrays that are compared with a conversion's manifest as they are read."""

    def __init__(self, arrays: scanning.Arrays, manifest: Manifest, where: str):
        self._arrays, self._manifest, self._where = arrays, manifest, where
        self.tensors = arrays.tensors

    def read(self, name: str) -> np.ndarray:
        array = self._arrays.read(name)
        self._manifest.check(name, array, self._where)
        return array


class Renamed:
    """Arrays under flat keys, without dummies."""

    def __init__(self, arrays: scanning.Arrays):
        self._arrays = arrays
        self._names = {}
        for name in arrays.tensors:
            # T5X's msgpack file has the tree below `optimizer`, beside a `version`.
            key = naming.from_optax(name.removeprefix("optimizer/"))
            if key not in (None, "version"):
                self._names[key] = name
        tensors = {key: arrays.tensors[name] for key, name in self._names.items()}
        absent = dummies(tensors)
        self.tensors = {key: info for key, info in tensors.items() if key not in absent}

    def read(self, name: str) -> np.ndarray:
        """Reads the array of a flat key."""
        return self._arrays.read(self._names[name])


def _check_keys(tree: Mapping[str, _Shaped], path: str) -> None:
    decoder_only = naming.is_decoder_only(tree)
    unknown = [key for key in tree if key != naming.STEP and not _is_known(key, decoder_only)]
    if unknown:
        numbers = [int(n) for key in tree for n in re.findall(r"/layers_(\d+)/", key)]
        known = naming.known_names("t5x", numbers, decoder_only)
        raise unknown_variable(
            unknown, [*(naming.PARAMETERS + name for name in known), naming.STEP], path
        )


def _is_known(key: str, decoder_only: bool) -> bool:
    try:
        path, _ = naming.split_key(key)
    except ValueError:
        return False
    return naming.find_row(path, "t5x", decoder_only) is not None


def dummies(tree: Mapping[str, _Shaped]) -> set[str]:
    """Finds T5X's placeholders for unused slots: zeros of shape (1,).

    A slot of that shape is a dummy unless a real one would have the same shape: `v` and `m` of a
    parameter of shape (1,), or the factored slots of a matrix with a side of 1.

    Args:
      tree: Flat key -> an array or its description.
    """
    # All parameters have momentum or none has, so looking at the matrices is enough.
    momentum = any(
        key.endswith("/m") and len(array.shape) > 1
        for key, array in tree.items()
        if key.startswith(naming.SLOTS)
    )
    return {
        key
        for key, array in tree.items()
        if key.startswith(naming.SLOTS)
        and tuple(array.shape) == _DUMMY_SHAPE
        and _is_dummy(key, tree, momentum)
    }


def _is_dummy(key: str, tree: Mapping[str, _Shaped], momentum: bool) -> bool:
    path, slot = naming.split_key(key)
    parameter = tree.get(naming.PARAMETERS + path)
    if parameter is None or slot is None or slot not in naming.ADAFACTOR_SLOTS:
        return False
    # Parameters that are not trained have no slots.
    if slot == "m":
        return not momentum or tuple(parameter.shape) != _DUMMY_SHAPE
    if slot == "v":
        return tuple(parameter.shape) != _DUMMY_SHAPE
    if len(parameter.shape) < 2 or min(parameter.shape) > 1:
        return True
    # A side of 1 gives real factored slots of shape (1,), unless `v` is not factored.
    unfactored = tree.get(naming.slot_key(path, "v"))
    return unfactored is not None and unfactored.shape == parameter.shape


# --- Writing -------------------------------------------------------------------------------------


def jax_outputs(
    tensors: Mapping[str, TensorInfo], family: ModelShape, scan: bool = False
) -> Iterator[Output]:
    """Yields the arrays to write for these tensors, dummies included; the step becomes an int32.

    Args:
      tensors: Flat key -> shape and type.
      family: The model's sizes.
      scan: Whether to stack the layers of each tower.
    """
    plain = (Output(key, info, (key,), next) for key, info in tensors.items())
    outputs = list(scanning.scanned_outputs(tensors, family) if scan else plain)
    for output in outputs:
        yield _named_by_optax(output)
    shapes = {output.name: output.info for output in outputs}
    for name in _missing_slots(shapes):
        dummy = TensorInfo(_DUMMY_SHAPE, np.dtype(np.float32))
        yield Output(name, dummy, (), lambda _: np.zeros(_DUMMY_SHAPE, np.float32))
    if any(key.endswith(naming.ADAM_SLOTS) for key in tensors):
        # optax's adam uses this count for its bias correction. Mesh TensorFlow's Adam has no
        # correction, and at the global step optax's has faded.
        yield Output(
            naming.OPTAX_COUNT,
            TensorInfo((), np.dtype(np.int32)),
            (naming.STEP,),
            lambda arrays: next(arrays).astype(np.int32),
        )


def _named_by_optax(output: Output) -> Output:
    if output.name == naming.STEP:
        info = TensorInfo((), np.dtype(np.int32))
        return Output(output.name, info, output.keys, lambda arrays: next(arrays).astype(np.int32))
    return Output(naming.to_optax(output.name), output.info, output.keys, output.build)


def _missing_slots(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields the slots that T5X's Adafactor expects but the tree lacks; none without slots."""
    # Dummies come from T5X's own Adafactor; optax's optimizers have none.
    adafactor = any(
        key.startswith(naming.SLOTS)
        and not key.endswith((*naming.ADAM_SLOTS, naming.MOMENTUM_SLOT))
        for key in tree
    )
    for key in tree if adafactor else ():
        if key.startswith(naming.PARAMETERS):
            for slot in naming.ADAFACTOR_SLOTS:
                slot_key = naming.slot_key(key.removeprefix(naming.PARAMETERS), slot)
                if slot_key not in tree:
                    yield slot_key


def with_dummies(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tree with zeros of shape (1,) for the unused slots that T5X expects.

    A tree without Adafactor slots gets none.
    """
    missing = {name: np.zeros(_DUMMY_SHAPE, np.float32) for name in _missing_slots(tree)}
    return {**tree, **missing}


def jax_writer(
    directory: str, step: int, outputs: list[Output], layout: Layout | None
) -> OrbaxWriter:
    """Opens a writer of `checkpoint_<step>/` in a directory.

    Args:
      directory: An existing directory, or an address.
      step: The global step.
      outputs: Everything that will be written.
      layout: One of T5X's layouts, or None for this project's own.
    """
    path = storage.join(directory, f"checkpoint_{step}")
    if layout == "orbax":
        return OrbaxWriter(path, item=STATE)
    if layout == "legacy":
        # Write no `_METADATA` here: T5X would treat the directory as Orbax's.
        tensors = {output.name: output.info for output in outputs}
        file = t5x_msgpack.msgpack_file(tensors, step)
        return OrbaxWriter(path, {t5x_msgpack.FILE: file}, metadata=False)
    return OrbaxWriter(path)


# --- Finding -------------------------------------------------------------------------------------


def jax_refs(directory: str) -> list[CheckpointRef]:
    """Lists a directory's complete checkpoints by ascending step."""
    refs = []
    for name in storage.names(directory):
        # T5X and Orbax append a suffix to the name until the checkpoint is complete.
        match = re.fullmatch(r"checkpoint_(\d+)", name)
        if match and (found := jax_ref(storage.join(directory, name), int(match[1]))):
            refs.append(found)
    return sorted(refs, key=lambda ref: ref.step or 0)


def jax_ref(path: str, step: int | None) -> CheckpointRef | None:
    """Returns the checkpoint in a directory, as "t5x" if it has one of T5X's layouts; else None.

    T5X's legacy layout has the file `checkpoint`, its Orbax layout the folder `state`; this
    project's layout has the tree in the directory itself.
    """
    tree = _tree_directory(path)
    if storage.is_file(storage.join(tree, t5x_msgpack.FILE)) or (tree != path and is_orbax(tree)):
        return CheckpointRef("t5x", path, step)
    return CheckpointRef("jax", path, step) if tree == path and is_orbax(path) else None


def orbax_ref(path: str) -> CheckpointRef | None:
    """Returns the Orbax checkpoint in a directory of any name, or None."""
    ref = jax_ref(path, None)
    return ref if is_orbax(_tree_directory(path)) else None


def _tree_directory(path: str) -> str:
    """The directory with the arrays: the folder `state` if there is one (T5X's Orbax layout)."""
    state = storage.join(path, STATE)
    return state if storage.is_directory(state) else path


def dataset_state(path: str) -> list[str]:
    """Lists the files in which T5X saved its position in the training data, sorted by name."""
    # T5X's own checkpointer writes a file `train_ds-...` per host, its Orbax one `dataset/`.
    own = [storage.join(path, name) for name in storage.names(path) if name.startswith("train_ds-")]
    return sorted(own + list(storage.walk(storage.join(path, "dataset"))))
