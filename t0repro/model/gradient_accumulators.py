"""Adds up the gradients of a tower's layers inside the backward pass of its scan.

A scanned tower ends its backward pass with a stack of all its layers' gradients. With several
microbatches, these are then added to sums of the same size, and XLA holds the stacks of both
towers in addition to the sums: 2.3 of the 16.3 GiB of T0 11B's step on a v3-512. So the sums go
through the scans themselves, stacked, as values that no computation reads. Their gradient is
defined here as the sum so far:

    forward    sums ---- layer 0 ---- ... ---- layer 23 ---- seed_accumulator
    backward   sums + all gradients <- ... <- sums + those of layer 23 <- sums

Each layer adds its own gradient in place, and no stack of gradients exists. The sums are an entry
of the tower's parameters, `GRAD_ACCUM`, so that a loss passes them on like any parameter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey

from t0repro.model.layer_stacks import (
    Towers,
    count_stacked_layers,
    drop_layers,
    stack_layers,
    unstack,
)
from t0repro.model.shapes import Array, Int
from t0repro.parameters.naming import LAYERS

GRAD_ACCUM = "gradient_sums"


@jax.custom_vjp
def accumulate_grads(parameters: Any, sums: Any, index: Int[Array, ""]) -> tuple[Any, Any]:
    """Returns both; in the backward pass, the parameters' gradient is added to the sums' row.

    Args:
      parameters: one layer's parameters.
      sums: the same tree, float32, [layers, ...].
      index: the layer's index.
    """
    del index
    return parameters, sums


def _accumulate_forward(parameters: Any, sums: Any, index: Array) -> tuple[Any, Array]:
    return (parameters, sums), index


def _accumulate_backward(index: Array, gradients: tuple[Any, Any]) -> tuple[None, Any, None]:
    of_layer, sums = gradients
    add = lambda total, new: total.at[index].add(new.astype(total.dtype))  # noqa: E731
    return None, jax.tree.map(add, sums, of_layer), None


accumulate_grads.defvjp(_accumulate_forward, _accumulate_backward)


@jax.custom_vjp
def seed_accumulator(x: Array, sums: Any) -> Array:
    """Returns x; in the backward pass, the last layer adds its gradient to the sums' own values."""
    del sums
    return x


seed_accumulator.defvjp(lambda x, sums: (x, sums), lambda sums, gradient: (gradient, sums))


# Without towers, parameters may be any tree, such as those of a user's model.


def init_accumulators(params: Any, towers: Towers, specs: Any = None) -> Any:
    """Zero float32 sums of gradients, stacked for each tower's layers, else like the parameters.

    Args:
      params: the parameters, by layer or stacked.
      towers: towers whose layers' sums go through their scan.
      specs: how each parameter is sharded; None on one device.
    """

    def zero(parameter: Any, spec: PartitionSpec | None = None) -> jax.Array:
        x = jnp.zeros(parameter.shape, jnp.float32)
        return x if spec is None else jax.lax.with_sharding_constraint(x, spec)

    totals = jax.tree.map(zero, drop_layers(params, towers))
    if not towers:
        return totals
    if not count_stacked_layers(params):
        params = jax.eval_shape(lambda p: stack_layers(p, towers), params)
        # All layers of a tower have parameters with the same shapes and sharding.
        of_all = lambda layers: PartitionSpec(None, *layers[0])  # noqa: E731
        specs = None if specs is None else stack_layers(specs, towers, of_all)
    for tower in towers:
        divided = () if specs is None else (specs[tower][LAYERS],)
        totals[tower][GRAD_ACCUM] = jax.tree.map(zero, params[tower][LAYERS], *divided)
    return totals


def attach_accumulators(params: Any, totals: Any, towers: Towers) -> Any:
    """The parameters to pass to a loss, with the sums of the towers' layers among them."""
    if not towers:
        return params
    summed = {tower: {**params[tower], GRAD_ACCUM: totals[tower][GRAD_ACCUM]} for tower in towers}
    return {**params, **summed}


def add_grads(totals: Any, gradients: Any, towers: Towers) -> Any:
    """The sums after a microbatch, from its gradients with respect to `attach_accumulators`."""

    def add(path: Any, total: Array, gradient: Array) -> Array:
        return gradient if path[1:2] == (DictKey(GRAD_ACCUM),) else total + gradient

    return jax.tree_util.tree_map_with_path(add, totals, drop_layers(gradients, towers))


def detach_accumulators(params: Any, totals: Any, towers: Towers) -> Any:
    """The sums as a tree like the parameters, by layer or stacked."""
    if not towers:
        return totals
    grads = {name: dict(value) if name in towers else value for name, value in totals.items()}
    for tower in towers:
        grads[tower][LAYERS] = grads[tower].pop(GRAD_ACCUM)
    return grads if count_stacked_layers(params) else unstack(grads, towers)
