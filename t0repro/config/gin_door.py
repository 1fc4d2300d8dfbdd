"""The one module that touches gin's private state, and follows its macros.

gin 0.5.0 has no public way to ask what is bound where, what a reference refers to before it is
called, or which configurables there are. Everything else in this project asks here, so that another
version of gin is one module's concern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gin.config

import gin

MACRO = "gin.macro"
"""The configurable under which gin keeps macros; the macro's name is its scope."""


def bound() -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """(scope, selector) -> argument -> value, as written: references are not resolved."""
    return gin.config._CONFIG


def function_of(selector: str) -> Any:
    """The function or class that a complete selector names, without gin's wrapper."""
    configurable: Any = gin.config._REGISTRY[selector]
    return configurable.wrapped


def is_reference(value: Any) -> bool:
    """Whether a value is `@name`, `@name()` or `%macro`."""
    return isinstance(value, gin.config.ConfigurableReference)


def parts_of(value: Any) -> Iterator[Any]:
    """A value and everything inside it, in which lists and mappings may be nested."""
    return gin.config._iterate_flattened_values(value)


def macro_name(value: Any) -> str | None:
    """The name of the macro that a value refers to; None for any other value."""
    # `%name` is a reference to a configurable called `macro`, in a scope of the macro's name.
    if is_reference(value) and value.evaluate and value.configurable.selector == MACRO:
        return "/".join(value.scopes)
    return None


def followed(value: Any) -> Any:
    """What a macro finally stands for, None if it has no value; any other value as it is."""
    while (name := macro_name(value)) is not None:
        value = bound().get((name, MACRO), {}).get("value")
    return value


def resolved(scope: str, selector: str) -> dict[str, Any]:
    """The bindings of a configurable that is called in a scope, references resolved."""
    with gin.config_scope(scope or None):
        return gin.get_bindings(selector)
