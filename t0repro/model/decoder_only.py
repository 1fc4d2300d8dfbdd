"""T5 without an encoder: Mesh TensorFlow's Unitransformer as a language model.

A batch of a model of type `lm` has `targets` and, when packed, `targets_segmentation`. One of type
`delimited_lm` has `inputs` too; `text_to_self` puts each example's inputs before its targets:

    inputs                5  8  1 | 9  1 | 0
    targets               6  1 | 3  4  1 | 0
    targets of the model  5  8  1  6  1 | 9  1  3  4  1 | 0  0

Unlike the encoder-decoder's, rows that are not packed have no segments at all: padding is read as
any token, and what comes before it does not see it because nothing sees what comes later.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.run_config import ModelConfig
from t0repro.model.layers import same_segment
from t0repro.model.shapes import Array, Bool, Int

EOS = 1


def of_inputs(targets: Int[Array, "batch length"]) -> Bool[Array, "batch length"]:
    """Which targets belong to an example's inputs (transformer.delimited_lm_inputs_mask).

    Each example is two sequences that end in EOS: after an even number of EOS come inputs.
    """
    ends = (targets == EOS).astype(jnp.int32)
    return (jnp.cumsum(ends, axis=-1) - ends) % 2 == 0


def visible_targets(
    config: ModelConfig,
    targets: Int[Array, "batch length"],
    segments: Int[Array, "batch length"] | None,
) -> Bool[Array, "#batch 1 length length"]:
    """Which position (third axis) sees which (fourth axis).

    With full attention, inputs have priority 0, and so has the position after them, where their EOS
    is read and the first target predicted. As in Mesh TensorFlow, inputs of *any* example of a row
    have it, and the segments keep examples apart.
    """
    priority = jnp.arange(targets.shape[1])[None]
    if config.input_full_attention:
        inputs = of_inputs(targets)
        priority = priority * ~(inputs | delayed(inputs))
    visible = (priority[:, :, None] >= priority[:, None, :])[:, None]
    return visible if segments is None else visible & same_segment(segments, segments)


def delayed(x: Array) -> Array:
    """Each row one place later, with a zero in front."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


def text_to_self(
    config: ModelConfig, batch: Mapping[str, jax.Array | np.ndarray]
) -> dict[str, jax.Array]:
    """The batch as the model reads it: of a `delimited_lm`, inputs and targets in one sequence.

    Rows become inputs_length + targets_length long. A batch of another model, or one without
    inputs, is returned as it is.

    Source: mesh_tensorflow.transformer.utils._dynamic_text2self.
    """
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    if config.model_type != "delimited_lm" or "inputs" not in arrays:
        return arrays
    inputs, targets = arrays["inputs"], arrays["targets"]
    packed = "inputs_segmentation" in arrays
    segments = [
        arrays[f"{name}_segmentation"] if packed else (arrays[name] != 0).astype(jnp.int32)
        for name in ("inputs", "targets")
    ]
    joined = jnp.concatenate(segments, axis=1)
    # By segment, within it inputs before targets, padding last: a stable sort keeps the order.
    order = jnp.argsort(jnp.where(joined == 0, joined.shape[1] + 1, joined), axis=1, stable=True)

    def sort(x: jax.Array) -> jax.Array:
        x = jnp.where(joined == 0, 0, x)
        return jnp.take_along_axis(x, order, axis=1)

    result = {"targets": sort(jnp.concatenate([inputs, targets], axis=1))}
    if packed:
        result["targets_segmentation"] = sort(joined)
    return result
