"""The logical names of a train state's axes."""

from __future__ import annotations

from typing import Any

import flax.linen.partitioning
import flax.traverse_util
import jax
from jax.sharding import PartitionSpec

from t0repro.partitioning.rules import parameter_axes, slot_spec


def axis_names(params_axes: Any, params: Any) -> Any:
    """The tree of parameters with a PartitionSpec of axis names in place of each.

    Args:
      params_axes: the collection that flax's partitioning keeps beside a model's parameters.
      params: the parameters.

    Raises:
      ValueError: if the two trees have different parameters.
    """
    names = flax.linen.partitioning.get_axis_names(params_axes)
    different = _flat(names).keys() ^ _flat(params).keys()
    if different:
        raise ValueError(f"params and params_axes differ: {', '.join(sorted(different))}.")
    return names


def logical_axes(state: Any) -> Any:
    """See `TrainState.as_logical_axes`.

    Args:
      state: a state that holds each layer by itself.
    """
    shapes = {path: value.shape for path, value in _flat(state.params).items()}
    given = {}
    if state.params_axes is not None:
        given = _flat(axis_names(state.params_axes, state.params))

    def axes_of(parameter: str) -> PartitionSpec:
        return PartitionSpec(*(given.get(parameter) or parameter_axes(parameter)))

    def of_array(path: Any, array: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind, _, rest = name.partition("/")
        if kind == "params":
            return axes_of(rest)
        # slots/encoder/encoder_norm/scale/v: the last part names the slot.
        parameter, _, slot = rest.rpartition("/")
        if kind != "slots" or parameter not in shapes:
            return PartitionSpec()
        spec = slot_spec(axes_of(parameter), slot, shapes[parameter])
        # A slot that is not used has one entry, and no axes of its parameter.
        return spec if len(spec) == len(array.shape) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(of_array, state).replace(params_axes=None)


def _flat(tree: Any) -> Any:
    return flax.traverse_util.flatten_dict(tree, sep="/")
