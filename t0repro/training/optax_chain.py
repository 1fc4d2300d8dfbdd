"""Chains of optax's transformations, as T5X's `optimizers.chain` makes them.

Their state is optax's own. Each knows its learning rate, from its arguments and its own count of
updates: the schedule of the run is only reported, as in T5X, whose wrapper ignores it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from t0repro.config.run_config import OptaxConfig
from t0repro.errors import UserError


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
    # How a configuration writes a call.
    if not (isinstance(value, Mapping) and set(value) == {"function", "arguments"}):
        return value
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
