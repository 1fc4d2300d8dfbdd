"""Instantiates the user's classes that take part in a run (t0repro.config.training_plan)."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from t0repro.config.run_config import RunConfig
from t0repro.config.training_plan import Replaced, UserClass
from t0repro.errors import UserError


def made_or(
    own: Callable[..., Any], config: RunConfig, part: Replaced, supplied: Mapping[str, Any]
) -> Any:
    """Instantiates the user's class for a part of a run, or this project's if there is none.

    Args:
      own: this project's class.
      config: the run.
      part: the part that the user's class replaces.
      supplied: the arguments of `own`, of which the user's class gets those that it takes.
    """
    user_class = config.plan.user_classes.get(part)
    where = config.provenance.get(f"plan.user_classes.{part}")
    return own(**supplied) if user_class is None else made(user_class, supplied, where)


def made(user_class: UserClass, supplied: Mapping[str, Any], where: str | None = None) -> Any:
    """Instantiates the class.

    Args:
      user_class: the class and its own arguments.
      supplied: arguments from the run; the class gets those that it takes.
      where: where the class was bound, for messages.

    Raises:
      UserError: if the class cannot be imported or called.
    """
    name = f"{user_class.module}.{user_class.name}"
    try:
        cls = operator.attrgetter(user_class.name)(importlib.import_module(user_class.module))
        return cls(**{k: v for k, v in supplied.items() if takes(cls, k)}, **user_class.arguments)
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"{name} cannot be made: {error}",
            where=where,
            fix="Give it the arguments of the class that it derives from, and pass them on.",
        ) from error


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function or a class takes an argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
