"""Initializes parameters, with one small program for each kind of parameter.

Flax's `init` under one jit gives XLA operations of their own for each parameter: T5 1.1 small has
190, of nine kinds, and that program took four times as long to compile as the nine together. The
values are Flax's, to the last bit.
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

Initializer = Callable[..., jax.Array]
_COLLECTION = "initializers"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Noted:
    """A parameter's initializer; part of a tree's structure, so that `eval_shape` returns it."""

    init: Initializer


def parameter(module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...]) -> Any:
    """A float32 parameter of a module that has no other, which `draw_parameters` can draw.

    Returns the array that the model is applied to, JAX's or numpy's.

    Args:
      module: the module that is being called.
      name: the parameter's name.
      init: its initializer; parameters with the same one (by identity) are drawn by one program.
      shape: its shape.
    """
    noted = _Noted(init)
    # Left out wherever the collection is not asked for, that is everywhere but below.
    module.sow(_COLLECTION, name, noted, init_fn=lambda: noted, reduce_fn=lambda _, new: new)
    return module.param(name, init, shape, jnp.float32)


def draw_parameters(
    model: nn.Module, key: jax.Array, batch: Mapping[str, Any], shardings: Any = None
) -> dict[str, Any]:
    """The parameters that `model.init(key, batch)` draws, as a nested dictionary.

    Args:
      model: a module whose parameters are all made by `parameter`.
      key: PRNG key.
      batch: arrays of the shapes that the model takes.
      shardings: where each parameter belongs, a tree of them; None for the default device. Each
        device draws its own part, so none has to hold the whole.
    """
    asked = ["params", _COLLECTION]
    variables: Any = jax.eval_shape(lambda: model.init(key, batch, mutable=asked))
    noted = flax.traverse_util.flatten_dict(variables[_COLLECTION])
    places: dict[Any, Any] = flax.traverse_util.flatten_dict(shardings or {})
    drawn = {}
    for path, leaf in flax.traverse_util.flatten_dict(variables["params"]).items():
        draw = _program(noted[path].init, leaf.shape, places.get(path))
        # It is its module's only draw, and Flax counts draws from 1.
        drawn[path] = draw(key, np.uint32(flax_hash(*path[:-1], 1)))
    return flax.traverse_util.unflatten_dict(drawn)


@functools.cache
def _program(init: Initializer, shape: tuple[int, ...], sharding: Sharding | None) -> Any:
    def draw(key: jax.Array, path_hash: jax.Array) -> jax.Array:
        return init(jax.random.fold_in(key, path_hash), shape, jnp.float32)

    return jax.jit(draw, out_shardings=sharding)


def flax_hash(*names: str | int) -> int:
    """What flax.core.scope folds into a key for a path and a number of draws."""
    # The separator keeps ("ab", "c") and ("a", "bc") apart; Flax has it only if so configured.
    separator = b"\0" if flax.config.flax_fix_rng_separator else b""
    sha1 = hashlib.sha1(usedforsecurity=False)
    for name in names:
        if isinstance(name, int):
            data = name.to_bytes((name.bit_length() + 7) // 8, "big")
        else:
            data = name.encode()
        sha1.update(separator + data)
    return int.from_bytes(sha1.digest()[:4], "big")
