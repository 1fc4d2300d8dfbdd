"""The layers of T5, with T5X's parameter names and Mesh TensorFlow's arithmetic.

Parameters are float32 and are cast to the activation dtype where they are used. In float32 every
operation agrees with Mesh TensorFlow 0.1.21 up to rounding; if the order of operations matters
beyond that, the docstring states it. Initial values also follow Mesh TensorFlow's distributions;
t0repro.model.initialization computes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from t0repro.adapters import IA3_INPUT, IA3_OUTPUT, LORA_A, LORA_B
from t0repro.config.model import ModelConfig
from t0repro.model.attention import attention
from t0repro.model.attention_mask import AttentionMask
from t0repro.model.dropout import Dropout, ScannedLayer
from t0repro.model.initialization import Initializer, parameter
from t0repro.model.matmuls import einsum
from t0repro.model.shapes import Array, Float, Int
from t0repro.partitioning.devices import constrain, device_to_trace_for

# Mesh TensorFlow sets no initializer for position biases, so TensorFlow's default applies.
_GLOROT_UNIFORM = nn.initializers.glorot_uniform(in_axis=0, out_axis=1)
_RESCALED_TRUNCATED_NORMAL = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
# Cache one function per deviation, so that one program initializes all parameters of a shape.
normal = functools.cache(nn.initializers.normal)


class Dense(nn.Module):
    """A linear map of the last axis without bias; its only parameter is `kernel` [in, features].

    Beside the kernel there may be an adapter's parameters (t0repro.adapters).

    Attributes:
      features: size of the output's last axis.
      dtype: dtype of both inputs of the matmul.
      kernel_init: initializer of the kernel.
      output_dtype: dtype of the accumulation and of the result; defaults to `dtype`.
      axes: logical axes of the kernel (t0repro.partitioning.devices).
    """

    features: int
    dtype: jnp.dtype
    kernel_init: Initializer
    output_dtype: jnp.dtype | None = None
    axes: tuple[str, str] = ("embed", "embed")
    adapter_dropout: Dropout | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch inputs"], *, deterministic: bool = True
    ) -> Float[Array, "*batch features"]:
        """Returns x @ kernel, changed by the adapter if there is one."""
        kernel = parameter(self, "kernel", self.kernel_init, (x.shape[-1], self.features))
        if (scale := self._adapter_param(IA3_INPUT)) is not None:
            x = scale_channels(x, scale)
        # Flatten to two axes: XLA on CPU then takes half as long for the gradient.
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        output_dtype = self.output_dtype or self.dtype
        # A fully sharded kernel is gathered here, in the activation dtype.
        kernel = constrain(kernel.astype(self.dtype), *self.axes)
        y = einsum("ri,io->ro", rows, kernel, output_dtype)
        if (first := self._adapter_param(LORA_A)) is not None:
            second = self._adapter_param(LORA_B)
            assert second is not None
            read = x
            if self.adapter_dropout is not None:
                read = self.adapter_dropout(x, deterministic=deterministic)
            read = read.reshape(rows.shape).astype(self.dtype)
            low = einsum("ri,il->rl", read, first.astype(self.dtype))
            y = y + einsum("rl,lo->ro", low, second.astype(self.dtype), output_dtype)
        if (scale := self._adapter_param(IA3_OUTPUT)) is not None:
            y = scale_channels(y, scale)
        y = y.reshape(*x.shape[:-1], self.features)
        return constrain(y, "batch", *[None] * (y.ndim - 2), self.axes[1])

    def _adapter_param(self, name: str) -> jax.Array | None:
        """An adapter's parameter of this kernel, if it was given one."""
        return self.get_variable("params", name)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis: no mean, no bias (transformer.sublayer_rms_norm).

    The mean square is computed in float32. Mesh TensorFlow computes it in the activation dtype,
    which gives the same result in float32 but not in bfloat16. T5X rounds x / rms(x) to the
    activation dtype before it multiplies (Arithmetic.cast_before_norm_scale).
    """

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Normalizes each vector to a root mean square of `scale`."""
        scale = parameter(self, "scale", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normalized = x * jax.lax.rsqrt(variance + self.config.rms_norm_epsilon)
        if self.config.arithmetic.cast_before_norm_scale:
            return scale_channels(normalized.astype(self.dtype), scale)
        return (normalized * scale).astype(self.dtype)


def scale_channels(
    x: Float[Array, "*batch channels"], scale: Float[Array | np.ndarray, " channels"]
) -> Float[Array, "*batch channels"]:
    """Multiplies each channel of x by a number, in x's dtype."""
    # The product of two bfloat16 numbers, in float32 and then rounded, is that of bfloat16. But the
    # gradient of the scale adds up over all positions, and a bfloat16 sum would stop growing.
    factor = scale.astype(x.dtype).astype(jnp.float32)
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


class Embedding(nn.Module):
    """The embedding table [vocab_size, d_model]; in T5 1.0 it also computes the logits."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        """Creates the table with standard deviation 1 (mtf.layers.embedding_weights)."""
        shape = (self.config.vocab_size, self.config.d_model)
        self.embedding = parameter(self, "embedding", normal(1.0), shape)

    def __call__(self, ids: Int[Array, "batch length"]) -> Float[Array, "batch length d_model"]:
        """Vectors of the ids; zeros for an id outside the table, negative ones included.

        Mesh TensorFlow multiplies by a one-hot matrix, whose row for such an id is zero.
        """
        table = constrain(self.embedding, "vocab", "embed")
        vectors = table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        # Rounded only here: the gradient of the look-up adds up all vectors of an id one by one,
        # and a bfloat16 sum would stop growing.
        return constrain(vectors.astype(self.dtype), "batch", None, "embed")

    def attend(self, x: Float[Array, "batch length d_model"]) -> Float[Array, "batch length vocab"]:
        """Float32 logits: x times the table; with `scale_tied_logits`, x is first scaled down."""
        dtype = logits_dtype(self.config, self.dtype)
        x = x.astype(dtype)
        if self.config.scale_tied_logits:
            x = x * jnp.asarray(self.config.d_model**-0.5, x.dtype)
        table = constrain(self.embedding.astype(dtype), "vocab", "embed")
        logits = jnp.einsum("bld,vd->blv", x, table, preferred_element_type=jnp.float32)
        return constrain(logits, "batch", None, "vocab")


class MLP(nn.Module):
    """The feed-forward layer: multiplies one activated projection per activation, then `wo`.

    With one activation the first kernel is called `wi` (T5 1.0), with several `wi_0`, `wi_1`
    (T5 1.1).
    """

    config: ModelConfig
    dtype: jnp.dtype
    layer: ScannedLayer | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length d_model"], *, deterministic: bool
    ) -> Float[Array, "batch length d_model"]:
        """Applies the layer (transformer_layers.DenseReluDense)."""
        config = self.config
        names = config.activations
        hidden = None
        for index, name in enumerate(names):
            kernel = f"wi_{index}" if len(names) > 1 else "wi"
            init, axes = kernel_initializer(config), ("embed", "mlp")
            drops = adapter_dropout(config, self.layer, f"{kernel}_adapter_dropout")
            dense = Dense(
                config.d_ff, self.dtype, init, axes=axes, adapter_dropout=drops, name=kernel
            )
            factor = activation(name)(dense(x, deterministic=deterministic))
            hidden = factor if hidden is None else hidden * factor
        assert hidden is not None, "a model has at least one activation"
        hidden = Dropout(config.dropout_rate, -2, self.layer)(hidden, deterministic=deterministic)
        init, axes = kernel_initializer(config), ("mlp", "embed")
        drops = adapter_dropout(config, self.layer, "wo_adapter_dropout")
        last = Dense(config.d_model, self.dtype, init, axes=axes, adapter_dropout=drops, name="wo")
        return last(hidden, deterministic=deterministic)


class KeysAndValues(NamedTuple):
    """The memory's projections in an attention layer, computed once for any number of queries."""

    key: Float[Array, "batch heads memory d_kv"]
    value: Float[Array, "batch heads memory d_kv"]


class Attention(nn.Module):
    """Multi-head attention without biases; kernels are matrices, [d_model, heads * d_kv].

    Logits are not scaled by 1/sqrt(d_kv): the query's initial values include that factor, as with
    Mesh TensorFlow's fold_scaling_into_initializer. ModelConfig.scale_queries applies it again.
    Logits and softmax are float32, as with Mesh TensorFlow's float32_logits, unless
    Arithmetic.float32_attention_logits is off.
    """

    config: ModelConfig
    dtype: jnp.dtype
    layer: ScannedLayer | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        key_value_source: Float[Array, "batch memory d_model"] | KeysAndValues,
        mask: AttentionMask,
        position_bias: Float[Array, "*rows heads offsets"] | None = None,
        *,
        deterministic: bool,
        position: Int[Array, "*rows"] | None = None,
    ) -> Float[Array, "batch length d_model"]:
        """Attends from x to memory.

        If the collection "cache" is mutable, it keeps the keys and values of all positions.

        Args:
          x: the source of queries.
          key_value_source: the source of keys and values, or its `keys_and_values`.
          mask: which query sees which key.
          position_bias: added to the logits, by the offset of the key from the query.
          deterministic: False applies dropout.
          position: in decoding with a cache, the position of the one token in each row, of all rows
            or [batch]. Its key and value are written there into the collection "cache", [batch,
            heads, length, d_kv], and the query attends to all keys in the cache.
        """
        config = self.config
        heads, d_kv = config.num_heads, config.d_kv
        fan_in = config.d_model**-0.5

        def dense(name: str, size: int, init: Initializer, axes: tuple[str, str]) -> Dense:
            drops = adapter_dropout(config, self.layer, f"{name}_adapter_dropout")
            return Dense(size, self.dtype, init, axes=axes, adapter_dropout=drops, name=name)

        def project(name: str, source: Array, stddev: float) -> Array:
            y = dense(name, heads * d_kv, normal(stddev), ("embed", "heads"))
            return split_heads(y(source, deterministic=deterministic), heads)

        # T5X divides before the projection, in the activations' dtype.
        queries = x / jnp.sqrt(d_kv).astype(x.dtype) if config.scale_queries else x
        query = project("query", queries, fan_in * d_kv**-0.5)
        if isinstance(key_value_source, KeysAndValues):
            key, value = key_value_source
        else:
            key = project("key", key_value_source, fan_in)
            value = project("value", key_value_source, fan_in)
        if position is not None:
            key = self._update_cache("cached_key", key, position)
            value = self._update_cache("cached_value", value, position)
        elif self._fills_cache(key_value_source):
            self.put_variable("cache", "cached_key", key)
            self.put_variable("cache", "cached_value", value)
        in_float32 = config.arithmetic.float32_attention_logits
        logits_type = jnp.dtype("float32") if in_float32 else self.dtype
        # One mask for all queries of a sequence: axis -2 of [batch, heads, query, key].
        dropout = Dropout(config.dropout_rate, -2, self.layer)
        apply_dropout = functools.partial(dropout, deterministic=deterministic)
        y = attention(query, key, value, position_bias, mask, apply_dropout, logits_type)
        y = y.swapaxes(1, 2)
        y = y.reshape(*y.shape[:-2], heads * d_kv)
        out = dense("out", config.d_model, normal((heads * d_kv) ** -0.5), ("heads", "embed"))
        return out(y, deterministic=deterministic)

    def _fills_cache(self, source: Any) -> bool:
        # Cross attention has its keys and values already; initialization may write anything.
        is_memory = isinstance(source, KeysAndValues)
        return self.is_mutable_collection("cache") and not is_memory and not self.is_initializing()

    def _update_cache(
        self, name: str, x: Float[Array, "batch heads 1 d_kv"], position: Int[Array, "*rows"]
    ) -> Float[Array, "batch heads keys d_kv"]:
        """The cache of this name with x at its position."""
        # Only decoding passes a position, and it also passes the cache, so no initialization is
        # needed.
        cache = self.variable("cache", name)
        rows = jnp.arange(x.shape[0]) if position.ndim else slice(None)
        # A row that is done continues past the last position, where nothing is written.
        cache.value = cache.value.at[rows, :, position].set(x[:, :, 0])
        return cache.value


def split_heads(
    x: Float[Array, "batch length width"], heads: int
) -> Float[Array, "batch heads length d_kv"]:
    """Splits the width of a projection into heads: [batch, heads, length, width / heads]."""
    split = x.reshape(*x.shape[:-1], heads, -1).swapaxes(1, 2)
    return constrain(split, "batch", "heads", None, None)


def keys_and_values(
    parameters: Mapping[str, Any],
    source: Float[Array, "batch memory d_model"],
    heads: int,
    dtype: jnp.dtype,
) -> KeysAndValues:
    """The projections that an `Attention` with these parameters computes from its memory."""

    def project(name: str) -> jax.Array:
        size, init = parameters[name]["kernel"].shape[-1], nn.initializers.zeros
        dense = Dense(size, dtype, init, axes=("embed", "heads"))
        y = dense.apply({"params": parameters[name]}, source)
        assert isinstance(y, jax.Array)
        return split_heads(y, heads)

    return KeysAndValues(project("key"), project("value"))


class RelativePositionBias(nn.Module):
    """One learned bias per head and bucket of relative position.

    A tower's layers share one, unless the model has `position_bias_per_layer`.
    """

    config: ModelConfig
    dtype: jnp.dtype
    bidirectional: bool

    @nn.compact
    def __call__(
        self, length: int, position: Int[Array, "*rows"] | None = None
    ) -> Float[Array, "*rows heads offsets"]:
        """The bias for the offsets of keys from queries, in ascending order.

        Args:
          length: length of the sequence.
          position: position of the single query in decoding with a cache, of all rows or [rows]:
            offsets are then those of all keys from it, and the bias for later keys is meaningless.
            None gives the bias of all queries.
        """
        config = self.config
        shape = (config.num_heads, config.relative_attention_num_buckets)
        values = parameter(self, "rel_embedding", _GLOROT_UNIFORM, shape)

        def look_up(offsets: np.ndarray) -> Array:
            bucket = relative_position_bucket(
                offsets,
                self.bidirectional,
                config.relative_attention_num_buckets,
                config.relative_attention_max_distance,
                epsilon=config.arithmetic.epsilon_in_position_bucket,
            )
            return values[:, bucket]

        if position is None:
            return look_up(np.arange(1 - length, length, dtype=np.int32)).astype(self.dtype)
        # numpy computes buckets while the model is traced, but the position is known only on the
        # device. So compute the bias of every distance up to where all share a bucket, and look up
        # each key's distance there.
        furthest = config.relative_attention_max_distance
        by_distance = look_up(-np.arange(furthest + 1, dtype=np.int32)).astype(self.dtype)
        places = np.arange(length, dtype=np.int32)
        distances = jnp.clip(position[..., None] - places, 0, furthest)
        return jnp.moveaxis(by_distance[:, distances], 0, -2)


def relative_position_bucket(
    offset: np.ndarray,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
    *,
    epsilon: bool = False,
) -> np.ndarray:
    """Bucket of each relative position (key minus query): int32 in [0, num_buckets).

    Half of the buckets hold one offset each; the others are spaced logarithmically up to
    max_distance. The arithmetic is float32 with Mesh TensorFlow's order of operations
    (transformer_layers._relative_position_bucket); with `epsilon`, it is T5X's, which adds
    float32's epsilon to the logarithm's argument. It runs in numpy while the model is traced, since
    lengths are known then, so that every device has the same buckets.
    """
    bucket = np.zeros_like(offset)
    # Positive for keys before the query.
    distance = -offset
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (distance < 0).astype(np.int32) * num_buckets
        distance = np.abs(distance)
    else:
        # Later keys, which a decoder does not see, share bucket 0.
        distance = np.maximum(distance, 0)
    max_exact = num_buckets // 2
    # Small distances do not use the logarithm; clipping at 1 avoids a warning about log(0).
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(max_exact)
    if epsilon:
        ratio = ratio + np.finfo(np.float32).eps
    scaled = np.log(ratio) / np.float32(math.log(max_distance / max_exact))
    large = max_exact + (scaled * np.float32(num_buckets - max_exact)).astype(np.int32)
    large = np.minimum(large, num_buckets - 1)
    return (bucket + np.where(distance < max_exact, distance, large)).astype(np.int32)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation of this name; see t0repro.config.model.Activation.

    Mesh TensorFlow's gelu is the tanh approximation (mesh_tensorflow.ops.gelu), and so is T5X's;
    transformers' "gelu" is the exact one, and its "gelu_new" is this gelu.

    Raises:
      KeyError: if the model has no such activation.
    """
    function = _ACTIVATIONS[name]

    def activate(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bfloat16 and device_to_trace_for().platform == "cpu":
            # XLA on CPU would round after each operation, which takes three times as long.
            return function(x.astype(jnp.float32)).astype(x.dtype)
        return function(x)

    return activate


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.swish,
    "tanh": jnp.tanh,
}


def adapter_dropout(config: ModelConfig, layer: ScannedLayer | None, name: str) -> Dropout | None:
    """Creates the dropout of what a LoRA reads, if the model has an adapter with one."""
    rate = config.adapter.dropout if config.adapter else 0.0
    return Dropout(rate, None, layer, name=name) if rate else None


def logits_dtype(config: ModelConfig, activations: jnp.dtype) -> jnp.dtype:
    """The dtype of both inputs of the vocabulary's logits matmul; the logits are float32."""
    in_float32 = config.arithmetic.float32_vocabulary_logits
    return jnp.dtype("float32") if in_float32 else activations


def kernel_initializer(config: ModelConfig) -> Initializer:
    """The initializer of the feed-forward layers' kernels and of the logits'."""
    if config.arithmetic.rescaled_truncated_normal:
        return _RESCALED_TRUNCATED_NORMAL
    return fan_in_truncated_normal


def fan_in_truncated_normal(
    key: jax.Array, shape: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Normal with standard deviation fan_in**-0.5, truncated at two deviations, not rescaled.

    This is mtf.layers.VarianceScalingInitializer, the default of dense layers.
    """
    return nn.initializers.truncated_normal(stddev=shape[0] ** -0.5)(key, shape, dtype)
