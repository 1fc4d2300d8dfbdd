"""Chains of optax's own transformations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from t0repro.config.optimizer import OptaxConfig, ScheduleConfig
from t0repro.errors import UserError
from t0repro.training.schedules import SCHEDULES, make_schedule


def make_chain(config: OptaxConfig) -> optax.GradientTransformationExtraArgs:
    """The transformations that a configuration names, applied in order.

    Raises:
      UserError: if optax has no such function or does not take these arguments.
    """
    chain = optax.chain(*(_call_optax(call) for call in config.transformations))

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


def _call_optax(value: Any) -> Any:
    """The result of a call of optax; any other value as it is."""
    if isinstance(value, list | tuple):
        return type(value)(_call_optax(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    # How a configuration writes a call.
    if set(value) != {"function", "arguments"}:
        # JSON's keys are texts, and those of optax's boundaries are steps.
        return {int(key) if key.isdecimal() else key: _call_optax(it) for key, it in value.items()}
    if value["function"] in SCHEDULES:
        # T5X's, whose factors take no total number of steps.
        return make_schedule(ScheduleConfig(value["function"], value["arguments"], 0))
    function = getattr(optax, value["function"], None)
    arguments = {name: _call_optax(item) for name, item in value["arguments"].items()}
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
