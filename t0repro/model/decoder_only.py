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

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.run_config import ModelConfig
from t0repro.model.layers import (
    MLP,
    Attention,
    Dense,
    Dropout,
    Embedding,
    RelativePositionBias,
    RMSNorm,
    fan_in_truncated_normal,
    recomputed,
    segment_bias,
    visibility_bias,
)
from t0repro.model.shapes import Array, Bool, Float, Int

EOS = 1


class Layer(nn.Module):
    """Self-attention and feed-forward layer, each on a normalised input and with a residual."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        bias: Float[Array, "#batch heads length length"],
        present: Float[Array, "#batch #length 1"],
        *,
        deterministic: bool,
    ) -> Float[Array, "batch length d_model"]:
        """Returns the residual stream after this layer."""
        dropout = Dropout(self.config.dropout_rate, -2)
        y = (
            RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="pre_self_attention_layer_norm")(
                x
            )
            * present
        )
        if self.config.position_bias_per_layer:
            bias = bias + _position_bias(self.config, self.dtype)(x.shape[1])
        attention = Attention(self.config, self.dtype, name="self_attention")
        y = attention(y, y, bias, deterministic=deterministic)
        x = x + dropout(y, deterministic=deterministic)
        y = (
            RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="pre_mlp_layer_norm")(x)
            * present
        )
        y = MLP(self.config, self.dtype, name="mlp")(y, deterministic=deterministic)
        return x + dropout(y, deterministic=deterministic)


def _position_bias(config: ModelConfig, dtype: jnp.dtype) -> RelativePositionBias:
    """The position bias of the tower, or of the layer, that this is called in."""
    return RelativePositionBias(config, dtype, config.input_full_attention, name="relpos_bias")


class DecoderOnly(nn.Module):
    """The only tower of a language model, its embedding included."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        targets: Int[Array, "batch length"],
        segments: Int[Array, "batch length"] | None,
        *,
        deterministic: bool,
    ) -> Float[Array, "batch length vocab"]:
        """Float32 logits of each target given those before it.

        Args:
          targets: what `text_to_self` makes; shifted right here.
          segments: of the targets when rows are packed.
          deterministic: False draws dropout.
        """
        config, length = self.config, targets.shape[1]
        dropout = Dropout(config.dropout_rate, -2)
        embedder = Embedding(config, self.dtype, name="token_embedder")
        bias = visibility_bias(_visible(config, targets))
        if not config.position_bias_per_layer:
            bias = _position_bias(config, self.dtype)(length) + bias
        present = jnp.ones((1, 1, 1), self.dtype)
        if segments is not None:
            bias = bias + segment_bias(segments, segments)
            present = (segments != 0).astype(self.dtype)[..., None]
        x = dropout(embedder(shifted(targets, segments)), deterministic=deterministic)
        for index in range(config.num_decoder_layers):
            layer = Layer(config, self.dtype, name=f"layers_{index}")
            x = recomputed(layer, deterministic)(x, bias, present)
        x = RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="decoder_norm")(x)
        x = dropout(x, deterministic=deterministic) * present
        if config.logits_from_embedding:
            return embedder.attend(x)
        init = fan_in_truncated_normal
        return Dense(
            config.vocab_size, self.dtype, init, jnp.dtype("float32"), name="logits_dense"
        )(x)


def shifted(
    targets: Int[Array, "batch length"], segments: Int[Array, "batch length"] | None
) -> Int[Array, "batch length"]:
    """What the model reads: each target one place later (transformer.autoregressive_inputs)."""
    inputs = jnp.abs(_delayed(targets))
    if segments is not None:
        inputs = inputs * (segments == _delayed(segments)).astype(inputs.dtype)
    return inputs


def _delayed(x: Array) -> Array:
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


def of_inputs(targets: Int[Array, "batch length"]) -> Bool[Array, "batch length"]:
    """Which targets belong to an example's inputs (transformer.delimited_lm_inputs_mask).

    Each example is two sequences that end in EOS: after an even number of EOS come inputs.
    """
    ends = (targets == EOS).astype(jnp.int32)
    return (jnp.cumsum(ends, axis=-1) - ends) % 2 == 0


def _visible(
    config: ModelConfig, targets: Int[Array, "batch length"]
) -> Bool[Array, "#batch 1 length length"]:
    """Which position (third axis) sees which (fourth axis), segments apart.

    With full attention inputs have priority 0, and so has the position after them, where their EOS
    is read and the first target predicted. As in Mesh TensorFlow, inputs of *any* example of a row
    have it, and the segments keep examples apart.
    """
    position = jnp.arange(targets.shape[1])[None]
    if config.input_full_attention:
        inputs = of_inputs(targets)
        position = position * ~(inputs | _delayed(inputs))
    return (position[:, :, None] >= position[:, None, :])[:, None]


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
