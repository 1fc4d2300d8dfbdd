"""T5's towers: the blocks of an encoder, a decoder or a language model, and their stacked layers.

All of them use one block, in training, in scoring and in decoding with a cache:

    x -> x + self_attention(norm(x)) -> x + attention(norm(x), encoded) -> x + mlp(norm(x))

Only a decoder with an encoder has the middle step. Parameters are named as in T5X, where an
encoder's self-attention is `attention` and a decoder's is `self_attention`.

Mesh TensorFlow multiplies each normalized input by 0 at padding and by 1 elsewhere
(`padding_mask`). The block does the same, so that even positions that nothing reads have equal
values on both stacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t0repro.config.model import ModelConfig, Recompute
from t0repro.model.attention import choose_implementation
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.dropout import Dropout, ScannedLayer
from t0repro.model.gradient_accumulators import GRAD_ACCUM, accumulate_grads, seed_accumulator
from t0repro.model.layers import (
    MLP,
    Attention,
    Dense,
    Embedding,
    KeysAndValues,
    RelativePositionBias,
    RMSNorm,
    kernel_initializer,
    logits_dtype,
)
from t0repro.model.matmuls import BATCHED_MATMUL, MATMUL
from t0repro.model.shapes import Array, Float, Int
from t0repro.parameters.naming import LAYERS, layer_name
from t0repro.partitioning.flops import ATTENDED

# Towers with at least this many layers are scanned, unless the configuration decides. A scan
# compiles one layer instead of all, but rematerializes what lies between matmuls. From 12 layers on
# (T5 base), compilation takes half the time or less, and a step no longer. With the 8 layers of T5
# 1.1 small, a scan saves nothing: 5.0 s to compile scanned, 5.5 s unrolled (docs/decisions, 7).
SCANNED_FROM = 12

# Keys and values of the encoder's outputs, one per decoder layer, first to last.
CrossAttentionCache = tuple[KeysAndValues, ...]


class Block(nn.Module):
    """One layer of a tower; each sublayer reads a normalized input and adds to the residual stream.

    Attributes:
      config: the model's shape.
      dtype: activation dtype.
      encoder: whether this is an encoder's block.
      layer: the layer's place in its tower, if the tower is scanned.
    """

    config: ModelConfig
    dtype: jnp.dtype
    encoder: bool
    layer: ScannedLayer | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        mask: AttentionMask,
        shared: Float[Array, "*rows heads offsets"] | None,
        padding_mask: Float[Array, "#batch #length 1"],
        encoded: Float[Array, "inputs memory d_model"] | KeysAndValues | None,
        encoded_mask: AttentionMask | None,
        position: Int[Array, "*rows"] | None,
        *,
        deterministic: bool,
    ) -> Float[Array, "batch length d_model"]:
        """Returns the residual stream after this layer.

        Args:
          x: the residual stream before it.
          mask: which position attends to which.
          shared: the position bias of all layers, unless each layer has its own.
          padding_mask: 0 at padding, 1 elsewhere.
          encoded: the encoder's outputs, or their `keys_and_values`; None without an encoder. Beams
            of one input share a row, so x may have several times as many rows.
          encoded_mask: which position attends to which of the encoder's.
          position: position of the one token in each row of x when decoding with a cache (see
            `Attention`); None otherwise.
          deterministic: False applies dropout.
        """
        config = self.config
        dropout = Dropout(config.dropout_rate, -2, self.layer)

        def normalize(name: str) -> Array:
            norm = RMSNorm(config, self.dtype, name=f"pre_{name}_layer_norm")
            return norm(x) * padding_mask

        def attention(name: str) -> Callable[..., Array]:
            module = Attention(config, self.dtype, self.layer, name=name)
            return functools.partial(module, deterministic=deterministic)

        name = "attention" if self.encoder else "self_attention"
        if config.position_bias_per_layer:
            length = mask.key_segments.shape[1]
            shared = position_bias(config, self.dtype, self.encoder)(length, position)
        y = normalize(name)
        y = attention(name)(y, y, mask, shared, position=position)
        x = x + dropout(y, deterministic=deterministic)

        if encoded is not None:
            rows = jax.tree.leaves(encoded)[0].shape[0]
            # Beams of one input share its row of `encoded`, so move them into the length axis:
            # [inputs * beams, 1, d_model] -> [inputs, beams, d_model].
            queries = normalize("cross_attention").reshape(rows, -1, x.shape[-1])
            y = attention("encoder_decoder_attention")(queries, encoded, encoded_mask)
            x = x + dropout(y.reshape(x.shape), deterministic=deterministic)

        mlp = MLP(config, self.dtype, self.layer, name="mlp")
        y = mlp(normalize("mlp"), deterministic=deterministic)
        return x + dropout(y, deterministic=deterministic)


class Tower(nn.Module):
    """Blocks between an embedding and a norm: an encoder, a decoder or a language model.

    Attributes:
      config: the model's shape.
      dtype: activation dtype.
      encoder: whether this is the encoder.
      embedder: the embedding that the towers share; None if this tower has its own.
    """

    config: ModelConfig
    dtype: jnp.dtype
    encoder: bool
    embedder: Embedding | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        mask: AttentionMask,
        padding_mask: Float[Array, "#batch #length 1"],
        encoded: Float[Array, "inputs memory d_model"] | CrossAttentionCache | None = None,
        encoded_mask: AttentionMask | None = None,
        *,
        deterministic: bool,
        position: Int[Array, "*rows"] | None = None,
        hidden: bool = False,
    ) -> Float[Array, "batch length features"]:
        """Returns an encoder's normalized outputs, zero at padding, or any other tower's logits.

        Args:
          tokens: the tower's input; for a decoder, the targets shifted right.
          mask: which position attends to which.
          padding_mask: 0 at padding, 1 elsewhere; outputs at padding are zero.
          encoded: for a decoder, the encoder's outputs, or the keys and values that each layer
            computes from them (`t0repro.model.t5.make_cross_attention_cache`).
          encoded_mask: which position attends to which of the encoder's.
          deterministic: False applies dropout.
          position: position of the one token in each row when decoding with a cache; if the
            collection "cache" is mutable without it, the cache of all positions is filled.
          hidden: returns any tower's normalized outputs, from which `logits_of` computes logits.
        """
        config = self.config
        dropout = Dropout(config.dropout_rate, -2)
        embedder = self.embedder or Embedding(config, self.dtype, name="token_embedder")
        shared = None
        if not config.position_bias_per_layer:
            length = mask.key_segments.shape[1]
            shared = position_bias(config, self.dtype, self.encoder)(length, position)

        x = dropout(embedder(tokens), deterministic=deterministic)
        # Each layer has a cache of its own.
        decoding = self.is_mutable_collection("cache") or isinstance(encoded, tuple)
        if self._is_scanned and not decoding:
            assert not isinstance(encoded, tuple)  # which is what decoding reads
            arrays = (mask, shared, padding_mask, encoded, encoded_mask)
            uses_blocks = self._uses_blocks(x, encoded)
            x = self._scan_layers(x, arrays, deterministic, uses_blocks=uses_blocks)
        else:
            block = functools.partial(Block, config, self.dtype, self.encoder)
            can_share_trace = self._can_share_trace(x, deterministic)
            shared_apply = make_shared_apply(block(parent=None)) if can_share_trace else None
            for index in range(self._layers):
                # In decoding, each layer has its own precomputed keys and values; otherwise all
                # layers read one array.
                layer_encoded = encoded[index] if isinstance(encoded, tuple) else encoded
                arrays = (x, mask, shared, padding_mask, layer_encoded, encoded_mask, position)
                name = layer_name(index)
                if shared_apply is None:
                    x = remat_block(block(name=name), deterministic)(*arrays)
                else:
                    with jax.named_scope(name):
                        x = shared_apply(self.variables["params"][name], *arrays)
        norm = "encoder_norm" if self.encoder else "decoder_norm"
        x = RMSNorm(config, self.dtype, name=norm)(x)
        per_position = self.encoder and config.arithmetic.encoder_output_dropout_per_position
        last = Dropout(config.dropout_rate, None) if per_position else dropout
        x = last(x, deterministic=deterministic) * padding_mask

        if self.encoder or (hidden and not self.is_initializing()):
            return x
        if config.logits_from_embedding:
            return embedder.attend(x)
        return vocabulary(config, self.dtype)(x)

    @property
    def _layers(self) -> int:
        config = self.config
        return config.num_encoder_layers if self.encoder else config.num_decoder_layers

    @property
    def _is_scanned(self) -> bool:
        """Whether the layers are scanned; parameters are initialized layer by layer."""
        return is_scanned(self.config, self._layers) and not self.is_initializing()

    def _can_share_trace(self, x: Array, deterministic: bool) -> bool:
        """Whether layers differ in their arrays alone, so that tracing one of them is enough.

        With dropout, each layer has a key of its own. Where nothing is traced, or a caller has
        asked for variables such as intermediate values, each layer is called by itself.
        """
        is_traced = isinstance(x, jax.core.Tracer)
        has_mutables = self.scope is None or self.scope.mutable is not False
        return is_traced and deterministic and not has_mutables and not self.config.recomputes

    def _scan_layers(
        self, x: Array, arrays: tuple[Any, ...], deterministic: bool, *, uses_blocks: bool
    ) -> Array:
        """The residual stream after all layers, computed by scanning one body.

        `arrays` are the arguments of `Block` between x and the position. The body reads stacked
        parameters, in the activation dtype if they are cast to it anyway. They arrive stacked
        or are stacked here; with bfloat16 activations, that copy is half as large as the
        parameters. If gradient sums come with the parameters, the backward pass adds to them.
        """
        config, params = self.config, self.variables["params"]
        uses_dropout = config.draws_dropout and not deterministic
        rng = self.scope.rngs["dropout"] if uses_dropout and self.scope is not None else None
        assert not isinstance(rng, jax.Array)  # Flax wraps the keys that it is given

        def cast_for_compute(x: jax.Array, vector: int) -> jax.Array:
            # Vectors are the norms' scales, which multiply in float32.
            return x.astype(self.dtype) if x.ndim > vector else x

        def cast_and_stack(*layers: jax.Array) -> jax.Array:
            # Cast before stacking: the copy is then smaller.
            return jnp.stack([cast_for_compute(x, 1) for x in layers])

        def body(carry: tuple[Any, Any], item: tuple[jax.Array, Any]) -> tuple[Any, None]:
            (x, sums), (index, parameters) = carry, item
            if sums is not None:
                parameters, sums = accumulate_grads(parameters, sums, index)
            layer = None if rng is None else ScannedLayer(index, self._layers, rng)
            block = Block(config, self.dtype, self.encoder, layer, parent=None)
            y = block.apply({"params": parameters}, x, *arrays, None, deterministic=deterministic)
            return (y, sums), None

        policy = remat_policy(config.recompute)
        if not config.recomputes:
            # Every value saved for the backward pass is copied into a stack and out of it. So save
            # the matmuls' outputs and rematerialize the rest, which is cheap, as XLA does by fusion
            # without a scan. Do not save the matmuls of blockwise attention. A kernel's result
            # counts as a matmul's.
            policies = jax.checkpoint_policies
            named = policies.save_only_these_names(ATTENDED, MATMUL, BATCHED_MATMUL)
            policy = policies.save_from_both_policies(policies.dots_saveable, named)
        if config.recomputes or not uses_blocks:
            # The scan's body already keeps XLA from merging recomputation with code outside.
            body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        if LAYERS in params:
            parameters = jax.tree.map(lambda x: cast_for_compute(x, 2), params[LAYERS])
        else:
            layers = [params[layer_name(index)] for index in range(self._layers)]
            parameters = jax.tree.map(cast_and_stack, *layers)
        parameters = jax.lax.optimization_barrier(parameters)
        items = (jnp.arange(self._layers), parameters)
        (x, sums), _ = jax.lax.scan(body, (x, params.get(GRAD_ACCUM)), items)
        return x if sums is None else seed_accumulator(x, sums)

    def _uses_blocks(self, x: Array, encoded: Array | None) -> bool:
        """Whether a layer computes some attention in blocks of queries."""
        (rows, length, _), heads = x.shape, self.config.num_heads
        read = [length] if encoded is None else [length, encoded.shape[1]]
        float32 = self.dtype == jnp.float32
        ways = [choose_implementation(rows, heads, length, keys, float32=float32) for keys in read]
        return "blocks" in ways


def is_scanned(config: ModelConfig, layers: int) -> bool:
    """Whether a tower of this many layers is scanned."""
    requested = config.scan_layers
    return layers >= SCANNED_FROM if requested is None else requested


def count_scanned_layers(config: ModelConfig) -> dict[str, int]:
    """The scanned towers that share no layers, with their numbers of layers."""
    towers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    return {
        tower: count
        for tower, count in towers.items()
        if count and not config.shared_towers and is_scanned(config, count)
    }


def position_bias(config: ModelConfig, dtype: jnp.dtype, encoder: bool) -> RelativePositionBias:
    """Creates the position bias of the calling tower or block.

    A language model whose inputs all see each other needs buckets for both directions, as an
    encoder does.
    """
    one_way = config.arithmetic.one_way_position_buckets
    bidirectional = encoder or (config.input_full_attention and not one_way)
    return RelativePositionBias(config, dtype, bidirectional, name="relpos_bias")


def vocabulary(config: ModelConfig, dtype: jnp.dtype) -> Dense:
    """Creates the layer that computes float32 logits, if the embedding does not."""
    init, axes = kernel_initializer(config), ("embed", "vocab")
    factors, result = logits_dtype(config, dtype), jnp.dtype("float32")
    return Dense(config.vocab_size, factors, init, result, axes, name="logits_dense")


def make_shared_apply(block: Block) -> Callable[..., jax.Array]:
    """The call of layers without dropout, on a layer's parameters and arrays, traced only once.

    The program is that of separate calls, to the letter, because JAX copies the trace into it.

    Args:
      block: the block, without a parent.
    """

    @functools.partial(jax.jit, inline=True)
    def call(parameters: Any, *arrays: Any) -> Any:
        return block.apply({"params": parameters}, *arrays, deterministic=True)

    return call


def remat_block(block: Block, deterministic: bool) -> Callable[..., jax.Array]:
    """The block's call, rematerialized in the backward pass according to `config.recompute`.

    Args:
      block: the block.
      deterministic: bound here because it decides what is traced; the call itself takes only
        arrays.
    """

    def call(module: nn.Module, *arrays: Any) -> Any:
        return module(*arrays, deterministic=deterministic)  # pyright: ignore[reportCallIssue]

    if block.config.recomputes:
        call = nn.remat(call, policy=remat_policy(block.config.recompute))
    return functools.partial(call, block)


def remat_policy(recompute: Recompute | None) -> Callable[..., Any] | None:
    """The policy of `jax.checkpoint` for a layer; None saves its input only."""
    policies = jax.checkpoint_policies
    if recompute == "minimal":
        # Saves the outputs of matmuls with parameters, which are most of the FLOPs; not attention's
        # matrices.
        named = policies.save_only_these_names(MATMUL)
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, named)
    if recompute == "offload":
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return None
