"""Trees whose towers have their layers stacked, and their conversion to trees by layer.

    by layer    {"encoder": {"layers_0": {"mlp": ...}, "layers_1": {"mlp": ...}, ...}}
    stacked     {"encoder": {"layers_*": {"mlp": an axis more, of layers}, ...}}

A scanned tower reads its layers as stacks. If they arrive stacked, no step has to copy them, and
one operation updates all layers of a tower. Checkpoints and users refer to layers by their own
names. A tree may have anything in place of parameters: shapes, gradients, optimizer slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from t0repro.parameters.naming import LAYERS, layer_name

# The number of layers of each tower.
Towers = Mapping[str, int]
# Functions that stack the arrays of all layers, and that split a stack into its layers' arrays.
Stack = Callable[[Sequence[Any]], Any]
Split = Callable[[Any], Sequence[Any]]


def count_stacked_layers(params: Any) -> dict[str, int]:
    """The towers whose layers are stacked in a tree of parameters."""
    # A user's model may have any tree.
    towers = params.items() if isinstance(params, Mapping) else ()
    return {
        name: jax.tree.leaves(tower[LAYERS])[0].shape[0]
        for name, tower in towers
        if isinstance(tower, Mapping) and LAYERS in tower
    }


def stack_layers(tree: Any, towers: Towers, stack: Stack = jnp.stack) -> dict[str, Any]:
    """A tree with the layers of each of `towers` stacked.

    Args:
      tree: by layer.
      towers: the towers, with all of their layers.
      stack: stacks the arrays of all layers.
    """
    result = drop_layers(tree, towers)
    for tower, count in towers.items():
        layers = [tree[tower][layer_name(index)] for index in range(count)]
        result[tower][LAYERS] = jax.tree.map(lambda *arrays: stack(arrays), *layers)
    return result


def can_stack(tree: Any, towers: Towers) -> bool:
    """Whether all layers of each tower are the same kind of tree, so that they can be stacked."""

    def kinds(layers: Sequence[Any]) -> set[Any]:
        return {jax.tree.structure(layer) for layer in layers}

    return isinstance(tree, dict) and all(
        len(kinds([tree[tower][layer_name(index)] for index in range(count)])) == 1
        for tower, count in towers.items()
    )


def split_rows(stack: Any) -> Sequence[Any]:
    """The arrays of all layers of a stack; for a numpy array, views of it."""
    return [stack[index] for index in range(stack.shape[0])]


def unstack(tree: Any, towers: Towers, split: Split = split_rows) -> Any:
    """The inverse of `stack_layers`.

    Args:
      tree: with stacks; a tree without any, of any kind, is returned as it is.
      towers: the result of `count_stacked_layers` for it, or for the parameters it belongs to.
      split: splits a stack into its layers' arrays.
    """
    if not towers:
        return tree
    result = {name: dict(value) if name in towers else value for name, value in tree.items()}
    for tower, count in towers.items():
        leaves, structure = jax.tree.flatten(result[tower].pop(LAYERS))
        split_leaves = [split(leaf) for leaf in leaves]
        for index in range(count):
            layer = structure.unflatten([arrays[index] for arrays in split_leaves])
            result[tower][layer_name(index)] = layer
    return result


def drop_layers(tree: Any, towers: Towers) -> Any:
    """The tree without the layers of `towers`, stacked or single; its upper levels are copies."""
    if not towers:
        return tree
    pruned = {
        tower: {name: x for name, x in tree[tower].items() if not name.startswith("layers_")}
        for tower in towers
    }
    return {**tree, **pruned}


def stack_donating(arrays: Sequence[Any]) -> Any:
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
    return _delete_after(arrays, stack)


def unstack_donating(stack: jax.Array) -> list[jax.Array]:
    """Splits a stack into its layers' arrays and deletes it."""
    sharding = stack.sharding
    divided = isinstance(sharding, NamedSharding)
    if divided:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return _delete_after(
        [stack], jax.jit(split_rows, out_shardings=sharding if divided else None)(stack)
    )


def _delete_after(arrays: Sequence[Any], result: Any) -> Any:
    """Deletes arrays after computing the result made from them."""
    # Wait first: results that are only queued may still need the arrays.
    jax.block_until_ready(result)
    for array in arrays:
        if isinstance(array, jax.Array):  # a user's state may have arrays of numpy
            array.delete()
    return result
