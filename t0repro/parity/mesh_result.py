"""Mesh TensorFlow's results under the JAX stack's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from t0repro.converters.sources import load_any
from t0repro.parameters import layout
from t0repro.parity.jax_run import DECODER_SUBLAYERS, ENCODER_SUBLAYERS, StackResult
from t0repro.parity.mesh_jobs import MeshResult


def as_stack_result(result: MeshResult, snapshots: Sequence[int]) -> StackResult:
    """Converts a job's results to the JAX stack's form; square matrices' slots are exchanged.

    Args:
      result: the results of a job with these snapshots.
      snapshots: numbers of steps done; 0 is the start.
    """
    arrays = result.arrays
    return StackResult(
        losses=arrays["losses"],
        learning_rates=arrays["learning_rates"],
        # load_any gives T5X's names, with the slots of square matrices exchanged.
        trees={done: load_any(result.checkpoint(done)) for done in snapshots},
        activations={
            _activation_name(name): x for name, x in _in_order(result.group("activations")).items()
        },
        gradients=_by_path(result.group("gradients")),
        token_losses=arrays.get("token_losses"),
        scores=arrays.get("scores"),
    )


def _by_path(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients under T5X's paths instead of Mesh TensorFlow's names."""
    bias_per_layer = layout.has_bias_per_layer(map(layout.mtf_to_path, gradients))
    found = {}
    for variable, gradient in gradients.items():
        path = layout.mtf_to_path(variable, bias_per_layer)
        assert path is not None, variable
        found[path] = gradient
    return found


def _in_order(activations: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sorts by the number that each name begins with, and removes it."""
    # Numbers are padded with zeros, so that sorting restores the order of the computation.
    return {name.partition("/")[2]: activations[name] for name in sorted(activations)}


def _activation_name(name: str) -> str:
    """Turns `decoder/block_001/layer_002` into `decoder/layers_1/mlp`; keeps other names."""
    found = re.fullmatch(r"(\w+)/block_(\d+)/layer_(\d+)", name)
    if found is None:
        return name.replace("transformer/", "decoder/")
    tower, block, layer = found[1], int(found[2]), int(found[3])
    sublayers = {
        "encoder": ENCODER_SUBLAYERS,
        "decoder": DECODER_SUBLAYERS,
        # A decoder-only block has no cross attention between its two sublayers.
        "transformer": (DECODER_SUBLAYERS[0], DECODER_SUBLAYERS[-1]),
    }[tower]
    return f"{'encoder' if tower == 'encoder' else 'decoder'}/layers_{block}/{sublayers[layer]}"
