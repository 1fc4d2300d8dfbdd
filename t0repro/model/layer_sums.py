"""Adds up the gradients of a tower's layers inside the backward pass of its loop.

A tower that is one body in a loop (t0repro.model.blocks) ends its backward pass with a stack of all
its layers' gradients. With several microbatches these are then added to sums of the same size, and
XLA has the stacks of both towers beside the sums: 2.3 of the 16.3 GiB of T0 11B's step on a v3-512.
So the sums go through the loops themselves, stacked, as values that nothing is computed from.
Their gradient is defined here as what has been added up so far:

    forward    sums ---- layer 0 ---- ... ---- layer 23 ---- starting_with
    backward   sums + all gradients <- ... <- sums + those of layer 23 <- sums

Each layer adds its own gradient in its place, and no stack of gradients exists. The sums are an
entry of the tower's parameters, SUMS, so that a loss hands them through like any parameter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey

from t0repro.model.layer_stacks import Towers, by_layer, stacked, stacks_in, without_layers
from t0repro.model.shapes import Array, Int
from t0repro.parameters.layout import LAYERS

SUMS = "gradient_sums"


# ---- In the tower -------------------------------------------------------------------------------


@jax.custom_vjp
def adding(parameters: Any, sums: Any, index: Int[Array, ""]) -> tuple[Any, Any]:
    """Both as they are; in the backward pass, the parameters' gradient goes to the sums' row.

    Args:
      parameters: those of one layer.
      sums: the same tree, float32, [layers, ...].
      index: which layer it is.
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
    """x; in the backward pass, the sums' own values are what the last layer adds to."""
    del sums
    return x


starting_with.defvjp(lambda x, sums: (x, sums), lambda sums, gradient: (gradient, sums))


# ---- Around the loss ----------------------------------------------------------------------------

# Without towers, parameters may be any tree: they are those of a user's model.


def zeros(params: Any, towers: Towers, specs: Any = None) -> Any:
    """Float32 sums of no gradients: those of each tower's layers stacked, all others as they are.

    Args:
      params: the parameters, by layer or stacked.
      towers: towers whose layers' sums go through their loop.
      specs: how each parameter is divided; None on one device.
    """

    def zero(parameter: Any, spec: PartitionSpec | None = None) -> jax.Array:
        x = jnp.zeros(parameter.shape, jnp.float32)
        return x if spec is None else jax.lax.with_sharding_constraint(x, spec)

    totals = jax.tree.map(zero, without_layers(params, towers))
    if not towers:
        return totals
    if not stacks_in(params):
        params = jax.eval_shape(lambda p: stacked(p, towers), params)
        # All layers of a tower have parameters of the same shapes, divided alike.
        of_all = lambda layers: PartitionSpec(None, *layers[0])  # noqa: E731
        specs = None if specs is None else stacked(specs, towers, of_all)
    for tower in towers:
        divided = () if specs is None else (specs[tower][LAYERS],)
        totals[tower][SUMS] = jax.tree.map(zero, params[tower][LAYERS], *divided)
    return totals


def with_sums(params: Any, totals: Any, towers: Towers) -> Any:
    """The parameters that a loss is given, with the sums of the towers' layers among them."""
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
