"""Where each gin binding came from: the file and line, or the override, that set it last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from t0repro.config import gin_door

Key = tuple[str, str, str]  # scope, complete selector, argument


@dataclasses.dataclass(frozen=True)
class Bindings:
    """The recorded places of the bindings in effect.

    Attributes:
      places: (scope, selector, argument) -> "file:line" or "--gin_param '...'". gin's macros are
        also bindings, with the selector gin.macro.
      macros: Every macro that a binding refers to, including bindings overridden since.
      scopes: The scope of every reference such as `@slow/linear_decay`, including overridden ones.
    """

    places: dict[Key, str]
    macros: set[str] = dataclasses.field(default_factory=set)
    scopes: set[str] = dataclasses.field(default_factory=set)

    def place(self, key: Key) -> str | None:
        """Where a binding was set, following a macro to its definition; None if it was not set."""
        import gin.config

        if key not in self.places:
            return None
        scope, selector, argument = key
        value = gin.config._CONFIG.get((scope, selector), {}).get(argument)
        macro = _macro_name(value)
        if macro is not None:
            definition = self.place((macro, "gin.macro", "value"))
            if definition is not None:
                return f"{definition} (%{macro}, bound at {self.places[key]})"
        return self.places[key]

    def find(self, scopes: tuple[str, ...], selector: str, argument: str) -> str | None:
        """Where the innermost scope that binds an argument does so, the empty one last; or None."""
        for scope in (*reversed(scopes), ""):
            place = self.place((scope, selector, argument))
            if place is not None:
                return place
        return None

    def source(self, scopes: tuple[str, ...], selector: str, argument: str) -> str:
        """The place that `find` returns, or that the argument has its default."""
        place = self.find(scopes, selector, argument)
        return place or f"default of {selector.rpartition('.')[2]}.{argument}"


def _macro_name(value: Any) -> str | None:
    """The name of the macro that a binding's value refers to, or None for any other value."""
    import gin.config

    # A macro is a reference to a configurable called `macro`, evaluated in a scope of its name.
    if isinstance(value, gin.config.ConfigurableReference) and value.evaluate:
        scope, _, selector = value.scoped_selector.rpartition("/")
        if selector.endswith("macro"):
            return scope
    return None


@contextlib.contextmanager
def record_bindings(flag: str = "--gin_param") -> Iterator[Bindings]:
    """Records where every binding that gin parses inside the block comes from.

    gin 0.5.0 knows the line while it parses and then forgets it, so the two functions that see it,
    `try_with_location` (the statement's place) and `bind_parameter` (its effect), are wrapped.

    Args:
      flag: The command-line option that gives overrides, as it appears in their places.
    """
    import gin.config

    bindings = Bindings({})
    location: list[Any] = []
    try_with_location, bind_parameter = (
        gin.config.utils.try_with_location,
        gin.config.bind_parameter,
    )

    @contextlib.contextmanager
    def noting_location(place: Any) -> Iterator[None]:
        location.append(place)
        try:
            with try_with_location(place):
                yield
        finally:
            location.pop()

    def noting_binding(binding_key: Any, value: Any) -> None:
        bind_parameter(binding_key, value)
        # After gin has accepted it: a binding that it refuses has no place.
        key = gin.config.ParsedBindingKey.parse(binding_key)
        bindings.places[(key.scope, key.complete_selector, key.arg_name)] = _describe(
            location, flag
        )
        for part in gin.config._iterate_flattened_values(value):
            macro = _macro_name(part)
            if macro is not None:
                bindings.macros.add(macro)
            elif gin_door.is_reference(part) and part.scopes:
                bindings.scopes.add("/".join(part.scopes))

    gin.config.utils.try_with_location = noting_location
    gin.config.bind_parameter = noting_binding
    try:
        yield bindings
    finally:
        gin.config.utils.try_with_location = try_with_location
        gin.config.bind_parameter = bind_parameter


def _describe(locations: list[Any], flag: str) -> str:
    if not locations:
        return "set by t5_mesh_transformer"
    # The innermost: a statement in an included file was made there, not at the `include`.
    innermost = locations[-1]
    if innermost.filename is None:
        return f"{flag} {innermost.line_content.strip()!r}"
    return f"{_short(innermost.filename)}:{innermost.line_num}"


def _short(filename: str) -> str:
    """A gin file's path, relative to site-packages if it was installed there."""
    _, installed, inside = PurePath(filename).as_posix().rpartition("/site-packages/")
    return inside if installed else filename
