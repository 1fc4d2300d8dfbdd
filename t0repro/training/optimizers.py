"""Mesh TensorFlow's optimizers as optax transformations, and the learning-rate schedules.

Adafactor, Adam, momentum and plain descent are each an optax.GradientTransformationExtraArgs whose
`update` takes two keywords beside optax's arguments, because Mesh TensorFlow's formulas contain
them: `step`, the global step before the update, and `learning_rate`. Unlike in optax, the rate
cannot be applied afterwards: Adafactor scales it by each parameter's size, and momentum accumulates
gradients already multiplied by it.

    optimizer = make_optimizer(config)
    slots = optimizer.init(params)  # the tree of parameters, a Slots in place of each array
    updates, slots = optimizer.update(gradients, slots, params, step=step, learning_rate=rate)
    params = optax.apply_updates(params, updates)

Source: mesh_tensorflow/optimize.py. Adafactor has its own module (t0repro.training.adafactor).
Parameters and gradients are float32. Frozen parameters have no slots and get updates of zero.
Layers that are stacked (t0repro.model.towers) are updated as each of them would be by itself.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from t0repro.config.run_config import (
    AdafactorConfig,
    AdamWeightDecayConfig,
    MomentumConfig,
    MultiOptimizerConfig,
    OptaxConfig,
    OptimizerConfig,
    ScheduleConfig,
    SgdConfig,
)
from t0repro.errors import UserError, nearest_names
from t0repro.parameters.naming import LAYERS, layer_name
from t0repro.parameters.shape import ALL_HEURISTIC
from t0repro.training import adafactor
from t0repro.training.adafactor import Gradient, Slots

Optimizer = optax.GradientTransformationExtraArgs


class StackingOptimizer(Optimizer):
    """An optimizer of this module, which takes stacked layers too; one that wraps it may not."""

    # `_replace` makes a user's own.
    _make = Optimizer._make  # pyright: ignore[reportAssignmentType]


class _Formula(NamedTuple):
    """How one of Mesh TensorFlow's optimizers treats a single parameter.

    Attributes:
      slot_shapes: maps a parameter's path and shape and the options to the shape of each slot.
      update: returns the change to add to the parameter, and its new slots.
    """

    slot_shapes: Callable[[str, tuple[int, ...], Any], Mapping[str, tuple[int, ...]]]
    update: Callable[[Gradient, Any], tuple[jax.Array, Slots]]


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer that a configuration describes.

    Raises:
      UserError: if optax does not take the arguments of a call.
    """
    if isinstance(config, OptaxConfig):
        return make_chain(config)
    if isinstance(config, MultiOptimizerConfig):
        return by_parts([(_among(x.paths), make_optimizer(x.optimizer)) for x in config.parts])
    formula, exceptions = _FORMULAS[type(config)], _exceptions(config)
    # Rules by path may treat the layers of a stack, or any two parameters, differently.
    by_path = getattr(config, "factor_map", ()) not in ((), ALL_HEURISTIC)

    def new_slots(path: Any, parameter: jax.Array) -> Slots:
        name = _name(path)
        frozen = name in config.frozen
        shapes = {} if frozen else formula.slot_shapes(name, parameter.shape, config)
        return Slots(**{name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()})

    def init(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(new_slots, params)

    def of_one(gradient: Gradient) -> tuple[jax.Array, Slots]:
        if gradient.path in config.frozen:
            return jnp.zeros_like(gradient.parameter), gradient.slots
        value, parameter, slots, path, step, learning_rate = gradient
        if by_path or path in exceptions or not isinstance(value, jax.core.Tracer):
            return formula.update(gradient, config)
        return of_any(value, parameter, slots, step, learning_rate)

    # A model has hundreds of parameters of a few shapes: the formula is traced once for each shape.
    # Without `inline`, the program has calls, and XLA compiles their sums in another order.
    @functools.partial(jax.jit, inline=True)
    def of_any(
        value: jax.Array, parameter: jax.Array, slots: Slots, step: Any, learning_rate: Any
    ) -> tuple[jax.Array, Slots]:
        """The change to a parameter that no option names."""
        return formula.update(Gradient(value, parameter, slots, "", step, learning_rate), config)

    def of_all_layers(gradient: Gradient) -> tuple[jax.Array, Slots]:
        """The change to stacked layers, each updated as a parameter by itself."""
        arrays = (gradient.value, gradient.parameter, gradient.slots)
        paths = [
            gradient.path.replace(LAYERS, layer_name(index))
            for index in range(gradient.parameter.shape[0])
        ]

        def of_layer(path: str, value: Any, parameter: Any, slots: Any) -> tuple[Any, Slots]:
            named = {"value": value, "parameter": parameter, "slots": slots, "path": path}
            return of_one(gradient._replace(**named))

        if exceptions.isdisjoint(paths):
            return jax.vmap(functools.partial(of_layer, paths[0]))(*arrays)
        # A list of exceptions may name some of the layers only.
        changes = [
            of_layer(path, *jax.tree.map(operator.itemgetter(index), arrays))
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
            values = _clipped(values, config)
        updates, new_slots = [], []
        for (path, parameter), slot, gradient in zip(leaves, slots, values, strict=True):
            one = Gradient(
                gradient.astype(jnp.float32), parameter, slot, _name(path), step, learning_rate
            )
            change, slot = (of_all_layers if DictKey(LAYERS) in path else of_one)(one)
            updates.append(change)
            new_slots.append(slot)
        return tree.unflatten(updates), tree.unflatten(new_slots)

    # optax declares the constructor for transformations without extra arguments.
    return (Optimizer if by_path else StackingOptimizer)(init, update)  # pyright: ignore[reportArgumentType]


def skips_nan(config: OptimizerConfig | None) -> bool:
    """Whether some parameters keep their values where an update would make them NaN."""
    several = isinstance(config, MultiOptimizerConfig)
    each = [part.optimizer for part in config.parts] if several else [config]
    return any(isinstance(one, AdafactorConfig) and one.skip_nan_updates for one in each)


def _clipped(gradients: list[jax.Array], config: AdafactorConfig) -> list[jax.Array]:
    """Gradients of all parameters, scaled down together if their norm is above the limit."""
    limit = config.global_norm_clip
    if limit is None:
        return gradients
    norm = jnp.sqrt(jnp.sum(jnp.stack([jnp.sum(jnp.square(g)) for g in gradients])))
    # Not min(1, limit / norm), which rounds differently than T5X does.
    scale = limit * jnp.minimum(1.0 / limit, 1.0 / norm)
    return [gradient * scale for gradient in gradients]


def _among(paths: Collection[str]) -> Choice:
    return lambda found: [path for path in found if path in paths]


def _exceptions(config: Any) -> frozenset[str]:
    """Paths of the parameters that a configuration's lists of exceptions name."""
    lists = ("frozen", "exclude_from_parameter_scale", "exclude_from_weight_decay")
    return frozenset(path for name in lists for path in getattr(config, name, ()))


def _name(path: Any) -> str:
    """A parameter's path as T5X writes it, e.g. "encoder/layers_0/mlp/wo/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _adam_slots(path: str, shape: tuple[int, ...], config: AdamWeightDecayConfig) -> dict[str, Any]:
    del path, config
    return {"adam_m": shape, "adam_v": shape}


def _adam(gradient: Gradient, config: AdamWeightDecayConfig) -> tuple[jax.Array, Slots]:
    """Adam without bias correction: its moments start at zero."""
    slots, value = gradient.slots, gradient.value
    assert slots.adam_m is not None and slots.adam_v is not None
    m = config.beta_1 * slots.adam_m + (1.0 - config.beta_1) * value
    v = config.beta_2 * slots.adam_v + (1.0 - config.beta_2) * jnp.square(value)
    change = m / (jnp.sqrt(v) + config.epsilon)
    # After the division by the moments, so that the decay does not depend on them.
    if config.weight_decay_rate and gradient.path not in config.exclude_from_weight_decay:
        change = change + config.weight_decay_rate * gradient.parameter
    return -(gradient.learning_rate * change), Slots(adam_m=m, adam_v=v)


def _momentum_slots(path: str, shape: tuple[int, ...], config: MomentumConfig) -> dict[str, Any]:
    del path, config
    return {"momentum_v": shape}


def _momentum(gradient: Gradient, config: MomentumConfig) -> tuple[jax.Array, Slots]:
    """Momentum, subtracting the velocity from before this step's gradient."""
    before = gradient.slots.momentum_v
    assert before is not None
    velocity = gradient.value * gradient.learning_rate + before * config.momentum
    # Mesh TensorFlow assigns the new velocity and subtracts the variable's value, in its graph the
    # old one. On CPU the two are not ordered, so by chance a parameter moves by either.
    return -before, Slots(momentum_v=velocity)


def _no_slots(path: str, shape: tuple[int, ...], config: SgdConfig) -> dict[str, Any]:
    del path, shape, config
    return {}


def _descent(gradient: Gradient, config: SgdConfig) -> tuple[jax.Array, Slots]:
    del config
    return -(gradient.value * gradient.learning_rate), Slots()


_FORMULAS: Mapping[type, _Formula] = {
    AdafactorConfig: _Formula(adafactor.slot_shapes, adafactor.update),
    AdamWeightDecayConfig: _Formula(_adam_slots, _adam),
    MomentumConfig: _Formula(_momentum_slots, _momentum),
    SgdConfig: _Formula(_no_slots, _descent),
}


# ---- optax's own ---------------------------------------------------------------------------------


def make_chain(config: OptaxConfig) -> optax.GradientTransformationExtraArgs:
    """The transformations that a configuration names, applied in order.

    Raises:
      UserError: if optax has no such function or does not take these arguments.
    """
    chain = optax.chain(*(_called(call) for call in config.transformations))

    def update(
        gradients: Any,
        state: Any,
        params: Any = None,
        *,
        step: jax.Array,
        learning_rate: jax.Array,
        **_: Any,
    ) -> tuple[Any, Any]:
        # Each transformation counts its own updates and has its rate bound already.
        del step, learning_rate
        return chain.update(gradients, state, params)

    return optax.GradientTransformationExtraArgs(chain.init, update)  # pyright: ignore[reportArgumentType]


def _called(value: Any) -> Any:
    """The result of a call of optax; any other value as it is."""
    if isinstance(value, list | tuple):
        return type(value)(_called(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    # How a configuration writes a call.
    if set(value) != {"function", "arguments"}:
        # JSON's keys are texts, and those of optax's boundaries are steps.
        return {int(key) if key.isdecimal() else key: _called(it) for key, it in value.items()}
    if value["function"] in SCHEDULES:
        # T5X's, whose factors take no total number of steps.
        return make_schedule(ScheduleConfig(value["function"], value["arguments"], 0))
    function = getattr(optax, value["function"], None)
    arguments = {name: _called(item) for name, item in value["arguments"].items()}
    try:
        if function is None:
            raise TypeError("there is no such function")
        return function(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optax.{value['function']} cannot be called with {arguments}: {error}",
            where="optimizers.chain.transformations",
            fix="Correct its arguments.",
        ) from error


# ---- Several optimizers --------------------------------------------------------------------------


Choice = Callable[[Sequence[str]], Collection[str]]


def by_parts(
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


# ---- Learning-rate schedules: Mesh TensorFlow's under their names there, and T5X's ---------------
#
# A schedule is a function from the global step before an update (an int32 scalar) to the update's
# learning rate (a float32 scalar), computed on the device in float32, as Mesh TensorFlow does. Each
# of the functions below takes the step as float32, the run's total number of steps, and the
# arguments under their names there, and returns float32.

Schedule = Callable[[jax.Array], jax.Array]
Number = int | float  # gin's 0 stands for 0.0


def make_schedule(config: ScheduleConfig) -> Schedule:
    """Returns the schedule that a configuration names, with its arguments bound.

    Raises:
      UserError: if there is no schedule of that name, or it does not take these arguments.
    """
    if config.name not in SCHEDULES:
        raise UserError(
            f"There is no learning-rate schedule called {config.name!r} on the JAX stack.",
            where="utils.run.learning_rate_schedule",
            fix=f"Nearest names: {nearest_names(config.name, SCHEDULES)}; or use --backend=mtf.",
        )
    function, total = SCHEDULES[config.name], float(config.total_train_steps)
    arguments = dict(config.arguments)

    def schedule(step: jax.Array) -> jax.Array:
        rate = function(jnp.asarray(step).astype(jnp.float32), total, **arguments)
        return jnp.asarray(rate, jnp.float32)

    # Trace it once, so that wrong arguments are an error now and not at the first step.
    try:
        jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except TypeError as error:
        raise UserError(
            f"The schedule {config.name} does not take these arguments, {sorted(arguments)}:"
            f" {error}.",
            where="utils.run.learning_rate_schedule",
            fix="Correct the gin bindings of the schedule.",
        ) from error
    return schedule


def constant_learning_rate(step: jax.Array, total: Number, *, learning_rate: Number) -> jax.Array:
    """The same rate at every step."""
    del step, total
    return jnp.float32(learning_rate)


def constant(step: jax.Array, total: Number, *, value: Number = 1.0) -> jax.Array:
    """The same rate at every step; also a factor of `product_learning_rate`."""
    del step, total
    return jnp.float32(value)


def learning_rate_schedule_noam(
    step: jax.Array,
    total: Number,
    *,
    warmup_steps: Number = 10000,
    linear_decay_fraction: Number = 0.1,
    multiplier: Number = 1.0,
    offset: Number = 0,
) -> jax.Array:
    """Multiplier / sqrt(max(step, warmup)), falling to zero over the last part of training.

    T5 was trained with a decay fraction of 0, which leaves just the reciprocal square root.
    """
    # Count both from `offset`, so that the decay still ends with the run.
    total, step = total - offset, step - offset
    # rsqrt as in Mesh TensorFlow; T5X's factors divide by a root, which rounds differently.
    rate = jax.lax.rsqrt(jnp.maximum(step, warmup_steps)) * multiplier
    if linear_decay_fraction > 0:
        rate = rate * jnp.minimum(1.0, (total - step) / (total * linear_decay_fraction))
    return rate


def truncated_rsqrt(step: jax.Array, total: Number, *, warmup_steps: Number = 10000) -> jax.Array:
    """1 / sqrt(max(step, warmup))."""
    del total
    return jax.lax.rsqrt(jnp.maximum(step, warmup_steps))


def linear_warmup(
    step: jax.Array, total: Number, *, steps_or_fraction: Number = 10000
) -> jax.Array:
    """Rises from 0 to 1 over the first steps; a number of at most 1 is a fraction of all steps."""
    return jnp.minimum(1.0, step / _steps(steps_or_fraction, total))


def linear_decay(step: jax.Array, total: Number, *, steps_or_fraction: Number = 0.1) -> jax.Array:
    """Falls from 1 to 0 over the last steps; a number of at most 1 is a fraction of all steps."""
    return jnp.minimum(1.0, (total - step) / _steps(steps_or_fraction, total))


def linear_decay_learning_rate(
    step: jax.Array, total: Number, *, initial_lr: Number = 0.1, offset: Number = 0
) -> jax.Array:
    """Stays at initial_lr until step `offset`, then falls linearly to 0 at the end."""
    return initial_lr * jnp.minimum(1.0, (total - step) / (total - offset))


def slanted_triangular(
    step: jax.Array,
    total: Number,
    *,
    cut_fraction: Number = 0.1,
    ratio: Number = 32,
    max_learning_rate: Number = 0.01,
    start_step: Number = 0,
) -> jax.Array:
    """A short rise and a long fall (Howard and Ruder 2018, https://arxiv.org/abs/1801.06146)."""
    step = step - start_step
    cut = math.floor(total * cut_fraction)
    # From 1 at the cut to 0 at the last step.
    falling = 1 - (step - cut) / (cut * (1 / cut_fraction - 1))
    share = jnp.where(step < cut, step / cut, falling)
    return max_learning_rate * (1 + share * (ratio - 1)) / ratio


def product_learning_rate(
    step: jax.Array,
    total: Number,
    *,
    factors: list[Number | str | Mapping],
    offset: Number = 0,
) -> jax.Array:
    """The product of numbers and schedules, the schedules evaluated at step - offset.

    Args:
      step: the global step before the update.
      total: number of steps of the whole run.
      offset: subtracted from both before the factors see them.
      factors: numbers, names of schedules of this module, or {"name": ..., "arguments": {...}}.
    """
    rate = jnp.float32(1.0)
    for factor in factors:
        if isinstance(factor, int | float):
            rate = rate * factor
            continue
        name = factor if isinstance(factor, str) else factor["name"]
        arguments = {} if isinstance(factor, str) else factor.get("arguments", {})
        if name not in SCHEDULES:
            raise UserError(
                f"There is no learning-rate schedule called {name!r} on the JAX stack.",
                where="learning_rate_schedules.product_learning_rate.factors",
                fix=f"Nearest names: {nearest_names(name, SCHEDULES)}; or use --backend=mtf.",
            )
        rate = rate * SCHEDULES[name](step - offset, total - offset, **arguments)
    return rate


def adafactor_default(
    step: jax.Array, total: Number, *, multiply_by_parameter_scale: bool
) -> jax.Array:
    """The rate that Mesh TensorFlow's Adafactor uses in a run without a schedule."""
    del total
    # Both numbers are those of AdafactorOptimizer._learning_rate_default.
    rate = jnp.minimum(jax.lax.rsqrt(step + 1.0), 0.01)
    return rate if multiply_by_parameter_scale else rate * 0.05


def _steps(steps_or_fraction: Number, total: Number) -> Number:
    """Number of steps, given as such or as a fraction of the total."""
    # So 1 means all steps, not a single one.
    return steps_or_fraction * total if steps_or_fraction <= 1 else steps_or_fraction


# ---- T5X's factors -------------------------------------------------------------------------------

# The factors are those of t5x.utils.create_learning_rate_scheduler (google-research/t5x at
# cc342d4). Each is computed in float32 from the global step before the update. Unlike in Mesh
# TensorFlow's schedules, the product never falls below `min_learning_rate`.


Factor = Callable[[jax.Array, Mapping[str, Number]], jax.Array]


def create_learning_rate_scheduler(
    step: jax.Array,
    total: Number,
    *,
    factors: str = "constant * linear_warmup * rsqrt_decay",
    base_learning_rate: Number = 0.5,
    warmup_steps: Number = 1000,
    decay_factor: Number = 0.5,
    steps_per_decay: Number = 20000,
    steps_per_cycle: Number = 100000,
    step_offset: Number = 0,
    min_learning_rate: Number = 1e-8,
) -> jax.Array:
    """The learning rate of a step, float32: the product of `factors`, at least `min_learning_rate`.

    Args:
      step: float32 scalar, the global step before the update.
      total: number of training steps; no factor uses it.
      factors: names joined by "*", such as "constant * rsqrt_decay".
      base_learning_rate: what "constant" and "linear_decay" multiply by.
      warmup_steps: the step at which "linear_warmup" ends; the rsqrt decays are constant before it
        and "cosine_decay" starts there.
      decay_factor: "decay_every" multiplies by it every `steps_per_decay` steps; "linear_decay"
        falls by this share of the base rate each step.
      steps_per_decay: steps between the drops of "decay_every".
      steps_per_cycle: steps in which "cosine_decay" falls to zero; then it starts again.
      step_offset: subtracted from the step; earlier steps count as 0.
      min_learning_rate: lower bound of the product.

    Raises:
      UserError: if a factor is unknown.
    """
    del total
    arguments = {
        "base_learning_rate": base_learning_rate,
        "warmup_steps": warmup_steps,
        "decay_factor": decay_factor,
        "steps_per_decay": steps_per_decay,
        "steps_per_cycle": steps_per_cycle,
    }
    step = jnp.maximum(0.0, step - step_offset)
    rate = jnp.float32(1.0)
    for name in (part.strip() for part in factors.split("*")):
        if name not in FACTORS:
            raise UserError(
                f"There is no learning-rate factor called {name!r}.",
                where="utils.create_learning_rate_scheduler.factors",
                fix=f"Nearest names: {nearest_names(name, FACTORS)}.",
            )
        # Multiply in the order of the names: the order decides how float32 rounds the product.
        rate = rate * FACTORS[name](step, arguments)
    return jnp.maximum(rate, min_learning_rate)


def _constant(step: jax.Array, arguments: Mapping[str, Number]) -> jax.Array:
    del step
    return jnp.float32(arguments["base_learning_rate"])


def _linear_warmup(step: jax.Array, arguments: Mapping[str, Number]) -> jax.Array:
    return jnp.minimum(1.0, step / arguments["warmup_steps"])


def _linear_decay(step: jax.Array, arguments: Mapping[str, Number]) -> jax.Array:
    """Rises to the base rate, then falls by `decay_factor` of it per step, eventually below 0."""
    warmup = arguments["warmup_steps"]
    # Not bounded here: `min_learning_rate` bounds the product.
    falling = 1.0 + arguments["decay_factor"] * (warmup - step)
    return arguments["base_learning_rate"] * jnp.minimum(step / warmup, falling)


def _rsqrt_decay(step: jax.Array, arguments: Mapping[str, Number]) -> jax.Array:
    return 1.0 / jnp.sqrt(jnp.maximum(step, arguments["warmup_steps"]))


def _rsqrt_normalized_decay(step: jax.Array, arguments: Mapping[str, Number]) -> jax.Array:
    # Normalised to 1 until warm-up ends, so that the base rate is the highest rate.
    warmup = jnp.float32(arguments["warmup_steps"])
    return jnp.sqrt(warmup) / jnp.sqrt(jnp.maximum(step, warmup))


def _decay_every(step: jax.Array, arguments: Mapping[str, Number]) -> jax.Array:
    falls = jnp.floor(step / arguments["steps_per_decay"])
    return jnp.float32(arguments["decay_factor"]) ** falls


def _cosine_decay(step: jax.Array, arguments: Mapping[str, Number]) -> jax.Array:
    past_warmup = jnp.maximum(0.0, step - arguments["warmup_steps"])
    progress = past_warmup / arguments["steps_per_cycle"]
    return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))))


FACTORS: Mapping[str, Factor] = {
    "constant": _constant,
    "linear_warmup": _linear_warmup,
    "linear_decay": _linear_decay,
    "rsqrt_decay": _rsqrt_decay,
    "rsqrt_normalized_decay": _rsqrt_normalized_decay,
    "decay_every": _decay_every,
    "cosine_decay": _cosine_decay,
}


SCHEDULES: dict[str, Callable[..., jax.Array]] = {
    function.__name__: function
    for function in (
        adafactor_default,
        create_learning_rate_scheduler,
        constant,
        constant_learning_rate,
        learning_rate_schedule_noam,
        linear_decay,
        linear_decay_learning_rate,
        linear_warmup,
        product_learning_rate,
        slanted_triangular,
        truncated_rsqrt,
    )
}
