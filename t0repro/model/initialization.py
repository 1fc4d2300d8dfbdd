"""Initial values of parameters.

One small program for each kind of parameter. Flax's `init` under one jit gives XLA separate
operations for each parameter. T5 1.1 small has 190 parameters of nine kinds; that program took
four times as long to compile as nine small ones together. The values equal Flax's bitwise.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import flax
import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from t0repro.parameters.naming import layer_name

Initializer = Callable[..., jax.Array]
_COLLECTION = "initializers"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _RecordedInit:
    """A parameter's initializer; part of a tree's structure, so that `eval_shape` returns it."""

    init: Initializer


def parameter(module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...]) -> Any:
    """Declares a module's only parameter, float32, so that `sample_parameters` can initialize it.

    Returns the array passed to `apply`, JAX's or numpy's.

    Args:
      module: the module being called.
      name: the parameter's name.
      init: its initializer; one program initializes all parameters with the same (identical) one.
      shape: its shape.
    """
    record = _RecordedInit(init)
    # Ignored unless the caller requests the collection, which only the function below does.
    module.sow(_COLLECTION, name, record, init_fn=lambda: record, reduce_fn=lambda _, new: new)
    return module.param(name, init, shape, jnp.float32)


def sample_parameters(
    model: nn.Module,
    key: jax.Array,
    batch: Mapping[str, Any],
    shardings: Any = None,
    towers: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The parameters that `model.init(key, batch)` would give, as a nested dictionary.

    All layers of a tower declare the same parameters, so a model with one layer can stand for a
    deeper one: tracing takes a time that grows with the number of layers.

    Args:
      model: a module that declares all its parameters by `parameter`.
      key: PRNG key.
      batch: arrays of token ids, of the shapes that the model takes.
      shardings: the sharding of each parameter, as a tree; None for the default device. Each device
        initializes its own shard, so none needs to hold a whole parameter.
      towers: the number of layers of each tower, of which `model` has at most one; None for those
        that it has.
    """
    traced = _trace_parameters(model, tuple((name, x.shape) for name, x in batch.items()))
    declared, recorded = (_repeat_layers(flat, towers or {}) for flat in traced)
    places: dict[Any, Any] = flax.traverse_util.flatten_dict(shardings or {})
    params = {}
    for path, leaf in declared.items():
        draw = _program(recorded[path].init, leaf.shape, places.get(path))
        # This is its module's only key, and Flax counts keys from 1.
        params[path] = draw(key, np.uint32(flax_hash(*path[:-1], 1)))
    return flax.traverse_util.unflatten_dict(params)


def _repeat_layers(flat: Mapping[Any, Any], towers: Mapping[str, int]) -> dict[Any, Any]:
    """A flat tree with as many layers as `towers` says, each like the first, sorted by path."""
    repeated = {}
    for path, leaf in flat.items():
        count = towers.get(path[0], 1) if layer_name(0) in path[1:2] else 0
        copies = [(path[0], layer_name(index), *path[2:]) for index in range(count)] or [path]
        repeated |= dict.fromkeys(copies, leaf)
    return dict(sorted(repeated.items()))


# A training run asks twice: for the shapes, then for the values.
@functools.cache
def _trace_parameters(
    model: nn.Module, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[dict[Any, jax.ShapeDtypeStruct], dict[Any, _RecordedInit]]:
    """Shapes and initializers of a model's parameters, by path."""
    batch = {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes}
    mutable = ["params", _COLLECTION]
    variables: Any = jax.eval_shape(lambda: model.init(jax.random.key(0), batch, mutable=mutable))
    flatten: Any = flax.traverse_util.flatten_dict
    return flatten(variables["params"]), flatten(variables[_COLLECTION])


@functools.cache
def _program(init: Initializer, shape: tuple[int, ...], sharding: Sharding | None) -> Any:
    def draw(key: jax.Array, path_hash: jax.Array) -> jax.Array:
        return init(jax.random.fold_in(key, path_hash), shape, jnp.float32)

    return jax.jit(draw, out_shardings=sharding)


def flax_hash(*names: str | int) -> int:
    """The hash of a path and a key count that flax.core.scope folds into a PRNG key."""
    # The separator distinguishes ("ab", "c") from ("a", "bc"); Flax adds it only if so configured.
    separator = b"\0" if flax.config.flax_fix_rng_separator else b""
    sha1 = hashlib.sha1(usedforsecurity=False)
    for name in names:
        if isinstance(name, int):
            data = name.to_bytes((name.bit_length() + 7) // 8, "big")
        else:
            data = name.encode()
        sha1.update(separator + data)
    return int.from_bytes(sha1.digest()[:4], "big")
