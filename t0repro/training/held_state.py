"""A train state as a trainer holds it: the layers of deep towers stacked.

A deep tower is one body in a loop, and an update of its stacks is one operation for all its layers.
So the compiled step does not grow with depth, and no step copies layers into stacks. Whoever reads
a state by the names of its parameters gets it by layer (`single_layers`, t0repro.training.
train_state), as checkpoints always are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from t0repro.model.blocks import towers_in_loops
from t0repro.model.layer_stacks import Towers, joined, stacked, stacks_in
from t0repro.model.t5 import T5
from t0repro.parameters.layout import layer_name
from t0repro.training.models import BaseModel, T5Model, is_own
from t0repro.training.optimizers import Optimizer, StackingOptimizer
from t0repro.training.train_state import TrainState, state_shapes


def with_stacks(model: BaseModel, state: TrainState) -> TrainState:
    """The state with the layers of each tower that is a loop stacked, where that can be done.

    Not for a user's own model or optimizer, which may read parameters by their names, nor where an
    optimizer keeps other slots for one layer than for another, as for one that is frozen.

    Args:
      model: what the state is for.
      state: by layer, with its values or their shapes; arrays that are stacked are deleted.
    """
    if not is_own(model) or type(model.module) is not T5:
        return state
    if not isinstance(state.optimizer, StackingOptimizer) or stacks_in(state.params):
        return state
    towers = towers_in_loops(model.module.config)
    if not towers or not _alike(state.slots, towers):
        return state
    return state.replace(
        params=stacked(state.params, towers, joined), slots=stacked(state.slots, towers, joined)
    )


def held_shapes(model: T5, optimizer: Optimizer) -> TrainState:
    """The shapes of a new state as a trainer holds it; nothing is allocated."""
    return with_stacks(T5Model(model), state_shapes(model, optimizer))


def _alike(slots: Any, towers: Towers) -> bool:
    """Whether all layers of a tower have the same slots."""

    def kinds(layers: Sequence[Any]) -> set[Any]:
        return {jax.tree.structure(layer) for layer in layers}

    return isinstance(slots, dict) and all(
        len(kinds([slots[tower][layer_name(index)] for index in range(count)])) == 1
        for tower, count in towers.items()
    )
