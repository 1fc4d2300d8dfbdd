"""Converts T5X's scanned trees (scalable_t5), which stack a tower's layers in one array.

There, `encoder/layers_{0,1,...}/mlp/wo/kernel` of shape [d_ff, d_model] are one array
`encoder/encoder/mlp/wo/kernel` of shape [d_ff, layers, d_model] (param_scan_axis is 1). Attention
heads have their own axis: query, key and value are [d_model, layers, heads, kv], out is [heads,
layers, kv, d_model]. Each layer has its own relative position bias. Writing repeats a bias that a
tower's layers share, and reading turns equal biases into a shared one.

Adafactor's factored slots follow the names of the axes, not their sizes: v_row averages over the
axes other than d_model, v_col over d_model (t5x/adafactor.py, standard_logical_factor_rules). A
mean over heads and kv equals the mean over the two joined, so slots that both trees factor have the
same values. scalable_t5 factors every kernel of a layer, however small; other trees do not factor a
kernel's second moment if one of its sides is below 128 (min_dim_size_to_factor). Stacking takes the
means of such a kernel. They equal T5X's up to rounding: Adafactor averages squared gradients over
time, and a mean of averages is the average of the means. The full moment cannot be recovered from
the means.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from t0repro.converters import tensors
from t0repro.converters.tensors import Output, TensorInfo
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

_LAYERS = "layers"
_FACTORED = ("v_row", "v_col")
# Mesh TensorFlow's and T5X's Adafactor factor a matrix if its second longest side is at least this.
MIN_DIM_SIZE_TO_FACTOR = 128


class Arrays(Protocol):
    """Arrays by flat key."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and types."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One array."""
        ...


def is_scanned(names: Mapping[str, TensorInfo]) -> bool:
    """Returns whether the flat keys belong to a scanned tree."""
    return any(
        name.startswith(("target/encoder/encoder/", "target/decoder/decoder/")) for name in names
    )


def scanned_axes(row: naming.Row, slot: str | None = None, joined: bool = False) -> tuple[str, ...]:
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


def _scanned_slot(slot: str | None, row: naming.Row, shape: tuple[int, ...]) -> str | None:
    """The scanned tree's name of a slot; its own inverse, since two slots can only swap."""
    if slot not in _FACTORED:
        return slot
    kept = row.axes.index(_row_axis(row))
    averaged = kept if slot == "v_col" else 1 - kept
    if naming.t5x_dropped_axes(shape)[slot] == averaged:
        return slot
    return {"v_row": "v_col", "v_col": "v_row"}[slot]


def _key(path: str, slot: str | None) -> str:
    return naming.PARAMETERS + path if slot is None else naming.slot_key(path, slot)


# --- Writing -------------------------------------------------------------------------------------


def scanned_outputs(tensors: Mapping[str, TensorInfo], shape: ModelShape) -> Iterator[Output]:
    """Yields the arrays of the scanned tree, each built from its layers' tensors.

    Args:
      tensors: Flat key -> shape and type, not scanned.
      shape: The model's sizes.
    """
    to_average = averaged_kernels(tensors)
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
                yield _stacked(path, slot, name, row, info, shape)
        elif layer in (None, 0):
            name = _scanned_slot(slot, row, tensors[naming.PARAMETERS + path].shape)
            yield _stacked(path, slot, name, row, info, shape)


def averaged_kernels(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Returns the paths of kernels whose full second moment a scanned tree stores as two means.

    There are none if the optimizer does not factor large kernels either, that is, if Adafactor's
    `factored` is off.
    """
    kernels = {}
    for key, info in tensors.items():
        path, slot = (key, None) if key == naming.STEP else naming.split_key(key)
        if slot == "v" and len(info.shape) == 2:
            kernels[path] = info.shape
    if any(min(shape) >= MIN_DIM_SIZE_TO_FACTOR for shape in kernels.values()):
        return set()
    return {path for path in kernels if path.endswith("/kernel") and "/layers_" in path}


def _stacked(
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
    axes = scanned_axes(row, name)
    sizes = tuple(count if axis == _LAYERS else getattr(of, axis) for axis in axes)
    stacked = TensorInfo(sizes, info.dtype)
    mean_over = None
    if name != slot and slot == "v":
        kept = row.axes.index(_row_axis(row))
        mean_over = kept if name == "v_col" else 1 - kept
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


# --- Reading -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where one layer's array is in a scanned tree; `layer` is None if the layers share it."""

    name: str
    axis: int
    layer: int | None


class UnscannedArrays:
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
        found = self._scanned(name)
        if found is None:
            self.tensors[name] = info  # as in other trees, or to be named as unknown
            return
        tower, rest, slot, row = found
        parameter = self._arrays.tensors.get(f"{naming.PARAMETERS}{tower}/{tower}/{rest}")
        # Joined heads leave one axis fewer: the row's own and the layers'.
        joined = parameter is not None and len(parameter.shape) == len(row.axes) + 1
        axes, parameter_axes = scanned_axes(row, slot, joined), scanned_axes(row, None, joined)
        if (
            parameter is None
            or len(info.shape) != len(axes)
            or len(parameter.shape) != len(parameter_axes)
        ):
            self.tensors[name] = info
            return
        axis = axes.index(_LAYERS)
        shape = _plain_shape(info.shape, axes)
        plain_slot = _scanned_slot(slot, row, _plain_shape(parameter.shape, parameter_axes))
        shared = row.bias_per_layer is False
        for layer in [None] if shared else range(info.shape[axis]):
            path = f"{tower}/{rest}" if shared else f"{tower}/layers_{layer}/{rest}"
            key = _key(path, plain_slot)
            self._places[key] = _Place(name, axis, layer)
            self.tensors[key] = TensorInfo(shape, info.dtype)

    def _scanned(self, name: str) -> tuple[str, str, str | None, naming.Row] | None:
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
        found = naming.find_row(path, "t5x") or naming.find_row(path, "t5x", decoder_only=True)
        return (tower, rest, slot, found[0]) if found else None


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
