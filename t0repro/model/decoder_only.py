"""T5 without an encoder: Mesh TensorFlow's Unitransformer as a language model.

A model of type `lm` takes batches of `targets` and, when packed, `targets_segmentation`. A
`delimited_lm` takes `inputs` too; `text_to_self` puts each example's inputs before its targets:

    inputs                5  8  1 | 9  1 | 0
    targets               6  1 | 3  4  1 | 0
    targets of the model  5  8  1  6  1 | 9  1  3  4  1 | 0  0

Unlike in the encoder-decoder, unpacked rows have no segments at all. Padding is read like any other
token; under causal attention, the positions before it do not see it.
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
    """Marks targets that belong to an example's inputs (transformer.delimited_lm_inputs_mask).

    Each example is two sequences that end in EOS, so what follows an even number of EOS is inputs.
    """
    ends = (targets == EOS).astype(jnp.int32)
    # Minus `ends`: an EOS belongs to the sequence that it ends.
    return (jnp.cumsum(ends, axis=-1) - ends) % 2 == 0


def visible_targets(
    config: ModelConfig,
    targets: Int[Array, "batch length"],
    segments: Int[Array, "batch length"] | None,
) -> Bool[Array, "#batch 1 length length"]:
    """Whether each position (third axis) sees each other one (fourth axis).

    With full attention, inputs have priority 0, and so does the position after them, where their
    EOS is read and the first target is predicted. As in Mesh TensorFlow, this applies to the inputs
    of *every* example in a row; the segments keep examples apart.
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
    """Returns the batch as the model reads it: a `delimited_lm` reads inputs and targets as one.

    Rows become inputs_length + targets_length long. The arrays of any other model, or of a batch
    without inputs, are returned unchanged.

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
    # Sort by segment, padding last. The sort is stable, so that within a segment inputs stay before
    # targets and tokens keep their order.
    order = jnp.argsort(jnp.where(joined == 0, joined.shape[1] + 1, joined), axis=1, stable=True)

    def sort(x: jax.Array) -> jax.Array:
        x = jnp.where(joined == 0, 0, x)
        return jnp.take_along_axis(x, order, axis=1)

    result = {"targets": sort(jnp.concatenate([inputs, targets], axis=1))}
    if packed:
        result["targets_segmentation"] = sort(joined)
    return result
