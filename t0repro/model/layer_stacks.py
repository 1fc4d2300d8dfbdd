"""Trees whose towers have stacked layers, with one array for each parameter of a layer.

    by layer    {"encoder": {"layers_0": {"mlp": ...}, "layers_1": {"mlp": ...}, ...}}
    stacked     {"encoder": {"layers_*": {"mlp": an axis more, of layers}, ...}}

A scanned tower (t0repro.model.blocks) reads its layers as stacks. If they arrive stacked, no step
has to copy them, and one operation updates all layers of a tower. Checkpoints and users refer to
layers by their own names.

A tree may have anything in place of parameters: shapes, gradients, optimizer slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from t0repro.model.shapes import Array, Int
from t0repro.parameters.naming import LAYERS, layer_name

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

# A scanned tower (t0repro.model.blocks) ends its backward pass with a stack of all its layers'
# gradients. With several microbatches, these are then added to sums of the same size, and XLA holds
# the stacks of both towers in addition to the sums: 2.3 of the 16.3 GiB of T0 11B's step on a
# v3-512. So the sums go through the scans themselves, stacked, as values that no computation reads.
# Their gradient is defined here as the sum so far:
#
#     forward    sums ---- layer 0 ---- ... ---- layer 23 ---- starting_with
#     backward   sums + all gradients <- ... <- sums + those of layer 23 <- sums
#
# Each layer adds its own gradient in place, and no stack of gradients exists. The sums are an entry
# of the tower's parameters, SUMS, so that a loss passes them on like any parameter.


SUMS = "gradient_sums"


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
def starting_with(x: Array, sums: Any) -> Array:
    """Returns x; in the backward pass, the last layer adds its gradient to the sums' own values."""
    del sums
    return x


starting_with.defvjp(lambda x, sums: (x, sums), lambda sums, gradient: (gradient, sums))


# ---- Around the loss ----------------------------------------------------------------------------

# Without towers, parameters may be any tree, such as those of a user's model.


def zeros(params: Any, towers: Towers, specs: Any = None) -> Any:
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
        totals[tower][SUMS] = jax.tree.map(zero, params[tower][LAYERS], *divided)
    return totals


def with_sums(params: Any, totals: Any, towers: Towers) -> Any:
    """The parameters to pass to a loss, with the sums of the towers' layers among them."""
    if not towers:
        return params
    summed = {tower: {**params[tower], SUMS: totals[tower][SUMS]} for tower in towers}
    return {**params, **summed}


def added_up(totals: Any, gradients: Any, towers: Towers) -> Any:
    """The sums after a microbatch, from its gradients with respect to `with_sums`."""

    def add(path: Any, total: Array, gradient: Array) -> Array:
        return gradient if path[1:2] == (DictKey(SUMS),) else total + gradient

    return jax.tree_util.tree_map_with_path(add, totals, without_layers(gradients, towers))


def like(params: Any, totals: Any, towers: Towers) -> Any:
    """The sums as a tree like the parameters, by layer or stacked."""
    if not towers:
        return totals
    found = {name: dict(value) if name in towers else value for name, value in totals.items()}
    for tower in towers:
        found[tower][LAYERS] = found[tower].pop(SUMS)
    return found if stacks_in(params) else by_layer(found, towers)
