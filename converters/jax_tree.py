"""Checkpoints with T5X's tree, `checkpoint_<step>/`: this project's JAX ones and T5X's own.

T5X has two layouts. The legacy one has T5X's msgpack file `checkpoint` with Zarr arrays beside it.
Orbax's, T5X's default since 2023, has the folder `state` and, if T5X saved its position in the
training data, the folder `dataset`. T5X distinguishes them by `_METADATA`, which only Orbax writes.

T5X's tree has all four slots of every parameter; slots that the optimizer does not use are zeros of
shape (1,). Reading removes these dummies and writing adds them, so that the rest of the package
sees only real slots. Adam's moments are where optax's adam keeps them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from t0repro import storage
from t0repro.converters import t5x_msgpack, tensors
from t0repro.converters.orbax_dir import OrbaxArrays, OrbaxWriter, is_orbax
from t0repro.converters.tensors import CheckpointRef, Output, TensorInfo
from t0repro.converters.witnesses import Manifest, check_manifest
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape, unknown_variable

Layout = Literal["legacy", "orbax"]  # of T5X's checkpoints
# The items of an Orbax checkpoint that may hold the tree: T5X's, and that of a CheckpointManager
# whose items nobody named.
STATE = "state"
ITEMS = (STATE, "default")
_DUMMY_SHAPE = (1,)
_STATE = "state/"
# Variables that are not trained, such as running means of what a model reports. No T5 has any.
_MUTABLES = "flax_mutables/"


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
      other_state: Names of the state of an optimizer that is neither Adafactor nor Adam, and of
        variables that are not trained.
      lost_state: See `MsgpackArrays`.
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
        self.stored: Arrays = stored
        self.lost_state = stored.lost_state if isinstance(stored, t5x_msgpack.MsgpackArrays) else []
        self.has_integrity = stored.has_integrity
        self.unchecked = stored.list_unchecked()  # see OrbaxArrays
        if manifest is not None:
            check_manifest(manifest, stored.tensors, os.path.dirname(ref.path), stored.place)
        arrays: Arrays = Renamed(stored, None if stored.has_integrity else manifest, ref.path)
        scanned = ("target/encoder/encoder/", "target/decoder/decoder/")
        if any(name.startswith(scanned) for name in arrays.tensors):
            arrays = _UnscannedArrays(arrays)
        self._arrays: Arrays = arrays
        self.other_state = [key for key in arrays.tensors if _is_other_state(key)]
        self.tensors: Mapping[str, TensorInfo] = {
            key: info for key, info in arrays.tensors.items() if key not in self.other_state
        }
        _check_keys(self.tensors, ref.path)

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor as stored."""
        return self._arrays.read(key)

    def native_name(self, key: str) -> str:
        """Returns the key itself: flat keys are this format's own names."""
        return key


class Renamed:
    """Arrays under flat keys, without dummies.

    Args:
      arrays: The arrays under their own names.
      manifest: A conversion's manifest, with which every array read is compared.
      where: The checkpoint, for messages.
    """

    def __init__(self, arrays: Arrays, manifest: Manifest | None = None, where: str = ""):
        self._arrays, self._manifest, self._where = arrays, manifest, where
        self._names = {}
        for name in arrays.tensors:
            # T5X's msgpack file has the tree below `optimizer`, beside a `version`.
            key = naming.from_optax(name.removeprefix("optimizer/"))
            if key not in (None, "version"):
                self._names[key] = name
        tensors = {key: arrays.tensors[name] for key, name in self._names.items()}
        dummies = find_dummies(tensors)
        self.tensors = {key: info for key, info in tensors.items() if key not in dummies}

    def read(self, name: str) -> np.ndarray:
        """Reads the array of a flat key."""
        array = self._arrays.read(self._names[name])
        if self._manifest is not None:
            self._manifest.check(self._names[name], array, self._where)
        return array


def _is_other_state(key: str) -> bool:
    try:
        naming.split_key(key)
    except ValueError:
        return key.startswith((_STATE, _MUTABLES)) and key != naming.STEP
    return False


def _check_keys(tree: Mapping[str, _Shaped], path: str) -> None:
    decoder_only = naming.is_decoder_only(tree)

    def is_known(key: str) -> bool:
        try:
            path, _ = naming.split_key(key)
        except ValueError:
            return key == naming.STEP
        return naming.find_row(path, "t5x", decoder_only) is not None

    if unknown := [key for key in tree if not is_known(key)]:
        numbers = [int(n) for key in tree for n in re.findall(r"/layers_(\d+)/", key)]
        known = naming.known_names("t5x", numbers, decoder_only)
        raise unknown_variable(
            unknown, [*(naming.PARAMETERS + name for name in known), naming.STEP], path
        )


def find_dummies(tree: Mapping[str, _Shaped]) -> set[str]:
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
    return {key for key in tree if key.startswith(naming.SLOTS) and _is_dummy(key, tree, momentum)}


def _is_dummy(key: str, tree: Mapping[str, _Shaped], momentum: bool) -> bool:
    if tuple(tree[key].shape) != _DUMMY_SHAPE:
        return False
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
    outputs = list(_scan_outputs(tensors, family) if scan else plain)
    step = Output(
        naming.STEP,
        TensorInfo((), np.dtype(np.int32)),
        (naming.STEP,),
        lambda arrays: next(arrays).astype(np.int32),
    )
    for output in outputs:
        if output.name == naming.STEP:
            yield step
        else:
            yield dataclasses.replace(output, name=naming.to_optax(output.name))
    for name in _absent_slots({output.name: output.info for output in outputs}):
        dummy = TensorInfo(_DUMMY_SHAPE, np.dtype(np.float32))
        yield Output(name, dummy, (), lambda _: np.zeros(_DUMMY_SHAPE, np.float32))
    if any(key.endswith(naming.ADAM_SLOTS) for key in tensors):
        # optax's adam uses this count for its bias correction. Mesh TensorFlow's Adam has no
        # correction, and at the global step optax's has faded.
        yield dataclasses.replace(step, name=naming.OPTAX_COUNT)


def _absent_slots(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields the slots that T5X's Adafactor expects but the tree lacks; none without slots."""
    # Dummies come from T5X's own Adafactor; optax's optimizers have none.
    adafactor = any(
        key.startswith(naming.SLOTS) and not any(map(key.endswith, naming.WHOLE_SLOTS))
        for key in tree
    )
    for key in tree if adafactor else ():
        if key.startswith(naming.PARAMETERS):
            for slot in naming.ADAFACTOR_SLOTS:
                slot_key = naming.slot_key(key.removeprefix(naming.PARAMETERS), slot)
                if slot_key not in tree:
                    yield slot_key


def add_dummies(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tree with zeros of shape (1,) for the unused slots that T5X expects.

    A tree without Adafactor slots gets none.
    """
    missing = {name: np.zeros(_DUMMY_SHAPE, np.float32) for name in _absent_slots(tree)}
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


def jax_refs(directory: str) -> list[CheckpointRef]:
    """Lists a directory's complete checkpoints by ascending step."""
    refs = []
    for name in storage.list_names(directory):
        # T5X and Orbax append a suffix to the name until the checkpoint is complete.
        match = re.fullmatch(r"checkpoint_(\d+)", name)
        if match and (ref := jax_ref(storage.join(directory, name), int(match[1]))):
            refs.append(ref)
    return sorted(refs, key=lambda ref: ref.step or 0)


def jax_ref(path: str, step: int | None) -> CheckpointRef | None:
    """Returns the checkpoint in a directory, as "t5x" if it has one of T5X's layouts; else None.

    T5X's legacy layout has the file `checkpoint`, its Orbax layout an item's folder; this
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
    """The directory with the arrays: an item's folder if there is one (T5X's Orbax layout)."""
    folders = (storage.join(path, item) for item in ITEMS)
    return next(filter(storage.is_directory, folders), path)


def dataset_state(path: str) -> list[str]:
    """Lists the files in which T5X saved its position in the training data, sorted by name."""
    # T5X's own checkpointer writes a file `train_ds-...` per host, its Orbax one `dataset/`.
    names = (name for name in storage.list_names(path) if name.startswith("train_ds-"))
    files = [storage.join(path, name) for name in names]
    return sorted([*files, *storage.list_files(storage.join(path, "dataset"))])


# T5X's scanned trees (scalable_t5) stack a tower's layers in one array:
# `encoder/layers_{0,1,...}/mlp/wo/kernel` of shape [d_ff, d_model] are one array
# `encoder/encoder/mlp/wo/kernel` of shape [d_ff, layers, d_model] (param_scan_axis is 1). Attention
# heads have their own axis: query, key and value are [d_model, layers, heads, kv], out is [heads,
# layers, kv, d_model]. Each layer has its own relative position bias. Writing repeats a bias that a
# tower's layers share, and reading turns equal biases into a shared one.
#
# Adafactor's factored slots follow the names of the axes, not their sizes: v_row averages over the
# axes other than d_model, v_col over d_model (t5x/adafactor.py, standard_logical_factor_rules). A
# mean over heads and kv equals the mean over the two joined, so slots that both trees factor have
# the same values. scalable_t5 factors every kernel of a layer, however small; other trees do not
# factor a kernel's second moment if one of its sides is below 128 (min_dim_size_to_factor).
# Stacking takes the means of such a kernel. They equal T5X's up to rounding: Adafactor averages
# squared gradients over time, and a mean of averages is the average of the means. The full moment
# cannot be recovered from the means.

_LAYERS = "layers"
_FACTORED = ("v_row", "v_col")
# Mesh TensorFlow's and T5X's Adafactor factor a matrix if its second longest side is at least this.
_MIN_DIM_SIZE_TO_FACTOR = 128


class Arrays(Protocol):
    """Arrays by flat key."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and types."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One array."""
        ...


def _scan_axes(row: naming.Row, slot: str | None = None, joined: bool = False) -> tuple[str, ...]:
    """Returns the axes of a parameter, or of one of its slots, in a scanned tree.

    Args:
      row: The parameter's row, with the axes of the tree without scanning.
      slot: None for the parameter itself; "v_row" and "v_col" lack some of its axes.
      joined: Whether heads and kv are one axis, as this package once wrote scanned trees.
    """
    axes: list[str] = []
    for axis in row.axes:
        axes += ("num_heads", "d_kv") if axis == "joined_kv" and not joined else (axis,)
    axes.insert(1, _LAYERS)
    if slot == "v_row":
        return tuple(axis for axis in axes if axis in (_row_axis(row), _LAYERS))
    # v_col lacks the row axis; the parameter itself (slot None) lacks nothing.
    return tuple(axis for axis in axes if slot != "v_col" or axis != _row_axis(row))


def _row_axis(row: naming.Row) -> str:
    """The axis that v_row keeps and v_col averages over: T5X's ROW axis, embed."""
    # Relative position biases have none. T5X never factors them, other optimizers may.
    return "d_model" if "d_model" in row.axes else row.axes[0]


def _scan_slot(slot: str | None, row: naming.Row, shape: tuple[int, ...]) -> str | None:
    """The scanned tree's name of a slot; its own inverse, since two slots can only swap."""
    if slot not in _FACTORED:
        return slot
    if naming.t5x_dropped_axes(shape)[slot] == _mean_axis(slot, row):
        return slot
    return {"v_row": "v_col", "v_col": "v_row"}[slot]


def _mean_axis(slot: str, row: naming.Row) -> int:
    """The axis of one layer's matrix that a scanned tree's factored slot averages over."""
    row_axis = row.axes.index(_row_axis(row))
    return row_axis if slot == "v_col" else 1 - row_axis


def _key(path: str, slot: str | None) -> str:
    return naming.PARAMETERS + path if slot is None else naming.slot_key(path, slot)


def _scan_outputs(tensors: Mapping[str, TensorInfo], shape: ModelShape) -> Iterator[Output]:
    """Yields the arrays of the scanned tree, each built from its layers' tensors.

    Args:
      tensors: Flat key -> shape and type, not scanned.
      shape: The model's sizes.
    """
    to_average = kernels_to_average(tensors)
    for key, info in tensors.items():
        path, slot = (key, None) if key == naming.STEP else naming.split_key(key)
        row, layer = naming.find_row(path, "t5x", shape.decoder_only) or (None, None)
        _, _, rest = path.partition("/")
        # A tensor outside of layers is the same in both trees.
        if row is None or not (row.tower or rest == naming.RELATIVE_BIAS):
            yield Output(key, info, (key,), next)
        # Layer 0 represents all; the others' tensors are read when its array is built.
        elif layer in (None, 0) and slot == "v" and path in to_average:
            for name in _FACTORED:
                yield _scan_output(path, slot, name, row, info, shape)
        elif layer in (None, 0):
            name = _scan_slot(slot, row, tensors[naming.PARAMETERS + path].shape)
            yield _scan_output(path, slot, name, row, info, shape)


def kernels_to_average(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Returns the paths of kernels whose full second moment a scanned tree stores as two means.

    There are none if the optimizer does not factor large kernels either, that is, if Adafactor's
    `factored` is off.
    """
    kernels = {}
    for key, info in tensors.items():
        path, slot = (key, None) if key == naming.STEP else naming.split_key(key)
        if slot == "v" and len(info.shape) == 2:
            kernels[path] = info.shape
    if any(min(shape) >= _MIN_DIM_SIZE_TO_FACTOR for shape in kernels.values()):
        return set()
    return {path for path in kernels if path.endswith("/kernel") and "/layers_" in path}


def _scan_output(
    path: str, slot: str | None, name: str | None, row: naming.Row, info: TensorInfo, of: ModelShape
) -> Output:
    """The scanned tree's array for all layers' tensors at a path.

    Args:
      path: The parameter's path in the first layer, or that of a shared one.
      slot: The slot to read; None for the parameter itself.
      name: The slot to write.
      row: The parameter's row.
      info: Shape and type in one layer.
      of: The model.
    """
    tower, _, rest = path.partition("/")
    rest = rest.removeprefix("layers_0/")
    count = of.num_encoder_layers if tower == "encoder" else of.num_decoder_layers
    paths = [f"{tower}/layers_{n}/{rest}" for n in range(count)] if row.tower else [path]
    axes = _scan_axes(row, name)
    sizes = tuple(count if axis == _LAYERS else getattr(of, axis) for axis in axes)
    stacked = TensorInfo(sizes, info.dtype)
    mean_over = _mean_axis(name, row) if slot == "v" and name in _FACTORED else None
    return Output(
        _key(f"{tower}/{tower}/{rest}", name),
        stacked,
        tuple(_key(layer_path, slot) for layer_path in paths),
        functools.partial(_stack, info=stacked, axis=axes.index(_LAYERS), mean_over=mean_over),
    )


def _stack(
    arrays: Iterator[np.ndarray], info: TensorInfo, axis: int, mean_over: int | None
) -> np.ndarray:
    """Stacks the layers' arrays; repeats a single array that all layers share."""
    result = tensors.empty(info.shape, info.dtype)
    places, array = np.moveaxis(result, axis, 0), np.empty(())
    for place in places:
        # When the iterator is exhausted, repeat the last array: a shared bias goes into each layer.
        array = next(arrays, array)
        if mean_over is not None:
            # Use float64, so that the mean is rounded once.
            array = array.mean(axis=mean_over, dtype=np.float64).astype(info.dtype)
        place[...] = array.reshape(place.shape)
    return result


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where one layer's array is in a scanned tree; `layer` is None if the layers share it."""

    name: str
    axis: int
    layer: int | None


class _UnscannedArrays:
    """Reads a scanned tree layer by layer, keeping the last stacked array in memory.

    Heads may have their own axis, as in scalable_t5, or be joined with kv, as in scanned trees that
    earlier versions of this package wrote.

    Args:
      arrays: The scanned tree's arrays, without dummies.
    """

    def __init__(self, arrays: Arrays):
        self._arrays = arrays
        self._bias_per_layer = _biases_differ(arrays)
        self._places: dict[str, _Place] = {}
        self._last: tuple[str, np.ndarray] | None = None
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in arrays.tensors.items():
            self._enter(name, info)

    def read(self, name: str) -> np.ndarray:
        """Reads one layer's array."""
        if name not in self._places:
            return self._arrays.read(name)
        place = self._places[name]
        if self._last is None or self._last[0] != place.name:
            self._last = None  # free the old array before the next is read
            self._last = place.name, self._arrays.read(place.name)
        stacked = np.moveaxis(self._last[1], place.axis, 0)
        layer = stacked[place.layer or 0]
        result = tensors.empty(self.tensors[name].shape, stacked.dtype)
        result.reshape(layer.shape)[...] = layer
        return result

    def _enter(self, name: str, info: TensorInfo) -> None:
        parts = self._parse_scan(name)
        if parts is None:
            self.tensors[name] = info  # as in other trees, or to be named as unknown
            return
        tower, rest, slot, row = parts
        parameter = self._arrays.tensors.get(f"{naming.PARAMETERS}{tower}/{tower}/{rest}")
        # Joined heads leave one axis fewer: the row's own and the layers'.
        joined = parameter is not None and len(parameter.shape) == len(row.axes) + 1
        axes, parameter_axes = _scan_axes(row, slot, joined), _scan_axes(row, None, joined)
        if (
            parameter is None
            or len(info.shape) != len(axes)
            or len(parameter.shape) != len(parameter_axes)
        ):
            self.tensors[name] = info
            return
        axis = axes.index(_LAYERS)
        shape = _plain_shape(info.shape, axes)
        plain_slot = _scan_slot(slot, row, _plain_shape(parameter.shape, parameter_axes))
        shared = row.bias_per_layer is False
        for layer in [None] if shared else range(info.shape[axis]):
            path = f"{tower}/{rest}" if shared else f"{tower}/layers_{layer}/{rest}"
            key = _key(path, plain_slot)
            self._places[key] = _Place(name, axis, layer)
            self.tensors[key] = TensorInfo(shape, info.dtype)

    def _parse_scan(self, name: str) -> tuple[str, str, str | None, naming.Row] | None:
        """Tower, rest of the path, slot and row of an array with stacked layers; else None."""
        slots = "|".join(naming.SLOT_NAMES)
        match = re.fullmatch(
            rf"(?:target|state/param_states)/(encoder|decoder)/\1/(.+?)(?:/({slots}))?", name
        )
        if not match:
            return None
        tower, rest, slot = match.groups()
        shared = rest == naming.RELATIVE_BIAS and not self._bias_per_layer
        path = f"{tower}/{rest}" if shared else f"{tower}/layers_0/{rest}"
        row = naming.find_row(path, "t5x") or naming.find_row(path, "t5x", decoder_only=True)
        return (tower, rest, slot, row[0]) if row else None


def _biases_differ(arrays: Arrays) -> bool:
    """Whether a tower's layers have different relative position biases, or slots of them."""
    names = [name for name in arrays.tensors if f"/{naming.RELATIVE_BIAS}" in name]
    for name in names:
        # Factored slots do not show it: means may be equal while the biases differ.
        if len(arrays.tensors[name].shape) == 3:
            first, *others = np.moveaxis(arrays.read(name), 1, 0)
            if any(layer.tobytes() != first.tobytes() for layer in others):
                return True
    return False


def _plain_shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """One layer's shape in the plain tree: no axis of layers, heads and kv as one."""
    sizes = dict(zip(axes, shape, strict=True))
    del sizes[_LAYERS]
    if "d_kv" in sizes:
        heads = sizes.pop("num_heads")
        sizes["d_kv"] *= heads
    return tuple(sizes.values())
