"""T5's towers: the blocks of an encoder, a decoder or a language model, and their stacked layers.

All of them use one block, in training, in scoring and in decoding with a cache:

    x -> x + self_attention(norm(x)) -> x + attention(norm(x), encoded) -> x + mlp(norm(x))

Only a decoder with an encoder has the middle step. Parameters are named as in T5X, where an
encoder's self-attention is `attention` and a decoder's is `self_attention`.

Mesh TensorFlow multiplies each normalized input by 0 at padding and by 1 elsewhere (`present`). The
block does the same, so that even positions that nothing reads have equal values on both stacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from t0repro.config.run_config import ModelConfig, Recompute
from t0repro.model.attention import Visibility, implementation
from t0repro.model.layers import (
    MLP,
    Attention,
    Dense,
    Dropout,
    Embedding,
    KeysAndValues,
    RelativePositionBias,
    RMSNorm,
    ScannedLayer,
    kernel_initializer,
    logits_dtype,
)
from t0repro.model.shapes import Array, Float, Int
from t0repro.parameters.naming import LAYERS, layer_name
from t0repro.partitioning.costs import ATTENDED

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
        or are stacked here; with bfloat16 activations, that copy is half as large as the
        parameters. If gradient sums come with the parameters, the backward pass adds to them.
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
        (x, sums), _ = jax.lax.scan(body, (x, own.get(_SUMS)), items)
        return x if sums is None else _starting_with(x, sums)

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


# ---- Trees with stacked layers -------------------------------------------------------------------
#
#     by layer    {"encoder": {"layers_0": {"mlp": ...}, "layers_1": {"mlp": ...}, ...}}
#     stacked     {"encoder": {"layers_*": {"mlp": an axis more, of layers}, ...}}
#
# A scanned tower reads its layers as stacks. If they arrive stacked, no step has to copy them, and
# one operation updates all layers of a tower. Checkpoints and users refer to layers by their own
# names. A tree may have anything in place of parameters: shapes, gradients, optimizer slots.

# The number of layers of each tower.
Towers = Mapping[str, int]
# Functions that stack the arrays of all layers, and that split a stack into its layers' arrays.
Stack = Callable[[Sequence[Any]], Any]
Split = Callable[[Any], Sequence[Any]]


def stacks_in(params: Any) -> dict[str, int]:
    """The towers whose layers are stacked in a tree of parameters."""
    # A user's model may have any tree.
    towers = params.items() if isinstance(params, Mapping) else ()
    return {
        name: jax.tree.leaves(tower[LAYERS])[0].shape[0]
        for name, tower in towers
        if isinstance(tower, Mapping) and LAYERS in tower
    }


def stacked(tree: Any, towers: Towers, stack: Stack = jnp.stack) -> dict[str, Any]:
    """A tree with the layers of each of `towers` stacked.

    Args:
      tree: by layer.
      towers: the towers, with all of their layers.
      stack: stacks the arrays of all layers.
    """
    found = without_layers(tree, towers)
    for tower, count in towers.items():
        layers = [tree[tower][layer_name(index)] for index in range(count)]
        found[tower][LAYERS] = jax.tree.map(lambda *arrays: stack(arrays), *layers)
    return found


def is_alike(tree: Any, towers: Towers) -> bool:
    """Whether all layers of each tower are the same kind of tree, so that they can be stacked."""

    def kinds(layers: Sequence[Any]) -> set[Any]:
        return {jax.tree.structure(layer) for layer in layers}

    return isinstance(tree, dict) and all(
        len(kinds([tree[tower][layer_name(index)] for index in range(count)])) == 1
        for tower, count in towers.items()
    )


def rows(stack: Any) -> Sequence[Any]:
    """The arrays of all layers of a stack; for a numpy array, views of it."""
    return [stack[index] for index in range(stack.shape[0])]


def by_layer(tree: Any, towers: Towers, split: Split = rows) -> Any:
    """The inverse of `stacked`.

    Args:
      tree: with stacks; a tree without any, of any kind, is returned as it is.
      towers: the result of `stacks_in` for it, or for the parameters it belongs to.
      split: splits a stack into its layers' arrays.
    """
    if not towers:
        return tree
    found = {name: dict(value) if name in towers else value for name, value in tree.items()}
    for tower, count in towers.items():
        leaves, structure = jax.tree.flatten(found[tower].pop(LAYERS))
        split_leaves = [split(leaf) for leaf in leaves]
        for index in range(count):
            layer = structure.unflatten([arrays[index] for arrays in split_leaves])
            found[tower][layer_name(index)] = layer
    return found


def without_layers(tree: Any, towers: Towers) -> Any:
    """The tree without the layers of `towers`, stacked or single; its upper levels are copies."""
    if not towers:
        return tree
    kept = {
        tower: {name: x for name, x in tree[tower].items() if not name.startswith("layers_")}
        for tower in towers
    }
    return {**tree, **kept}


# ---- Without the memory of both -----------------------------------------------------------------


def joined(arrays: Sequence[Any]) -> Any:
    """Stacks arrays and deletes them; for shapes, returns the stack's shape.

    Stacking a state array by array thus never needs the memory of a second state.
    """
    first = arrays[0]
    sharding = getattr(first, "sharding", None)
    divided = isinstance(sharding, NamedSharding)
    if divided:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(arrays), *first.shape), first.dtype, sharding=sharding)
    stack = jax.jit(jnp.stack, out_shardings=sharding if divided else None)(arrays)
    return _in_place_of(arrays, stack)


def released(stack: jax.Array) -> list[jax.Array]:
    """Splits a stack into its layers' arrays and deletes it."""
    sharding = stack.sharding
    divided = isinstance(sharding, NamedSharding)
    if divided:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return _in_place_of([stack], jax.jit(rows, out_shardings=sharding if divided else None)(stack))


def _in_place_of(arrays: Sequence[Any], result: Any) -> Any:
    """Deletes arrays after computing the result made from them."""
    # Wait first: results that are only queued may still need the arrays.
    jax.block_until_ready(result)
    for array in arrays:
        if isinstance(array, jax.Array):  # a user's state may have arrays of numpy
            array.delete()
    return result


# ---- Adds up the gradients of a tower's layers inside the backward pass of its loop --------------

# A scanned tower ends its backward pass with a stack of all its layers' gradients. With several
# microbatches, these are then added to sums of the same size, and XLA holds the stacks of both
# towers in addition to the sums: 2.3 of the 16.3 GiB of T0 11B's step on a v3-512. So the sums go
# through the scans themselves, stacked, as values that no computation reads. Their gradient is
# defined here as the sum so far:
#
#     forward    sums ---- layer 0 ---- ... ---- layer 23 ---- _starting_with
#     backward   sums + all gradients <- ... <- sums + those of layer 23 <- sums
#
# Each layer adds its own gradient in place, and no stack of gradients exists. The sums are an entry
# of the tower's parameters, _SUMS, so that a loss passes them on like any parameter.

_SUMS = "gradient_sums"


# ---- In the tower -------------------------------------------------------------------------------


@jax.custom_vjp
def adding(parameters: Any, sums: Any, index: Int[Array, ""]) -> tuple[Any, Any]:
    """Returns both; in the backward pass, the parameters' gradient is added to the sums' row.

    Args:
      parameters: one layer's parameters.
      sums: the same tree, float32, [layers, ...].
      index: the layer's index.
    """
    del index
    return parameters, sums


def _adding(parameters: Any, sums: Any, index: Array) -> tuple[Any, Array]:
    return (parameters, sums), index


def _added(index: Array, gradients: tuple[Any, Any]) -> tuple[None, Any, None]:
    of_layer, sums = gradients
    add = lambda total, new: total.at[index].add(new.astype(total.dtype))  # noqa: E731
    return None, jax.tree.map(add, sums, of_layer), None


adding.defvjp(_adding, _added)


@jax.custom_vjp
def _starting_with(x: Array, sums: Any) -> Array:
    """Returns x; in the backward pass, the last layer adds its gradient to the sums' own values."""
    del sums
    return x


_starting_with.defvjp(lambda x, sums: (x, sums), lambda sums, gradient: (gradient, sums))


# ---- Around the loss ----------------------------------------------------------------------------

# Without towers, parameters may be any tree, such as those of a user's model.


def zero_sums(params: Any, towers: Towers, specs: Any = None) -> Any:
    """Zero float32 sums of gradients, stacked for each tower's layers, else like the parameters.

    Args:
      params: the parameters, by layer or stacked.
      towers: towers whose layers' sums go through their scan.
      specs: how each parameter is sharded; None on one device.
    """

    def zero(parameter: Any, spec: PartitionSpec | None = None) -> jax.Array:
        x = jnp.zeros(parameter.shape, jnp.float32)
        return x if spec is None else jax.lax.with_sharding_constraint(x, spec)

    totals = jax.tree.map(zero, without_layers(params, towers))
    if not towers:
        return totals
    if not stacks_in(params):
        params = jax.eval_shape(lambda p: stacked(p, towers), params)
        # All layers of a tower have parameters with the same shapes and sharding.
        of_all = lambda layers: PartitionSpec(None, *layers[0])  # noqa: E731
        specs = None if specs is None else stacked(specs, towers, of_all)
    for tower in towers:
        divided = () if specs is None else (specs[tower][LAYERS],)
        totals[tower][_SUMS] = jax.tree.map(zero, params[tower][LAYERS], *divided)
    return totals


def with_sums(params: Any, totals: Any, towers: Towers) -> Any:
    """The parameters to pass to a loss, with the sums of the towers' layers among them."""
    if not towers:
        return params
    summed = {tower: {**params[tower], _SUMS: totals[tower][_SUMS]} for tower in towers}
    return {**params, **summed}


def added_up(totals: Any, gradients: Any, towers: Towers) -> Any:
    """The sums after a microbatch, from its gradients with respect to `with_sums`."""

    def add(path: Any, total: Array, gradient: Array) -> Array:
        return gradient if path[1:2] == (DictKey(_SUMS),) else total + gradient

    return jax.tree_util.tree_map_with_path(add, totals, without_layers(gradients, towers))


def sums_like(params: Any, totals: Any, towers: Towers) -> Any:
    """The sums as a tree like the parameters, by layer or stacked."""
    if not towers:
        return totals
    found = {name: dict(value) if name in towers else value for name, value in totals.items()}
    for tower in towers:
        found[tower][LAYERS] = found[tower].pop(_SUMS)
    return found if stacks_in(params) else by_layer(found, towers)
