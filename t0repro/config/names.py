"""The gin names of a run's settings, in both dialects, declared beside each field.

    @arguments(t5x="utils.SaveCheckpointConfig", mtf="utils.run")
    @dataclasses.dataclass(frozen=True)
    class SaveConfig:
        keep: Annotated[int | None, Range(at_least=1), Mtf("keep_checkpoint_max")] = None
        from_first_step: Annotated[bool, Only(t5x=True, mtf=False)] = True

A field is an argument of its class's configurable under its own name, unless it says otherwise: by
another argument, by the full name of an argument of another configurable, or by `Only`, the value
that it always has in a dialect. Reading, `explain`, translation and the lists in the docs follow.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from t0repro.config.hints import hints_of

Dialect = Literal["mtf", "t5x"]
UNSET: Any = object()
"""No value: a required argument's default, or a dialect that can bind any value."""

_Kind = TypeVar("_Kind", bound=type)


@dataclasses.dataclass(frozen=True)
class Argument:
    """A field's argument in gin.

    Attributes:
      name: `configurable.argument` as gin files write it, or the argument alone; "" for the field's
        own name.
      default: The argument's default if it is not the field's.
      hint: The argument's type if it is not the field's.
      read: Turns the argument's value into the field's.
      macro: The macro through which the dialect's own files bind it.
    """

    name: str = ""
    _: dataclasses.KW_ONLY
    default: Any = UNSET
    hint: Any = None
    read: Callable[[Any], Any] | None = None
    macro: str | None = None

    @property
    def configurable(self) -> str:
        """The configurable, by its name in gin files."""
        return self.name.rpartition(".")[0]

    @property
    def argument(self) -> str:
        """The argument alone."""
        return self.name.rpartition(".")[2]


class T5x(Argument):
    """An argument in T5X's dialect."""


class Mtf(Argument):
    """An argument in Mesh TensorFlow's dialect; its name may begin with the tower's scope."""


_ARGUMENTS: Mapping[Dialect, type[Argument]] = {"t5x": T5x, "mtf": Mtf}


RULE: Any = object()
"""In `Only`: a rule of the dialect gives the value."""


@dataclasses.dataclass(frozen=True)
class Only:
    """The value that a field always has in a dialect, where no argument is it; or `RULE`."""

    _: dataclasses.KW_ONLY
    mtf: Any = UNSET
    t5x: Any = UNSET


def or_none(value: Any) -> Any:
    """A value, or None for 0, an empty text and an empty list."""
    return value or None


def arguments(**configurables: str) -> Callable[[_Kind], _Kind]:
    """Declares the configurables, one a dialect, whose arguments a class's fields are."""

    def declare(kind: _Kind) -> _Kind:
        kind.gin_configurables = configurables  # pyright: ignore[reportAttributeAccessIssue]
        return kind

    return declare


@functools.cache
def arguments_of(kind: type, dialect: Dialect) -> Mapping[str, Argument]:
    """Field -> its argument in a dialect, by its full name; fields that nothing binds are left out.

    Args:
      kind: A dataclass of settings.
      dialect: The dialect.
    """
    configurable = getattr(kind, "gin_configurables", {}).get(dialect)
    arguments = {}
    for field in dataclasses.fields(kind):
        argument = _annotation(kind, field.name, _ARGUMENTS[dialect])
        # A class's configurable is not inherited: another class's fields are other arguments.
        if argument is None and (configurable is None or fixed_value(kind, field.name, dialect)):
            continue
        argument = argument or _ARGUMENTS[dialect]()
        name = argument.name or field.name
        if "." not in name:
            name = f"{configurable}.{name}"
        arguments[field.name] = dataclasses.replace(argument, name=name)
    return arguments


def fixed_value(kind: type, field: str, dialect: Dialect) -> tuple[Any] | None:
    """What `Only` gives a field in a dialect, as a tuple of one; None if an argument sets it."""
    only = _annotation(kind, field, Only)
    value = UNSET if only is None else getattr(only, dialect)
    return None if value is UNSET else (value,)


def fixed_values(kind: type, dialect: Dialect) -> dict[str, Any]:
    """Field -> its value in a dialect, of the fields that have only one there."""
    fixed = {each.name: fixed_value(kind, each.name, dialect) for each in dataclasses.fields(kind)}
    return {name: value for name, only in fixed.items() if only for value in only
            if value is not RULE}  # fmt: skip


@functools.cache
def list_parts(*kinds: type) -> tuple[type, ...]:
    """Classes of settings with the classes of their fields, each after those of its own fields."""
    parts: dict[type, None] = {}

    def visit(hint: Any) -> None:
        for argument in typing.get_args(hint):
            visit(argument)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            for inner in hints_of(hint).values():
                visit(inner)
            parts.setdefault(hint)

    for kind in kinds:
        visit(kind)
    return tuple(parts)


def _annotation(kind: type, field: str, sort: type) -> Any:
    metadata = getattr(hints_of(kind)[field], "__metadata__", ())
    return next((item for item in metadata if type(item) is sort), None)
