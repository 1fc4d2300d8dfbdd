"""T5X's learning-rate schedule: a product of factors that are named in one string.

The factors are those of t5x.utils.create_learning_rate_scheduler (google-research/t5x at cc342d4).
Each is computed in float32 from the global step before the update. Unlike in Mesh TensorFlow's
schedules, the product never falls below `min_learning_rate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from t0repro.errors import UserError, nearest_names

Number = int | float
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
        # In the order in which they are named, which decides how float32 rounds the product.
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
