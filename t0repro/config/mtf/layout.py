"""Reads a Layout off mesh_shape and layout_rules."""

from __future__ import annotations

import importlib
import math

from t0repro.config.mtf.arguments import RunArguments
from t0repro.config.mtf.parser import UTILS
from t0repro.config.run_config import Layout


def layout_of(arguments: RunArguments, tpu_mesh: str | None) -> Layout:
    """How mesh_shape and layout_rules divide the run; all devices along data without a mesh.

    Mesh TensorFlow may divide only some of heads, d_ff and vocabulary; here it is all three.

    Args:
      arguments: of `utils.run`.
      tpu_mesh: see `RunInputs.tpu_mesh`.

    Raises:
      NotOnJax: for a rule that divides d_model.
    """
    mtf = importlib.import_module("mesh_tensorflow")
    shape = mtf.convert_to_shape(arguments.run["mesh_shape"])
    rules = mtf.convert_to_layout_rules(arguments.run["layout_rules"])
    arguments.note("layout", f"{UTILS}.run", "mesh_shape")
    # One device: nothing to divide, and rules without a mesh mean nothing.
    if shape.size == 1:
        return Layout()

    # A set: dimensions on the same mesh axis are divided by it once.
    def parts(*dimensions: str) -> int:
        axes = {
            rules.tensor_dimension_to_mesh_axis(mtf.Dimension(name, shape.size), shape)
            for name in dimensions
        } - {None}
        return math.prod(shape.dims[axis].size for axis in axes)

    if parts("d_model") > 1:
        arguments.refuse("layout_rules", "a rule that divides d_model")
    topology = None
    if tpu_mesh:
        selector = f"{UTILS}.tpu_mesh_shape"
        arguments.note("layout", selector, "tpu_topology")
        # Only a mesh that was counted for a TPU follows the devices that are there.
        bound = arguments.arguments(selector, arguments.utils.tpu_mesh_shape)
        topology = bound["tpu_topology"]
    return Layout(parts("batch"), parts("d_ff", "heads", "vocab"), topology=topology)
