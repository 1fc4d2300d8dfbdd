"""T5 1.0 and 1.1 in Flax: T5X's parameter tree, Mesh TensorFlow's semantics.

A batch is a mapping of int32 arrays [batch, length]: `inputs`, `targets` and, when examples are
packed several to a row, `inputs_segmentation`, `targets_segmentation` (1, 2, ... per example, 0 for
padding) and `inputs_position`, `targets_position`:

    inputs                5  8  1 | 9  7  1 | 0
    inputs_segmentation   1  1  1 | 2  2  2 | 0
    targets               6  4  1 | 3  1    | 0  0
    targets_segmentation  1  1  1 | 2  2    | 0  0
    decoder reads         0  6  4 | 0  3    | 0  0

Positions are not read: relative positions within a segment equal those within the row, which is
also why Mesh TensorFlow drops them (Unitransformer.call_simple). A negative target is a target
without loss; the decoder reads its absolute value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.config.run_config import DTypePolicy, ModelConfig
from t0repro.model.decoder_only import DecoderOnly, text_to_self
from t0repro.model.layers import (
    MLP,
    Attention,
    Dense,
    Dropout,
    Embedding,
    KeysAndValues,
    RelativePositionBias,
    RMSNorm,
    causal_bias,
    fan_in_truncated_normal,
    keys_and_values,
    recomputed,
    segment_bias,
)
from t0repro.model.shapes import Array, Float, Int

Batch = Mapping[str, jax.Array | np.ndarray]
Memory = tuple[KeysAndValues, ...]  # of each decoder layer, first to last


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward layer, each on a normalised input and with a residual."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        bias: Float[Array, "batch heads length length"],
        present: Float[Array, "batch length 1"],
        *,
        deterministic: bool,
    ) -> Float[Array, "batch length d_model"]:
        """Returns the residual stream after this layer."""
        dropout = Dropout(self.config.dropout_rate, -2)
        y = (
            RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="pre_attention_layer_norm")(x)
            * present
        )
        if self.config.position_bias_per_layer:
            bias = bias + _position_bias(self.config, self.dtype, True)(x.shape[1])
        attention = Attention(self.config, self.dtype, name="attention")
        x = x + dropout(
            attention(y, y, bias, deterministic=deterministic), deterministic=deterministic
        )
        y = (
            RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="pre_mlp_layer_norm")(x)
            * present
        )
        mlp = MLP(self.config, self.dtype, name="mlp")
        return x + dropout(mlp(y, deterministic=deterministic), deterministic=deterministic)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder and feed-forward layer, with residuals."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        encoded: Float[Array, "batch memory d_model"] | KeysAndValues,
        bias: Float[Array, "batch heads length length"],
        encoder_bias: Float[Array, "batch 1 length memory"],
        present: Float[Array, "batch length 1"],
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
            bias = bias + _position_bias(self.config, self.dtype, False)(x.shape[1])
        attention = Attention(self.config, self.dtype, name="self_attention")
        x = x + dropout(
            attention(y, y, bias, deterministic=deterministic), deterministic=deterministic
        )
        y = (
            RMSNorm(
                self.dtype, self.config.rms_norm_epsilon, name="pre_cross_attention_layer_norm"
            )(x)
            * present
        )
        attention = Attention(self.config, self.dtype, name="encoder_decoder_attention")
        y = attention(y, encoded, encoder_bias, deterministic=deterministic)
        x = x + dropout(y, deterministic=deterministic)
        y = (
            RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="pre_mlp_layer_norm")(x)
            * present
        )
        mlp = MLP(self.config, self.dtype, name="mlp")
        return x + dropout(mlp(y, deterministic=deterministic), deterministic=deterministic)


def _position_bias(
    config: ModelConfig, dtype: jnp.dtype, bidirectional: bool
) -> RelativePositionBias:
    """The position bias of the tower, or of the layer, that this is called in."""
    return RelativePositionBias(config, dtype, bidirectional, name="relpos_bias")


class Encoder(nn.Module):
    """The encoder tower, from embedded inputs to normalised outputs."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        segments: Int[Array, "batch length"],
        *,
        deterministic: bool,
    ) -> Float[Array, "batch length d_model"]:
        """Encodes embedded inputs; outputs at padding are zero."""
        dropout = Dropout(self.config.dropout_rate, -2)
        present = nonpadding(segments, self.dtype)
        bias = segment_bias(segments, segments)
        if not self.config.position_bias_per_layer:
            bias = _position_bias(self.config, self.dtype, True)(x.shape[1]) + bias
        x = dropout(x, deterministic=deterministic)
        for index in range(self.config.num_encoder_layers):
            layer = EncoderLayer(self.config, self.dtype, name=f"layers_{index}")
            x = recomputed(layer, deterministic)(x, bias, present)
        x = RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="encoder_norm")(x)
        return dropout(x, deterministic=deterministic) * present


class Decoder(nn.Module):
    """The decoder tower, from embedded, shifted targets to normalised outputs or to logits."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        encoded: Float[Array, "batch memory d_model"] | Memory,
        segments: Int[Array, "batch length"],
        encoder_segments: Int[Array, "batch memory"],
        *,
        deterministic: bool,
        segments_read: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length outputs"]:
        """Float32 logits when the model has a kernel for them, else what gives them.

        Args:
          x: embedded targets, shifted right.
          encoded: the encoder's outputs, or what `cross_attention_memory` makes of them.
          segments: of the targets; a position attends to earlier ones of its own segment.
          encoder_segments: of the inputs.
          deterministic: False draws dropout.
          segments_read: the segment of the inputs that each target attends to; its own by default.
        """
        config = self.config
        dropout = Dropout(config.dropout_rate, -2)
        present = nonpadding(segments, self.dtype)
        length = x.shape[1]
        bias = causal_bias(length)
        if not config.position_bias_per_layer:
            bias = _position_bias(config, self.dtype, False)(length) + bias
        bias = bias + segment_bias(segments, segments)
        reads = segments if segments_read is None else segments_read
        encoder_bias = segment_bias(reads, encoder_segments)
        x = dropout(x, deterministic=deterministic)
        for index in range(config.num_decoder_layers):
            layer = DecoderLayer(config, self.dtype, name=f"layers_{index}")
            memory = encoded[index] if isinstance(encoded, tuple) else encoded
            x = recomputed(layer, deterministic)(x, memory, bias, encoder_bias, present)
        x = RMSNorm(self.dtype, self.config.rms_norm_epsilon, name="decoder_norm")(x)
        x = dropout(x, deterministic=deterministic) * present
        if config.logits_from_embedding:
            return x
        init = fan_in_truncated_normal
        return Dense(
            config.vocab_size, self.dtype, init, jnp.dtype("float32"), name="logits_dense"
        )(x)


class T5(nn.Module):
    """A T5: encoder and decoder, or a language model (t0repro.model.decoder_only).

    Attributes:
      config: the model's shape.
      dtypes: parameters are float32 whatever it says of masters and slices; activations follow
        `dtypes.activation`; attention logits, softmax and vocabulary logits are float32.
    """

    config: ModelConfig
    dtypes: DTypePolicy

    @nn.nowrap
    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Flax's init; a tower that shares the other's parameters has none here."""
        variables = super().init(*args, **kwargs)
        if self.config.shared_towers:
            variables["params"].pop("encoder")
        return variables

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Flax's apply; a shared tower's parameters are read, and get gradients, twice."""
        if self.config.shared_towers:
            params = variables["params"]
            encoder = encoder_of_decoder(params["decoder"])
            variables = {**variables, "params": {**params, "encoder": encoder}}
        return super().apply(variables, *args, **kwargs)

    def setup(self) -> None:
        """Creates the shared embedding and the two towers."""
        dtype = jnp.dtype(self.dtypes.activation)
        if self.config.decoder_only:
            self.decoder = DecoderOnly(self.config, dtype)
            return
        self.token_embedder = Embedding(self.config, dtype)
        self.encoder = Encoder(self.config, dtype)
        self.decoder = Decoder(self.config, dtype)

    def __call__(
        self, batch: Batch, *, deterministic: bool = True
    ) -> Float[Array, "batch targets_length vocab"]:
        """Float32 logits of each target given those before it and the inputs.

        Args:
          batch: arrays as in the module's description; without segmentation each row is one example
            and zeros are padding.
          deterministic: False draws dropout from the stream "dropout".
        """
        if self.config.decoder_only:
            batch = text_to_self(self.config, batch)
            segments = batch.get("targets_segmentation")
            language_model: Any = self.decoder
            return language_model(batch["targets"], segments, deterministic=deterministic)
        batch = {name: jnp.asarray(x) for name, x in batch.items()}
        inputs, targets = batch["inputs"], batch["targets"]
        input_segments = segments_of(inputs, batch.get("inputs_segmentation"))
        target_segments = segments_of(targets, batch.get("targets_segmentation"))
        encoded = self.encode(inputs, input_segments, deterministic=deterministic)
        return self.decode(
            encoded, input_segments, targets, target_segments, deterministic=deterministic
        )

    def encode(
        self,
        inputs: Int[Array, "batch length"],
        segments: Int[Array, "batch length"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch length d_model"]:
        """Encoder outputs of the inputs, zero at padding, in the activation type."""
        embedded = self.token_embedder(inputs)
        return self.encoder(embedded, segments, deterministic=deterministic)

    def decode(
        self,
        encoded: Float[Array, "batch memory d_model"] | Memory,
        encoder_segments: Int[Array, "batch memory"],
        targets: Int[Array, "batch length"],
        segments: Int[Array, "batch length"],
        *,
        deterministic: bool = True,
        segments_read: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length vocab"]:
        """Float32 logits of the targets, which are shifted right here; see `Decoder`."""
        embedded = self.token_embedder(shift_right(targets, segments))
        decoder: Any = self.decoder
        y = decoder(
            embedded,
            encoded,
            segments,
            encoder_segments,
            deterministic=deterministic,
            segments_read=segments_read,
        )
        return self.token_embedder.attend(y) if self.config.logits_from_embedding else y


def encoder_of_decoder(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's parameters under the names of the encoder that shares them (bi_v1_shared)."""
    names = {
        "relpos_bias": "relpos_bias",
        "pre_attention_layer_norm": "pre_self_attention_layer_norm",
        "attention": "self_attention",
        "pre_mlp_layer_norm": "pre_mlp_layer_norm",
        "mlp": "mlp",
    }
    layers = {
        layer: {ours: parameters[theirs] for ours, theirs in names.items() if theirs in parameters}
        for layer, parameters in decoder.items()
        if layer.startswith("layers_")
    }
    shared = {"relpos_bias": decoder["relpos_bias"]} if "relpos_bias" in decoder else {}
    return layers | shared | {"encoder_norm": decoder["decoder_norm"]}


def cross_attention_memory(
    model: T5, parameters: Mapping[str, Any], encoded: Float[Array, "batch memory d_model"]
) -> Memory:
    """Keys and values of the encoder's outputs for every decoder layer, to decode with often."""
    dtype, decoder = jnp.dtype(model.dtypes.activation), parameters["decoder"]
    return tuple(
        keys_and_values(
            decoder[f"layers_{index}"]["encoder_decoder_attention"],
            encoded,
            model.config.num_heads,
            dtype,
        )
        for index in range(model.config.num_decoder_layers)
    )


def segments_of(
    ids: Int[Array, "batch length"], segmentation: Int[Array, "batch length"] | None
) -> Int[Array, "batch length"]:
    """The segment of each position: as given, or min(id, 1) of an unpacked row.

    Mesh TensorFlow makes the latter up in Bitransformer.call_simple. A negative id becomes a
    segment of its own, as there.
    """
    return jnp.minimum(ids, 1) if segmentation is None else segmentation


def shift_right(
    targets: Int[Array, "batch length"], segments: Int[Array, "batch length"]
) -> Int[Array, "batch length"]:
    """What the decoder reads: each segment's targets one place later, beginning with 0."""
    inputs = jnp.abs(_delayed(targets))
    return inputs * (segments == _delayed(segments)).astype(inputs.dtype)


def _delayed(x: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Each row one place later, with a zero in front."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


def nonpadding(
    segments: Int[Array, "batch length"], dtype: jnp.dtype
) -> Float[Array, "batch length 1"]:
    """One where there is a token and zero at padding, by which Mesh TensorFlow multiplies."""
    return (segments != 0).astype(dtype)[..., None]


def initial_parameters(model: T5, key: jax.Array) -> dict:
    """Freshly drawn float32 parameters as a nested dictionary, computed under jit."""
    return _initial_parameters(model, key)


@functools.partial(jax.jit, static_argnums=0)
def _initial_parameters(model: T5, key: jax.Array) -> Any:
    names = ("targets",) if model.config.decoder_only else ("inputs", "targets")
    return model.init(key, {name: jnp.zeros((1, 1), jnp.int32) for name in names})["params"]


def count_parameters(parameters: dict) -> int:
    """The number of scalars in a tree of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(parameters))
