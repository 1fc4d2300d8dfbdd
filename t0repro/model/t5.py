"""T5 1.0 and 1.1 in Flax: T5X's parameter tree, Mesh TensorFlow's semantics.

A batch is a mapping of int32 arrays [batch, length]: `inputs`, `targets` and, when examples are
packed several to a row, `inputs_segmentation`, `targets_segmentation` (1, 2, ... per example, 0 for
padding) and `inputs_position`, `targets_position`:

    inputs                5  8  1 | 9  7  1 | 0
    inputs_segmentation   1  1  1 | 2  2  2 | 0
    targets               6  4  1 | 3  1    | 0  0
    targets_segmentation  1  1  1 | 2  2    | 0  0
    decoder reads         0  6  4 | 0  3    | 0  0

Targets may be packed where inputs are not: all segments of a row then read its one input.

Positions are not read, since relative positions within a segment equal those within the row; that
is also why Mesh TensorFlow drops them (Unitransformer.call_simple). A negative target carries no
loss; the decoder reads its absolute value. If a batch has `decoder_inputs`, the decoder reads those
in place of the shifted targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from t0repro.adapters import LORA_A, LORA_B
from t0repro.config.model import DTypePolicy, ModelConfig
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.features import Batch, translate_call
from t0repro.model.initialization import flax_hash, sample_parameters
from t0repro.model.layers import Embedding, keys_and_values, logits_dtype
from t0repro.model.shapes import Array, Bool, Float, Int
from t0repro.model.towers import CrossAttentionCache, Tower, vocabulary

EOS = 1


def mark_inputs(targets: Int[Array, "batch length"]) -> Bool[Array, "batch length"]:
    """Marks targets that belong to an example's inputs (transformer.delimited_lm_inputs_mask).

    Each example is two sequences that end in EOS, so tokens after an even number of EOS are inputs.
    """
    ends = (targets == EOS).astype(jnp.int32)
    # Minus `ends`: an EOS belongs to the sequence that it ends.
    return (jnp.cumsum(ends, axis=-1) - ends) % 2 == 0


def language_model_mask(
    config: ModelConfig,
    targets: Int[Array, "batch length"],
    segments: Int[Array, "batch length"] | None,
    full_attention: Int[Array, "batch length"] | None = None,
) -> AttentionMask:
    """Which positions of a language model see each other.

    With full attention, inputs have priority 0, and so does the position after them, which reads
    their EOS and predicts the first target. As in Mesh TensorFlow, this applies to the inputs of
    *every* example in a row; the segments keep examples apart.

    Args:
      config: the model's configuration.
      targets: what the model predicts.
      segments: of the targets; None if rows are not packed.
      full_attention: 1 at those positions, as T5X's batches have it; None finds them by the EOS of
        the inputs.
    """
    priority = jnp.arange(targets.shape[1])[None]
    if config.input_full_attention and full_attention is not None:
        priority = priority * (full_attention == 0)
        # Such a position may be padding, which in T5X nobody sees.
        segments = jnp.where(targets > 0, 1 if segments is None else segments, 0)
    elif config.input_full_attention:
        inputs = mark_inputs(targets)
        priority = priority * ~(inputs | shift_by_one(inputs))
    if segments is None:
        segments = jnp.zeros((1, targets.shape[1]), jnp.int32)
    return AttentionMask(segments, segments, priority, priority)


def shift_by_one(x: Array) -> Array:
    """Shifts each row right by one, with a zero in front."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


def text_to_self(
    config: ModelConfig, batch: Mapping[str, jax.Array | np.ndarray]
) -> dict[str, jax.Array]:
    """Returns the batch as the model reads it: for a `delimited_lm`, inputs and targets joined.

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
    # Sort by segment, padding last. The sort is stable: within a segment, inputs stay before
    # targets and tokens keep their order.
    order = jnp.argsort(jnp.where(joined == 0, joined.shape[1] + 1, joined), axis=1, stable=True)

    def sort(x: jax.Array) -> jax.Array:
        x = jnp.where(joined == 0, 0, x)
        return jnp.take_along_axis(x, order, axis=1)

    result = {"targets": sort(jnp.concatenate([inputs, targets], axis=1))}
    if packed:
        result["targets_segmentation"] = sort(joined)
    return result


class T5(nn.Module):
    """A T5: an encoder and a decoder, or a language model (t0repro.model.t5).

    Attributes:
      config: the model's shape.
      dtypes: only `activation` is used, for activations. Parameters, attention logits, softmax and
        vocabulary logits are always float32.
    """

    config: ModelConfig
    dtypes: DTypePolicy

    @nn.nowrap
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Flax's init, without the encoder's parameters if it shares the decoder's."""
        args, kwargs = translate_call(args, kwargs)
        variables = super().init(rngs, *args, **kwargs)
        if self.config.shared_towers:
            # Flax has initialized them, since both towers have modules; `apply` replaces them by
            # the decoder's.
            variables["params"].pop("encoder")
        return variables

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Flax's apply; shared parameters serve both towers, and their gradients are summed.

        It takes T5X's call, of three arrays of tokens, as well as a batch.
        """
        if self.config.shared_towers:
            params = variables["params"]
            encoder = copy_to_encoder(params["decoder"])
            variables = {**variables, "params": {**params, "encoder": encoder}}
        args, kwargs = translate_call(args, kwargs)
        return super().apply(variables, *args, **kwargs)

    def setup(self) -> None:
        """Creates the shared embedding and the two towers."""
        dtype = jnp.dtype(self.dtypes.activation)
        if self.config.decoder_only:
            self.decoder = Tower(self.config, dtype, encoder=False)
            return
        # One table for both towers; a language model's tower makes its own.
        self.token_embedder = Embedding(self.config, dtype)
        self.encoder = Tower(self.config, dtype, encoder=True, embedder=self.token_embedder)
        self.decoder = Tower(self.config, dtype, encoder=False, embedder=self.token_embedder)

    def __call__(
        self, batch: Batch, *, deterministic: bool = True, hidden: bool = False
    ) -> Float[Array, "batch targets_length features"]:
        """Float32 logits of each target given the inputs and the targets before it.

        Args:
          batch: arrays as in the module's docstring; without segmentation each row is one example
            and zeros are padding.
          deterministic: False applies dropout, with keys from the PRNG stream "dropout".
          hidden: returns the input of `logits_of`, [batch, length, d_model], instead of logits.
        """
        if self.config.decoder_only:
            batch = text_to_self(self.config, batch)
            targets, segments = batch["targets"], batch.get("targets_segmentation")
            if "decoder_inputs" in batch:
                # T5X's batch: padding may be inside a text, and nobody sees it.
                segments = jnp.where(targets > 0, 1 if segments is None else segments, 0)
            return self.decoder(
                batch.get("decoder_inputs", shift_right(targets, segments)),
                language_model_mask(self.config, targets, segments, batch.get("full_attention")),
                padding_mask(segments, self.dtypes),
                deterministic=deterministic,
                hidden=hidden,
            )
        batch = {name: jnp.asarray(x) for name, x in batch.items()}
        inputs, targets = batch["inputs"], batch["targets"]
        input_segments = segments_of(inputs, batch.get("inputs_segmentation"))
        target_segments = segments_of(targets, batch.get("targets_segmentation"))
        if "decoder_inputs" in batch:
            # As above, but negative ids are tokens.
            input_segments = jnp.where(inputs == 0, 0, input_segments)
            target_segments = jnp.where(targets == 0, 0, target_segments)
        several = "targets_segmentation" in batch and "inputs_segmentation" not in batch
        encoded = self.encode(inputs, input_segments, deterministic=deterministic)
        return self.decode(
            encoded,
            input_segments,
            targets,
            target_segments,
            deterministic=deterministic,
            segments_read=jnp.minimum(target_segments, 1) if several else None,
            inputs=batch.get("decoder_inputs"),
            hidden=hidden,
        )

    def encode(
        self,
        inputs: Int[Array, "batch length"],
        segments: Int[Array, "batch length"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch length d_model"]:
        """The encoder's outputs, zero at padding, in the activation dtype."""
        return self.encoder(
            inputs,
            AttentionMask(segments, segments),
            padding_mask(segments, self.dtypes),
            deterministic=deterministic,
        )

    def decode(
        self,
        encoded: Float[Array, "batch memory d_model"] | CrossAttentionCache,
        encoder_segments: Int[Array, "batch memory"],
        targets: Int[Array, "batch length"],
        segments: Int[Array, "batch length"],
        *,
        deterministic: bool = True,
        segments_read: Int[Array, "batch length"] | None = None,
        inputs: Int[Array, "batch length"] | None = None,
        hidden: bool = False,
    ) -> Float[Array, "batch length features"]:
        """Float32 logits of the targets given the encoder's outputs.

        Args:
          encoded: the encoder's outputs, or their `make_cross_attention_cache`.
          encoder_segments: segments of the inputs.
          targets: not shifted yet.
          segments: segments of the targets; a position attends to earlier ones of its own segment.
          deterministic: False applies dropout.
          segments_read: the input segment that each target attends to; defaults to `segments`.
          inputs: what the decoder reads; None for the shifted targets.
          hidden: returns the input of `logits_of` instead of logits.
        """
        reads = segments if segments_read is None else segments_read
        place = jnp.arange(targets.shape[1])[None]
        return self.decoder(
            shift_right(targets, segments) if inputs is None else inputs,
            AttentionMask(segments, segments, place, place),
            padding_mask(segments, self.dtypes),
            encoded,
            AttentionMask(reads, encoder_segments),
            deterministic=deterministic,
            hidden=hidden,
        )

    def decode_step(
        self,
        tokens: Int[Array, "rows 1"],
        position: Int[Array, "*rows"],
        length: int,
        encoded: CrossAttentionCache | None,
        encoded_mask: AttentionMask | None,
    ) -> Float[Array, "rows 1 vocab"]:
        """Float32 logits of one position, given earlier ones in Flax's collection "cache".

        Args:
          tokens: the decoder's inputs there.
          position: counted from 0, of all rows or [rows].
          length: number of positions in the cache.
          encoded: from `make_cross_attention_cache`; None in a model without an encoder. Beams of
            one input are adjacent rows of `tokens` that share one row of it.
          encoded_mask: which inputs are not padding.
        """
        # Beyond the position, the cache still has zeros, which attention must not see.
        places = jnp.arange(length)[None]
        same = jnp.zeros((1, 1), jnp.int32)
        place = jnp.reshape(position, (-1, 1))
        earlier = AttentionMask(same, jnp.zeros_like(places), place, places)
        return self.decoder(
            tokens,
            earlier,
            padding_mask(None, self.dtypes),
            encoded,
            encoded_mask,
            deterministic=True,
            position=position,
        )


def copy_to_encoder(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the decoder's parameters to those of the encoder that shares them (bi_v1_shared)."""
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


def make_cross_attention_cache(
    model: T5, parameters: Mapping[str, Any], encoded: Float[Array, "batch memory d_model"]
) -> CrossAttentionCache:
    """Keys and values of the encoder's outputs for every decoder layer, computed once."""
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


def logits_of(
    model: T5, parameters: Mapping[str, Any], hidden: Float[Array, "batch length d_model"]
) -> Float[Array, "batch length vocab"]:
    """Float32 logits from the model's output with `hidden`."""
    # Separate from the model's call, so that a loss can compute logits for a slice of positions.
    config, dtype, decoder = model.config, jnp.dtype(model.dtypes.activation), parameters["decoder"]
    if not config.logits_from_embedding:
        logits = vocabulary(config, dtype).apply({"params": decoder["logits_dense"]}, hidden)
    else:
        table = (decoder if config.decoder_only else parameters)["token_embedder"]
        embedding = Embedding(config, dtype)
        logits = embedding.apply({"params": table}, hidden, method=Embedding.attend)
    assert isinstance(logits, jax.Array)
    return logits


def segments_of(
    ids: Int[Array, "batch length"], segmentation: Int[Array, "batch length"] | None
) -> Int[Array, "batch length"]:
    """The segment of each position: as given or, if rows are not packed, min(id, 1).

    The latter matches Mesh TensorFlow's Bitransformer.call_simple; as there, a negative id forms a
    segment of its own.
    """
    return jnp.minimum(ids, 1) if segmentation is None else segmentation


def shift_right(
    targets: Int[Array, "batch length"], segments: Int[Array, "batch length"] | None
) -> Int[Array, "batch length"]:
    """The decoder's inputs: each segment's targets shifted right by one, starting with 0.

    Without segments, as in a language model with unpacked rows, each row is one sequence.

    Source: mesh_tensorflow.transformer.transformer.autoregressive_inputs.
    """
    # The decoder reads negative targets, which carry no loss, as in Mesh TensorFlow.
    inputs = jnp.abs(shift_by_one(targets))
    # Otherwise a segment's first position would read the last target of the segment before.
    if segments is not None:
        inputs = inputs * (segments == shift_by_one(segments)).astype(inputs.dtype)
    return inputs


def padding_mask(
    segments: Int[Array, "batch length"] | None, dtypes: DTypePolicy
) -> Float[Array, "#batch #length 1"]:
    """The factor by which Mesh TensorFlow multiplies: 1 at tokens, 0 at padding.

    Without segments, no position is known to be padding, and a single 1 stands for all positions.
    """
    dtype = jnp.dtype(dtypes.activation)
    if segments is None:
        return jnp.ones((1, 1, 1), dtype)
    return (segments != 0).astype(dtype)[..., None]


def initial_parameters(model: T5, key: jax.Array, shardings: Any = None) -> dict:
    """Initializes float32 parameters as a nested dictionary, sharded by `shardings` if given."""
    # No parameter's shape depends on the batch, so one token per row is enough.
    names = ("targets",) if model.config.decoder_only else ("inputs", "targets")
    batch = {name: np.zeros((1, 1), np.int32) for name in names}
    config = model.config
    towers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    # Neither rematerialization nor the number of layers changes a layer's parameters, so one trace
    # serves every policy and depth.
    shallow = {f"num_{tower}_layers": min(1, count) for tower, count in towers.items()}
    declaring = model.clone(config=dataclasses.replace(config, recompute=None, **shallow))
    return sample_parameters(declaring, key, batch, shardings, towers)


def parameter_shapes(model: T5) -> Any:
    """The shapes of a model's parameters; nothing is allocated."""
    return jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))


def adapter_shapes(model: T5) -> Any:
    """The shapes of the parameters of a model's adapter, a nested dictionary."""
    config = model.config
    assert config.adapter is not None
    flat = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32)
        for path, shape in config.adapter.parameter_shapes(config.shape).items()
    }
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def frozen_shapes(model: T5) -> Any:
    """The shapes of the base's parameters in the type that they are held in."""
    assert model.config.adapter is not None
    dtype = jnp.dtype(model.config.adapter.base_dtype)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), parameter_shapes(model))


def initial_adapter(model: T5, key: jax.Array) -> Any:
    """Initial parameters of a model's adapter, with which it computes what its base computes.

    LoRA's first factor is uniform within 1/sqrt(in), as in PEFT, and its second zero; (IA)3's
    vectors are one.
    """

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        if name == LORA_A:
            bound = leaf.shape[0] ** -0.5
            param_key = jax.random.fold_in(key, np.uint32(flax_hash(*(part.key for part in path))))
            return jax.random.uniform(param_key, leaf.shape, jnp.float32, -bound, bound)
        return jnp.zeros(leaf.shape) if name == LORA_B else jnp.ones(leaf.shape)

    return jax.tree_util.tree_map_with_path(draw, adapter_shapes(model))


def evaluation_shapes(model: T5, shapes: Any) -> Any:
    """The shapes of a model's parameters, each in the dtype in which a forward pass uses it.

    Training keeps all parameters in float32. An evaluation may cast kernels and the embedding in
    advance, since every use casts them. With bfloat16 activations this halves the memory, and
    results are bitwise equal.

    Args:
      model: the model.
      shapes: a tree of its parameters' shapes.
    """
    config, activation = model.config, jnp.dtype(model.dtypes.activation)
    logits_module = "embedding" if config.logits_from_embedding else "logits_dense"

    def cast(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        owner, name = (part.key for part in path[-2:])
        if name not in ("kernel", "embedding"):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        dtype = logits_dtype(config, activation) if logits_module in (owner, name) else activation
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree_util.tree_map_with_path(cast, shapes)
