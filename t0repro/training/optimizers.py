"""Mesh TensorFlow's optimizers as optax transformations.

Adafactor, Adam, momentum and plain descent are each an optax.GradientTransformationExtraArgs whose
`update` takes two keywords beside optax's arguments, because Mesh TensorFlow's formulas contain
them: `step`, the global step before the update, and `learning_rate`. Unlike in optax, the rate
cannot be applied afterward: Adafactor scales it by each parameter's size, and momentum accumulates
gradients already multiplied by it.

    optimizer = make_optimizer(config)
    slots = optimizer.init(params)  # the tree of parameters, a Slots in place of each array
    updates, slots = optimizer.update(gradients, slots, params, step=step, learning_rate=rate)
    params = optax.apply_updates(params, updates)

Source: mesh_tensorflow/optimize.py. Adafactor has its own module (t0repro.training.adafactor), the
other formulas have t0repro.training.formulas.
Parameters and gradients are float32. Frozen parameters have no slots and get updates of zero.
Layers that are stacked (t0repro.model.layer_stacks) are updated as each of them would be by itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from t0repro.config.optimizer import (
    AdafactorConfig,
    MultiOptimizerConfig,
    OptaxConfig,
    OptimizerConfig,
)
from t0repro.parameters.naming import LAYERS, layer_name
from t0repro.parameters.shape import ALL_HEURISTIC
from t0repro.training import adafactor
from t0repro.training.formulas import FORMULAS, Gradient, Slots
from t0repro.training.optax_chain import make_chain

Optimizer = optax.GradientTransformationExtraArgs


class StackingOptimizer(Optimizer):
    """An optimizer of this module, which takes stacked layers too; one that wraps it may not."""

    # `_replace` makes a user's own.
    _make = Optimizer._make  # pyright: ignore[reportAssignmentType]


_FORMULAS = {**FORMULAS, AdafactorConfig: adafactor.update}


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer that a configuration describes.

    Raises:
      UserError: if optax does not take the arguments of a call.
    """
    if isinstance(config, OptaxConfig):
        return make_chain(config)
    if isinstance(config, MultiOptimizerConfig):
        return combine_optimizers(
            [(_choose_listed(x.paths), make_optimizer(x.optimizer)) for x in config.parts]
        )
    formula = _FORMULAS[type(config)]
    exceptions = _exceptions(config)
    # Rules by path may treat the layers of a stack, or any two parameters, differently.
    by_path = getattr(config, "factor_map", ()) not in ((), ALL_HEURISTIC)

    def new_slots(path: Any, parameter: jax.Array) -> Slots:
        name = _name(path)
        frozen = name in config.frozen
        shapes = {} if frozen else config.slot_shapes(name, parameter.shape)
        return Slots(**{name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()})

    def init(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(new_slots, params)

    def update_param(gradient: Gradient) -> tuple[jax.Array, Slots]:
        if gradient.path in config.frozen:
            return jnp.zeros_like(gradient.parameter), gradient.slots
        value, parameter, slots, path, step, learning_rate = gradient
        if by_path or path in exceptions or not isinstance(value, jax.core.Tracer):
            return formula(gradient, config)
        return update_any(value, parameter, slots, step, learning_rate)

    # A model has hundreds of parameters of a few shapes: the formula is traced once for each shape.
    # Without `inline`, the program has calls, and XLA compiles their sums in another order.
    @functools.partial(jax.jit, inline=True)
    def update_any(
        value: jax.Array, parameter: jax.Array, slots: Slots, step: Any, learning_rate: Any
    ) -> tuple[jax.Array, Slots]:
        """The change to a parameter that no option names."""
        return formula(Gradient(value, parameter, slots, "", step, learning_rate), config)

    def update_stacked(gradient: Gradient) -> tuple[jax.Array, Slots]:
        """The change to stacked layers, each updated as a parameter by itself."""
        arrays = (gradient.value, gradient.parameter, gradient.slots)
        paths = [
            gradient.path.replace(LAYERS, layer_name(index))
            for index in range(gradient.parameter.shape[0])
        ]

        def update_layer(path: str, value: Any, parameter: Any, slots: Any) -> tuple[Any, Slots]:
            named = {"value": value, "parameter": parameter, "slots": slots, "path": path}
            return update_param(gradient._replace(**named))

        if exceptions.isdisjoint(paths):
            return jax.vmap(functools.partial(update_layer, paths[0]))(*arrays)
        # A list of exceptions may name some of the layers only.
        changes = [
            update_layer(path, *jax.tree.map(operator.itemgetter(index), arrays))
            for index, path in enumerate(paths)
        ]
        return jax.tree.map(lambda *layers: jnp.stack(layers), *changes)

    def update(
        gradients: Any,
        state: Any,
        params: Any = None,
        *,
        step: jax.Array,
        learning_rate: jax.Array,
        **_: Any,
    ) -> tuple[Any, Any]:
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        # Flatten only down to the parameters, so that the Slots in place of each stays one object.
        slots, values = tree.flatten_up_to(state), tree.flatten_up_to(gradients)
        # Clip by the norm of all gradients together, before any of them is used.
        if isinstance(config, AdafactorConfig):
            values = _clip_by_global_norm(values, config)
        updates, new_slots = [], []
        for (path, parameter), slot, gradient in zip(leaves, slots, values, strict=True):
            param_gradient = Gradient(
                gradient.astype(jnp.float32), parameter, slot, _name(path), step, learning_rate
            )
            change, slot = (update_stacked if DictKey(LAYERS) in path else update_param)(
                param_gradient
            )
            updates.append(change)
            new_slots.append(slot)
        return tree.unflatten(updates), tree.unflatten(new_slots)

    # optax declares the constructor for transformations without extra arguments.
    return (Optimizer if by_path else StackingOptimizer)(init, update)  # pyright: ignore[reportArgumentType]


def skips_nan(config: OptimizerConfig | None) -> bool:
    """Whether some parameters keep their values where an update would make them NaN."""
    several = isinstance(config, MultiOptimizerConfig)
    configs = [part.optimizer for part in config.parts] if several else [config]
    return any(isinstance(x, AdafactorConfig) and x.skip_nan_updates for x in configs)


def _clip_by_global_norm(gradients: list[jax.Array], config: AdafactorConfig) -> list[jax.Array]:
    """Gradients of all parameters, scaled down together if their norm is above the limit."""
    limit = config.global_norm_clip
    if limit is None:
        return gradients
    norm = jnp.sqrt(jnp.sum(jnp.stack([jnp.sum(jnp.square(g)) for g in gradients])))
    # Not min(1, limit / norm), which rounds differently than T5X does.
    scale = limit * jnp.minimum(1.0 / limit, 1.0 / norm)
    return [gradient * scale for gradient in gradients]


def _choose_listed(paths: Collection[str]) -> Choice:
    return lambda all_paths: [path for path in all_paths if path in paths]


def _exceptions(config: Any) -> frozenset[str]:
    """Paths of the parameters that a configuration's lists of exceptions name."""
    lists = ("frozen", "exclude_from_parameter_scale", "exclude_from_weight_decay")
    return frozenset(path for name in lists for path in getattr(config, name, ()))


def _name(path: Any) -> str:
    """A parameter's path as T5X writes it, e.g. "encoder/layers_0/mlp/wo/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


Choice = Callable[[Sequence[str]], Collection[str]]


def combine_optimizers(
    parts: Sequence[tuple[Choice, optax.GradientTransformationExtraArgs]],
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that delegates each set of parameters to another optimizer.

    Args:
      parts: pairs of a function that chooses from all paths, and the optimizer of the chosen
        parameters, which keeps a Slots for each. Parameters that none chooses are not trained and
        have no slots.

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
    # Keep the order of the parameters, whatever the order of the choices.
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
