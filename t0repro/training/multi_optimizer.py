"""Several optimizers, each for parameters of its own, as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax

from t0repro.training.slots import Slots

Choice = Callable[[Sequence[str]], Collection[str]]


def by_parts(
    parts: Sequence[tuple[Choice, optax.GradientTransformationExtraArgs]],
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that leaves each set of parameters to another.

    Args:
      parts: what chooses paths of all there are, and the optimizer of these parameters, which keeps
        a Slots for each. Parameters that nothing chooses are not trained and have no slots.

    Raises:
      ValueError: from `init`, if two parts choose a parameter, or an optimizer keeps other state.
    """

    def init(params: Any) -> Any:
        flat = _flat(params)
        chosen = [choose(list(flat)) for choose, _ in parts]
        twice = sorted(path for path in flat if sum(path in paths for paths in chosen) > 1)
        if twice:
            raise ValueError(f"Several optimizers are for the same parameters: {twice}.")
        slots = {path: Slots() for path in flat}
        for paths, (_, optimizer) in zip(chosen, parts, strict=True):
            slots |= _slots_of(optimizer.init(_tree(flat, paths)), paths)
        return _tree(slots, slots)

    def update(gradients: Any, state: Any, params: Any = None, **options: Any) -> tuple[Any, Any]:
        flat, slots, values = _flat(params), _flat(state), _flat(gradients)
        changes = {path: jnp.zeros_like(parameter) for path, parameter in flat.items()}
        for choose, optimizer in parts:
            paths = choose(list(flat))
            change, after = optimizer.update(
                _tree(values, paths), _tree(slots, paths), _tree(flat, paths), **options
            )
            changes |= _flat(change)
            slots |= _flat(after)
        return _tree(changes, changes), _tree(slots, slots)

    # optax declares the constructor for transformations without extra arguments.
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _flat(tree: Any) -> dict[str, Any]:
    return flax.traverse_util.flatten_dict(
        tree, is_leaf=lambda _, value: isinstance(value, Slots | jax.Array), sep="/"
    )  # pyright: ignore[reportReturnType]


def _tree(flat: Mapping[str, Any], paths: Collection[str]) -> Any:
    # In the order of the parameters, whatever the order of the choice.
    return flax.traverse_util.unflatten_dict(
        {path: value for path, value in flat.items() if path in paths}, sep="/"
    )


def _slots_of(state: Any, paths: Collection[str]) -> dict[str, Slots]:
    slots = _flat(state) if isinstance(state, dict) else {}
    if set(slots) != set(paths) or not all(isinstance(x, Slots) for x in slots.values()):
        raise ValueError(
            "An optimizer of a MultiOptimizer must keep slots by parameter; for optimizers of optax"
            " use optax.multi_transform."
        )
    return slots
