"""Ranges of numbers, declared in the annotations of dataclass fields and checked in one place.

A field declares its range once:

    d_model: Annotated[int, Range(at_least=1)]
    dropout_rate: Annotated[float, Range(at_least=0, below=1)]

`check` checks every number in a configuration against its field's range and type.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t0repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field may be.

    Attributes:
      above, below: Exclusive bounds; at_least and at_most are inclusive.
      also: Numbers outside the bounds with a special meaning, such as -1 for "all".
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        if value in self.also:
            return True
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = [
            f"{words} {bound}"
            for words, bound in (
                ("at least", self.at_least),
                ("above", self.above),
                ("at most", self.at_most),
                ("below", self.below),
            )
            if bound is not None
        ]
        words = " and ".join(bounds) or "finite"
        return f"{words}, or {' or '.join(map(str, self.also))}" if self.also else words


def range_of(kind: type, field: str) -> Range | Mapping[str, Range] | None:
    """The range of a dataclass field; for a mapping of arguments, a range per argument name."""
    hint = typing.get_type_hints(kind, include_extras=True)[field]
    return next(iter(getattr(hint, "__metadata__", ())), None)


def check(value: Any, provenance: Mapping[str, str], prefix: str = "") -> None:
    """Checks every number in a dataclass and in the dataclasses inside it.

    Args:
      value: The dataclass.
      provenance: Dotted field -> where its value was set.
      prefix: Prefix of the dotted names, for a dataclass inside another.

    Raises:
      UserError: For the first number outside its field's range, with its place.
    """
    for field in dataclasses.fields(value):
        name, item = f"{prefix}{field.name}", getattr(value, field.name)
        limits = range_of(type(value), field.name)
        if dataclasses.is_dataclass(item):
            check(item, provenance, f"{name}.")
        # Schedules and optax calls have a range for each argument name.
        elif isinstance(limits, Mapping):
            _check_arguments(name, item, limits, provenance)
        elif limits is not None:
            check_field(type(value), field.name, item, _place(name, provenance), shown=name)


def check_divides(name: str, parts: int, batch_size: int, where: str | None) -> None:
    """Raises UserError unless the rows of a batch divide into so many equal parts."""
    if batch_size % parts:
        raise UserError(
            f"{name} = {parts} does not divide the batch of {batch_size}.",
            where=where,
            fix="Choose a divisor of the batch size.",
        )


def check_field(kind: type, field: str, value: Any, where: str | None, shown: str = "") -> None:
    """Checks a value before it is assigned to a dataclass field.

    Args:
      kind: The dataclass.
      field: The field's name.
      value: A number, or a tuple or mapping of numbers.
      where: The place that set it.
      shown: The name to use in messages; defaults to the field's own.

    Raises:
      UserError: If the value, or one inside it, is not a number or is outside the field's range.
    """
    limits, hint = range_of(kind, field), typing.get_type_hints(kind)[field]
    assert isinstance(limits, Range)
    allowed = typing.get_args(hint)
    # Literals inside a union, such as T5X's names of loss denominators.
    parts = {part for union in allowed for part in typing.get_args(union)}
    words = sorted(part for part in parts if isinstance(part, str))
    if value is None and type(None) in allowed:
        return
    if isinstance(value, str) and (str in allowed or value in words):
        return  # a word may stand for numbers, as "all" does
    whole = float not in (hint, *allowed)
    for name, item in _parts(shown or field, value):
        _check_number(name, item, limits, where, whole, words)


def _check_arguments(
    name: str, arguments: Mapping[str, Any], limits: Mapping[str, Range], provenance: Any
) -> None:
    """Checks a function's arguments, including those of functions that are its factors."""
    for key, value in arguments.items():
        place = _place(f"{name}.{key}", provenance)
        if key in limits and value is not None:
            _check_number(f"{name}.{key}", value, limits[key], place, whole=False)
        # A factor is a number, or a schedule with arguments of its own.
        for factor in value if isinstance(value, list) else ():
            if isinstance(factor, Mapping):
                _check_arguments(f"{name}.{key}", factor["arguments"], limits, provenance)
            else:
                _check_number(f"{name}.{key}", factor, Range(), place, whole=False)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the numbers in a field's value, each with a name for messages."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((name, item) for item in value)
    else:
        yield name, value


def _check_number(
    name: str,
    number: Any,
    limits: Range,
    where: str | None,
    whole: bool,
    words: Sequence[str] = (),
) -> None:
    kinds = int if whole else (int, float)
    # bool is a subclass of int, but True is not a number that a user meant.
    if isinstance(number, kinds) and not isinstance(number, bool) and number in limits:
        return
    wanted = f"{'a whole number' if whole else 'a number'}, {limits}"
    wanted += "".join(f", or {word!r}" for word in words)
    raise UserError(
        f"{name} is {number!r}; it must be {wanted}.", where=where, fix=f"Bind {wanted}."
    )


def _place(name: str, provenance: Mapping[str, str]) -> str | None:
    """Where a field was set, or else where the part that contains it was set."""
    while name and name not in provenance:
        name = name.rpartition(".")[0]
    return provenance.get(name)
