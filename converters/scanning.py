"""T5X's scanned trees: those of scalable_t5, with the layers of a tower stacked in one array.

`encoder/layers_{0,1,...}/mlp/wo/kernel` of shape [d_ff, d_model] are there one array
`encoder/encoder/mlp/wo/kernel` of shape [d_ff, layers, d_model] (param_scan_axis is 1). Each layer
has its own relative position bias; the shared one of other models is repeated. The factored slots
go by the names of the axes, not by their sizes: v_row averages over the axis that is not d_model,
v_col over d_model (t5x/adafactor.py, standard_logical_factor_rules; t5x/examples/scalable_t5).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from t0repro.converters import recycling
from t0repro.converters.tensors import Output, TensorInfo
from t0repro.errors import UserError
from t0repro.parameters import layout

_RELATIVE_BIAS = "relpos_bias/rel_embedding"


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
    """Whether flat keys are a scanned tree's."""
    return any(
        name.startswith(("target/encoder/encoder/", "target/decoder/decoder/")) for name in names
    )


def _dropped_axis(slot: str, axes: tuple[str, ...]) -> int:
    """The axis of a layer's parameter that a factored slot of a scanned tree averages over."""
    # Only relative position biases have no d_model; T5X never factors theirs.
    d_model = axes.index("d_model") if "d_model" in axes else 0
    return d_model if slot == "v_col" else 1 - d_model


def _scanned_slot(slot: str | None, row: layout.Row, shape: tuple[int, ...]) -> str | None:
    """The scanned tree's name of a slot; also the inverse: two slots can only change places."""
    if slot not in ("v_row", "v_col"):
        return slot
    straight = layout.t5x_dropped_axes(shape)[slot] == _dropped_axis(slot, row.axes)
    return slot if straight else {"v_row": "v_col", "v_col": "v_row"}[slot]


def _stack_axis(slot: str | None, row: layout.Row) -> int:
    """Where the layers are in the scanned array of a parameter, or of a scanned tree's slot."""
    return 0 if slot in ("v_row", "v_col") and _dropped_axis(slot, row.axes) == 0 else 1


def _key(path: str, slot: str | None) -> str:
    return layout.PARAMETERS + path if slot is None else layout.slot_key(path, slot)


# --- Writing -------------------------------------------------------------------------------------


def scanned_outputs(
    tensors: Mapping[str, TensorInfo], layers: Mapping[str, int]
) -> Iterator[Output]:
    """The arrays of the scanned tree, each from the layers' tensors.

    Args:
      tensors: flat key -> shape and type, not scanned.
      layers: tower -> number of its layers.
    """
    decoder_only = layout.is_decoder_only(tensors)
    for key, info in tensors.items():
        path, slot = (key, None) if key == layout.STEP else layout.split_key(key)
        row, layer = layout.find_row(path, "t5x", decoder_only) or (None, None)
        tower, _, rest = path.partition("/")
        if row is None or not (row.tower or rest == _RELATIVE_BIAS):
            yield Output(key, info, (key,), next)
        elif layer in (None, 0):
            rest = rest.removeprefix("layers_0/")
            parameter = tensors[layout.PARAMETERS + path]
            name = _scanned_slot(slot, row, parameter.shape)
            axis = _stack_axis(name, row)
            count = layers[tower]
            paths = [f"{tower}/layers_{n}/{rest}" for n in range(count)] if row.tower else [path]
            stacked = TensorInfo((*info.shape[:axis], count, *info.shape[axis:]), info.dtype)
            yield Output(
                _key(f"{tower}/{tower}/{rest}", name),
                stacked,
                tuple(_key(layer_path, slot) for layer_path in paths),
                functools.partial(_stack, info=stacked, axis=axis),
            )


def _stack(arrays: Iterator[np.ndarray], info: TensorInfo, axis: int) -> np.ndarray:
    """The layers' arrays side by side; one alone, which all layers share, again and again."""
    result = recycling.empty(info.shape, info.dtype)
    places, array = np.moveaxis(result, axis, 0), np.empty(())
    for place in places:
        array = next(arrays, array)
        place[...] = array
    return result


# --- Reading -------------------------------------------------------------------------------------


class UnscannedArrays:
    """A scanned tree's arrays, layer by layer. The last array that was read is kept.

    Args:
      arrays: the scanned tree's, without dummies.
      where: the checkpoint's path, for messages.
    """

    def __init__(self, arrays: Arrays, where: str):
        self._arrays, self._where = arrays, where
        self._places: dict[str, tuple[str, int, int]] = {}  # key -> array, axis, layer
        self._last: tuple[str, np.ndarray] | None = None
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in arrays.tensors.items():
            self._enter(name, info)

    def read(self, name: str) -> np.ndarray:
        """One layer's array.

        Raises:
          UserError: if the layers' relative position biases, of which only one can be kept, differ.
        """
        if name not in self._places:
            return self._arrays.read(name)
        scanned, axis, layer = self._places[name]
        if self._last is None or self._last[0] != scanned:
            self._last = None  # first make room
            self._last = scanned, self._arrays.read(scanned)
        stacked = np.moveaxis(self._last[1], axis, 0)
        if layer < 0 and any(one.tobytes() != stacked[0].tobytes() for one in stacked[1:]):
            raise UserError(
                f"The layers differ in {scanned}; only one relative position bias that all layers"
                " of a tower share can be kept.",
                where=self._where,
            )
        result = recycling.empty(self.tensors[name].shape, stacked.dtype)
        result[...] = stacked[max(layer, 0)]
        return result

    def _enter(self, name: str, info: TensorInfo) -> None:
        match = re.fullmatch(
            r"(target|state/param_states)/(encoder|decoder)/\2/(.+?)(/(?:v_row|v_col|v|m|adam_m|adam_v|momentum_v))?",
            name,
        )
        if not match:
            self.tensors[name] = info
            return
        _, tower, rest, slot = match.groups()
        slot = slot and slot[1:]
        shared = rest == _RELATIVE_BIAS
        path = f"{tower}/{rest}" if shared else f"{tower}/layers_0/{rest}"
        found = layout.find_row(path, "t5x") or layout.find_row(path, "t5x", decoder_only=True)
        if not found:
            self.tensors[name] = info  # to be named as unknown
            return
        axis = _stack_axis(slot, found[0])
        shape = (*info.shape[:axis], *info.shape[axis + 1 :])
        parameter = self._arrays.tensors[f"{layout.PARAMETERS}{tower}/{tower}/{rest}"].shape
        plain_slot = _scanned_slot(slot, found[0], (parameter[0], *parameter[2:]))
        for layer in range(1 if shared else info.shape[axis]):
            layer_path = path if shared else f"{tower}/layers_{layer}/{rest}"
            key = _key(layer_path, plain_slot)
            self._places[key] = name, axis, -1 if shared else layer
            self.tensors[key] = TensorInfo(shape, info.dtype)
