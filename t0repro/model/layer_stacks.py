"""Trees whose towers hold their layers stacked, one array for each parameter of a layer.

    by layer    {"encoder": {"layers_0": {"mlp": ...}, "layers_1": {"mlp": ...}, ...}}
    stacked     {"encoder": {"layers_*": {"mlp": an axis more, of layers}, ...}}

A tower that is one body in a loop (t0repro.model.blocks) reads its layers as stacks. Where it is
given them so, nothing has to be copied in each step, and an update is one operation for all layers
of a tower. Checkpoints and users know the layers by their own names.

Trees may be of anything that is in the place of parameters: shapes, gradients, optimizer slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.parameters.layout import LAYERS, layer_name

# The number of layers of each tower.
Towers = Mapping[str, int]
# Makes one array of those of all layers, and the arrays of all layers of one.
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
      stack: makes one array of those of all layers.
    """
    found = without_layers(tree, towers)
    for tower, count in towers.items():
        layers = [tree[tower][layer_name(index)] for index in range(count)]
        found[tower][LAYERS] = jax.tree.map(lambda *arrays: stack(arrays), *layers)
    return found


def rows(stack: Any) -> Sequence[Any]:
    """The arrays of all layers of a stack; of an array of numpy they are views."""
    return [stack[index] for index in range(stack.shape[0])]


def by_layer(tree: Any, towers: Towers, split: Split = rows) -> Any:
    """The inverse of `stacked`.

    Args:
      tree: with stacks; one without any, of any kind, is returned as it is.
      towers: what `stacks_in` finds in it, or in the parameters that it belongs to.
      split: makes the arrays of all layers of one.
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
    """A stack of arrays, which it deletes; or the shape of one, for shapes.

    So a state that is stacked array by array never needs the memory of a second one.
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
    """The arrays of all layers of a stack, which it deletes."""
    sharding = stack.sharding
    divided = isinstance(sharding, NamedSharding)
    if divided:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return _in_place_of([stack], jax.jit(rows, out_shardings=sharding if divided else None)(stack))


def _in_place_of(arrays: Sequence[Any], result: Any) -> Any:
    """What was made of arrays, which it deletes."""
    # Not earlier: results that are only queued may have their memory already.
    jax.block_until_ready(result)
    for array in arrays:
        if isinstance(array, jax.Array):  # a user's state may have arrays of numpy
            array.delete()
    return result
