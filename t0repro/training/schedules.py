"""Learning-rate schedules: Mesh TensorFlow's under their names there, and T5X's factors.

A schedule is a function from the global step before an update (an int32 scalar) to the update's
learning rate (a float32 scalar), computed on the device in float32, as Mesh TensorFlow does. Each
of the functions below takes the step as float32, the run's total number of steps, and the
arguments under their names there, and returns float32.

The factors are those of t5x.utils.create_learning_rate_scheduler (google-research/t5x at
cc342d4). Each is computed in float32 from the global step before the update. Unlike in Mesh
TensorFlow's schedules, the product never falls below `min_learning_rate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from t0repro.config.optimizer import ScheduleConfig
from t0repro.errors import UserError, nearest_names

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
    # Normalized to 1 until warm-up ends, so that the base rate is the highest rate.
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
