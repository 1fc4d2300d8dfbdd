"""The one module that touches gin's private state, and follows its macros.

gin 0.5.0 has no public way to ask what is bound where, what a reference refers to before it is
called, or which configurables there are. Everything else in this project asks here, so that another
version of gin is one module's concern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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


def selector_of(value: Any) -> str | None:
    """The complete selector of what a reference names, called or not; None for other values."""
    return value.configurable.selector if is_reference(value) else None


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


class Reference(NamedTuple):
    """What `@scope/selector` in a gin file refers to, by its complete selector."""

    scope: str
    selector: str

    @property
    def name(self) -> str:
        """The configurable's own name."""
        return self.selector.rpartition(".")[2]

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scope and those around it, outermost first."""
        return enclosing(self.scope)


def reference_to(value: Any, within: str = "") -> Reference | None:
    """The configurable that a value names without calling it, macros followed; else None.

    Args:
      value: A value as written.
      within: The scope in which it is called, unless it has one itself.
    """
    value = followed(value)
    if not is_reference(value) or value.evaluate:
        return None
    scope, selector = value.config_key
    return Reference(scope or within, selector)


def value_of(selector: str, argument: str, scope: str = "") -> Any:
    """An argument's value as written, for a call in a scope, macros followed; None if unbound."""
    return followed(written(selector, scope).get(argument))


def scope_of(selector: str, argument: str) -> str:
    """The scope of the reference that an argument is bound to; "" without one."""
    reference = reference_to(value_of(selector, argument))
    return reference.scope if reference else ""


def written(selector: str, scope: str = "") -> dict[str, Any]:
    """The bindings of a configurable that is called in a scope, as written."""
    found = [bound().get((each, selector), {}) for each in enclosing(scope)]
    return {argument: value for arguments in found for argument, value in arguments.items()}


def enclosing(scope: str) -> tuple[str, ...]:
    """The scopes whose bindings a call in `a/b` takes, outermost first: "", "a" and "a/b"."""
    parts = scope.split("/") if scope else []
    return tuple("/".join(parts[:depth]) for depth in range(len(parts) + 1))


def resolved(scope: str, selector: str) -> dict[str, Any]:
    """The bindings of a configurable that is called in a scope, references resolved."""
    with gin.config_scope(scope or None):
        return gin.get_bindings(selector)
