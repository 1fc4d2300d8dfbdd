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
from t0repro.model.blocks import Memory, Tower
from t0repro.model.decoder_only import delayed, text_to_self, visible_targets
from t0repro.model.layers import (
    Embedding,
    causal,
    keys_and_values,
    same_segment,
)
from t0repro.model.shapes import Array, Bool, Float, Int

Batch = Mapping[str, jax.Array | np.ndarray]


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
            self.decoder = Tower(self.config, dtype, encoder=False)
            return
        self.token_embedder = Embedding(self.config, dtype)
        self.encoder = Tower(self.config, dtype, encoder=True, embedder=self.token_embedder)
        self.decoder = Tower(self.config, dtype, encoder=False, embedder=self.token_embedder)

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
            targets, segments = batch["targets"], batch.get("targets_segmentation")
            return self.decoder(
                shift_right(targets, segments),
                visible_targets(self.config, targets, segments),
                nonpadding(segments, self.dtypes),
                deterministic=deterministic,
            )
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
        return self.encoder(
            inputs,
            same_segment(segments, segments),
            nonpadding(segments, self.dtypes),
            deterministic=deterministic,
        )

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
        """Float32 logits of the targets given the encoder's outputs.

        Args:
          encoded: the encoder's outputs, or what `cross_attention_memory` makes of them.
          encoder_segments: of the inputs.
          targets: shifted right here.
          segments: of the targets; a position attends to earlier ones of its own segment.
          deterministic: False draws dropout.
          segments_read: the segment of the inputs that each target attends to; its own by default.
        """
        reads = segments if segments_read is None else segments_read
        return self.decoder(
            shift_right(targets, segments),
            causal(targets.shape[1]) & same_segment(segments, segments),
            nonpadding(segments, self.dtypes),
            encoded,
            same_segment(reads, encoder_segments),
            deterministic=deterministic,
        )

    def decode_step(
        self,
        tokens: Int[Array, "rows 1"],
        position: Int[Array, ""],
        length: int,
        encoded: Memory | None,
        encoded_visible: Bool[Array, "batch 1 1 memory"] | None,
    ) -> Float[Array, "rows 1 vocab"]:
        """Float32 logits of one position, given the collection "cache" of the earlier ones.

        Args:
          tokens: what the decoder reads there.
          position: from 0 on.
          length: positions that the cache has room for.
          encoded: of `cross_attention_memory`; None in a model without an encoder. Beams are rows
            next to each other that share a row of it.
          encoded_visible: which inputs are no padding.
        """
        earlier = jnp.arange(length) <= position
        return self.decoder(
            tokens,
            earlier[None, None, None],
            nonpadding(None, self.dtypes),
            encoded,
            encoded_visible,
            deterministic=True,
            position=position,
        )


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

    Mesh TensorFlow does the latter in Bitransformer.call_simple. There, too, a negative id becomes
    a separate segment.
    """
    return jnp.minimum(ids, 1) if segmentation is None else segmentation


def shift_right(
    targets: Int[Array, "batch length"], segments: Int[Array, "batch length"] | None
) -> Int[Array, "batch length"]:
    """What the decoder reads: each segment's targets one place later, beginning with 0.

    Without segments, as in a language model whose rows are not packed, the row is one sequence.

    Source: mesh_tensorflow.transformer.transformer.autoregressive_inputs.
    """
    inputs = jnp.abs(delayed(targets))
    if segments is not None:
        inputs = inputs * (segments == delayed(segments)).astype(inputs.dtype)
    return inputs


def nonpadding(
    segments: Int[Array, "batch length"] | None, dtypes: DTypePolicy
) -> Float[Array, "#batch #length 1"]:
    """One where there is a token and zero at padding, by which Mesh TensorFlow multiplies.

    Without segments nothing is known to be padding, and there is a single one for all.
    """
    dtype = jnp.dtype(dtypes.activation)
    if segments is None:
        return jnp.ones((1, 1, 1), dtype)
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
