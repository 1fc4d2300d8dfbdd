"""The T5 block, and the tower of blocks that forms an encoder, a decoder or a language model.

All of them use one block, in training, in scoring and in decoding with a cache:

    x -> x + self_attention(norm(x)) -> x + attention(norm(x), encoded) -> x + mlp(norm(x))

Only a decoder with an encoder has the middle step. Parameters are named as in T5X, where an
encoder's self-attention is `attention` and a decoder's is `self_attention`.

Mesh TensorFlow multiplies each normalized input by 0 at padding and by 1 elsewhere (`present`). The
block does the same, so that even positions that nothing reads have equal values on both stacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t0repro.config.run_config import ModelConfig, Recompute
from t0repro.model.attention import Visibility, implementation
from t0repro.model.dropout import Dropout, ScannedLayer
from t0repro.model.layer_stacks import SUMS, adding, starting_with
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
from t0repro.model.shapes import Array, Float, Int
from t0repro.parameters.naming import LAYERS, layer_name
from t0repro.partitioning.program_costs import ATTENDED

# Towers with at least this many layers are scanned, unless the configuration decides.
SCANNED_FROM = 12

# Keys and values of the encoder's outputs, one per decoder layer, first to last.
Memory = tuple[KeysAndValues, ...]


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
        visibility: Visibility,
        shared: Float[Array, "heads offsets"] | None,
        present: Float[Array, "#batch #length 1"],
        encoded: Float[Array, "inputs memory d_model"] | KeysAndValues | None,
        encoded_visibility: Visibility | None,
        position: Int[Array, ""] | None,
        *,
        deterministic: bool,
    ) -> Float[Array, "batch length d_model"]:
        """Returns the residual stream after this layer.

        Args:
          x: the residual stream before it.
          visibility: which position attends to which.
          shared: the position bias of all layers, unless each layer has its own.
          present: 0 at padding, 1 elsewhere.
          encoded: the encoder's outputs, or their `keys_and_values`; None without an encoder. Beams
            of one input share a row, so x may have several times as many rows.
          encoded_visibility: which position attends to which of the encoder's.
          position: position of the one token in each row of x when decoding with a cache (see
            `Attention`); None otherwise.
          deterministic: False applies dropout.
        """
        config = self.config
        dropout = Dropout(config.dropout_rate, -2, self.layer)

        def normalised(name: str) -> Array:
            norm = RMSNorm(config, self.dtype, name=f"pre_{name}_layer_norm")
            return norm(x) * present

        def attention(name: str) -> Callable[..., Array]:
            module = Attention(config, self.dtype, self.layer, name=name)
            return functools.partial(module, deterministic=deterministic)

        name = "attention" if self.encoder else "self_attention"
        if config.position_bias_per_layer:
            length = visibility.key_segments.shape[1]
            shared = position_bias(config, self.dtype, self.encoder)(length, position)
        y = normalised(name)
        y = attention(name)(y, y, visibility, shared, position=position)
        x = x + dropout(y, deterministic=deterministic)

        if encoded is not None:
            rows = jax.tree.leaves(encoded)[0].shape[0]
            # Beams of one input share its row of `encoded`, so move them into the length axis:
            # [inputs * beams, 1, d_model] -> [inputs, beams, d_model].
            queries = normalised("cross_attention").reshape(rows, -1, x.shape[-1])
            y = attention("encoder_decoder_attention")(queries, encoded, encoded_visibility)
            x = x + dropout(y.reshape(x.shape), deterministic=deterministic)

        mlp = MLP(config, self.dtype, self.layer, name="mlp")
        y = mlp(normalised("mlp"), deterministic=deterministic)
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
        visibility: Visibility,
        present: Float[Array, "#batch #length 1"],
        encoded: Float[Array, "inputs memory d_model"] | Memory | None = None,
        encoded_visibility: Visibility | None = None,
        *,
        deterministic: bool,
        position: Int[Array, ""] | None = None,
        hidden: bool = False,
    ) -> Float[Array, "batch length features"]:
        """Returns an encoder's normalized outputs, zero at padding, or any other tower's logits.

        Args:
          tokens: the tower's input; for a decoder, the targets shifted right.
          visibility: which position attends to which.
          present: 0 at padding, 1 elsewhere; outputs at padding are zero.
          encoded: for a decoder, the encoder's outputs, or the keys and values that each layer
            computes from them (`t0repro.model.t5.cross_attention_memory`).
          encoded_visibility: which position attends to which of the encoder's.
          deterministic: False applies dropout.
          position: position of the one token in each row when decoding with a cache.
          hidden: returns any tower's normalized outputs, from which `logits_of` computes logits.
        """
        config = self.config
        dropout = Dropout(config.dropout_rate, -2)
        embedder = self.embedder or Embedding(config, self.dtype, name="token_embedder")
        shared = None
        if not config.position_bias_per_layer:
            length = visibility.key_segments.shape[1]
            shared = position_bias(config, self.dtype, self.encoder)(length, position)

        x = dropout(embedder(tokens), deterministic=deterministic)
        decoding = position is not None or isinstance(encoded, tuple)
        if self._scanned and not decoding:
            assert not isinstance(encoded, tuple)  # which is what decoding reads
            arrays = (visibility, shared, present, encoded, encoded_visibility)
            x = self._all_layers(x, arrays, deterministic)
        else:
            block = functools.partial(Block, config, self.dtype, self.encoder)
            shares = self._shares_trace(x, deterministic)
            alike = traced_once(block(parent=None)) if shares else None
            for index in range(self._layers):
                # In decoding, each layer has its own precomputed keys and values; otherwise all
                # layers read one array.
                memory = encoded[index] if isinstance(encoded, tuple) else encoded
                arrays = (x, visibility, shared, present, memory, encoded_visibility, position)
                name = layer_name(index)
                if alike is None:
                    x = recomputed(block(name=name), deterministic)(*arrays)
                else:
                    with jax.named_scope(name):
                        x = alike(self.variables["params"][name], *arrays)
        norm = "encoder_norm" if self.encoder else "decoder_norm"
        x = RMSNorm(config, self.dtype, name=norm)(x)
        per_position = self.encoder and config.arithmetic.encoder_output_dropout_per_position
        last = Dropout(config.dropout_rate, None) if per_position else dropout
        x = last(x, deterministic=deterministic) * present

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
    def _scanned(self) -> bool:
        """Whether the layers are scanned; parameters are initialized layer by layer."""
        return is_scanned(self.config, self._layers) and not self.is_initializing()

    def _shares_trace(self, x: Array, deterministic: bool) -> bool:
        """Whether layers differ in their arrays alone, so that tracing one of them is enough.

        With dropout, each layer has a key of its own. Where nothing is traced, or a caller has
        asked for variables such as intermediate values, each layer is called by itself.
        """
        is_traced = isinstance(x, jax.core.Tracer)
        asks = self.scope is None or self.scope.mutable is not False
        return is_traced and deterministic and not asks and not self.config.recomputes

    def _all_layers(self, x: Array, arrays: tuple[Any, ...], deterministic: bool) -> Array:
        """The residual stream after all layers, computed by scanning one body.

        `arrays` are the arguments of `Block` between x and the position. The body reads stacked
        parameters, in the activation dtype if they are cast to it anyway. They arrive stacked
        (t0repro.model.layer_stacks) or are stacked here; with bfloat16 activations, that copy is
        half as large as the parameters. If gradient sums come with the parameters, the backward
        pass adds to them (t0repro.model.layer_stacks).
        """
        config, own = self.config, self.variables["params"]
        draws = config.draws_dropout and not deterministic
        rng = self.scope.rngs["dropout"] if draws and self.scope is not None else None
        assert not isinstance(rng, jax.Array)  # Flax wraps the keys that it is given

        def as_read(x: jax.Array, vector: int) -> jax.Array:
            # Vectors are the norms' scales, which multiply in float32.
            return x.astype(self.dtype) if x.ndim > vector else x

        def stacked(*layers: jax.Array) -> jax.Array:
            # Cast before stacking: the copy is then smaller.
            return jnp.stack([as_read(x, 1) for x in layers])

        def body(carry: tuple[Any, Any], item: tuple[jax.Array, Any]) -> tuple[Any, None]:
            (x, sums), (index, parameters) = carry, item
            if sums is not None:
                parameters, sums = adding(parameters, sums, index)
            layer = None if rng is None else ScannedLayer(index, self._layers, rng)
            block = Block(config, self.dtype, self.encoder, layer, parent=None)
            y = block.apply({"params": parameters}, x, *arrays, None, deterministic=deterministic)
            return (y, sums), None

        policy = kept(config.recompute)
        if not config.recomputes:
            # Every value saved for the backward pass is copied into a stack and out of it. So save
            # the matmuls' outputs and rematerialize the rest, which is cheap, as XLA does by fusion
            # without a scan. Do not save the matmuls of blockwise attention. A kernel's result
            # counts as a matmul's.
            policies = jax.checkpoint_policies
            named = policies.save_only_these_names(ATTENDED)
            policy = policies.save_from_both_policies(policies.dots_saveable, named)
        if config.recomputes or not self._in_blocks(x, arrays[3]):
            # The scan's body already keeps XLA from merging recomputation with code outside.
            body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        if LAYERS in own:
            parameters = jax.tree.map(lambda x: as_read(x, 2), own[LAYERS])
        else:
            layers = [own[layer_name(index)] for index in range(self._layers)]
            parameters = jax.tree.map(stacked, *layers)
        parameters = jax.lax.optimization_barrier(parameters)
        items = (jnp.arange(self._layers), parameters)
        (x, sums), _ = jax.lax.scan(body, (x, own.get(SUMS)), items)
        return x if sums is None else starting_with(x, sums)

    def _in_blocks(self, x: Array, encoded: Array | None) -> bool:
        """Whether a layer computes some attention in blocks of queries."""
        (rows, length, _), heads = x.shape, self.config.num_heads
        read = [length] if encoded is None else [length, encoded.shape[1]]
        float32 = self.dtype == jnp.float32
        ways = [implementation(rows, heads, length, keys, float32=float32) for keys in read]
        return "blocks" in ways


def is_scanned(config: ModelConfig, layers: int) -> bool:
    """Whether a tower of this many layers is scanned."""
    asked = config.scan_layers
    return layers >= SCANNED_FROM if asked is None else asked


def scanned_towers(config: ModelConfig) -> dict[str, int]:
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
    bidirectional = encoder or config.input_full_attention
    return RelativePositionBias(config, dtype, bidirectional, name="relpos_bias")


def vocabulary(config: ModelConfig, dtype: jnp.dtype) -> Dense:
    """Creates the layer that computes float32 logits, if the embedding does not."""
    init, axes = kernel_initializer(config), ("embed", "vocab")
    factors, result = logits_dtype(config, dtype), jnp.dtype("float32")
    return Dense(config.vocab_size, factors, init, result, axes, name="logits_dense")


def traced_once(block: Block) -> Callable[..., jax.Array]:
    """The call of layers without dropout, on a layer's parameters and arrays, traced only once.

    The program is that of separate calls, to the letter, because JAX copies the trace into it.

    Args:
      block: the block, without a parent.
    """

    @functools.partial(jax.jit, inline=True)
    def call(parameters: Any, *arrays: Any) -> Any:
        return block.apply({"params": parameters}, *arrays, deterministic=True)

    return call


def recomputed(block: Block, deterministic: bool) -> Callable[..., jax.Array]:
    """The block's call, rematerialized in the backward pass according to `config.recompute`.

    Args:
      block: the block.
      deterministic: bound here because it decides what is traced; the call itself takes only
        arrays.
    """

    def call(module: nn.Module, *arrays: Any) -> Any:
        return module(*arrays, deterministic=deterministic)  # pyright: ignore[reportCallIssue]

    if block.config.recomputes:
        call = nn.remat(call, policy=kept(block.config.recompute))
    return functools.partial(call, block)


def kept(recompute: Recompute | None) -> Callable[..., Any] | None:
    """The policy of `jax.checkpoint` for a layer; None saves its input only."""
    policies = jax.checkpoint_policies
    if recompute == "minimal":
        # Saves the outputs of matmuls with parameters, which are most of the FLOPs; not attention's
        # matrices.
        return policies.dots_with_no_batch_dims_saveable
    if recompute == "offload":
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return None
