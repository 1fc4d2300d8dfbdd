"""Types and ranges of a configuration's values, declared beside each field and checked here.

A field declares both once:

    d_model: Annotated[int, Range(at_least=1)]
    dropout_rate: Annotated[float, Range(at_least=0, below=1)]

`check` compares every value of a configuration with its field's annotation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config.declared_types import elements, fits, hints_of, in_words
from t0repro.errors import UserError
from t0repro.words import printable


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


def range_of(kind: Any, field: str) -> Range | Mapping[str, Range] | None:
    """The range of a field or of a function's argument; of a mapping of arguments, one for each."""
    return next(iter(getattr(hints_of(kind)[field], "__metadata__", ())), None)


def check(value: Any, provenance: Mapping[str, str], prefix: str = "") -> None:
    """Checks every value in a dataclass, and in the dataclasses inside it, against its annotation.

    Args:
      value: The dataclass.
      provenance: Dotted field -> where its value was set.
      prefix: Prefix of the dotted names, for a dataclass inside another.

    Raises:
      UserError: For the first value of another type than its field's, or number outside its
        field's range, with its place.
    """
    for field in dataclasses.fields(value):
        name, item = f"{prefix}{field.name}", getattr(value, field.name)
        check_field(type(value), field.name, item, _place(name, provenance), shown=name)
        limits = range_of(type(value), field.name)
        # Schedules and optax calls have a range for each argument name.
        if isinstance(limits, Mapping):
            _check_arguments(name, item, limits, provenance)
        for part, inside in _parts(name, item):
            if dataclasses.is_dataclass(inside):
                check(inside, provenance, f"{part}.")


def check_divides(name: str, parts: int, batch_size: int, where: str | None) -> None:
    """Raises UserError unless the rows of a batch divide into so many equal parts."""
    if batch_size % parts:
        raise UserError(
            f"{name} = {parts} does not divide the batch of {batch_size}.",
            where=where,
            fix="Choose a divisor of the batch size.",
        )


def check_field(kind: Any, field: str, value: Any, where: str | None, shown: str = "") -> None:
    """Checks a value before it is assigned to a dataclass field.

    Args:
      kind: The dataclass, or a function that annotates its arguments so.
      field: The name of the field or argument.
      value: The value.
      where: The place that set it.
      shown: The name to use in messages; defaults to the field's own.

    Raises:
      UserError: If the value, or one inside it, is not of the field's type or is outside its range.
    """
    hint, limits, name = hints_of(kind)[field], range_of(kind, field), shown or field
    limits = limits if isinstance(limits, Range) else None
    inner = elements(hint, value)
    if inner is not None:
        for part, item in _parts(name, value):
            _check_one(part, item, inner, limits, where)
    else:
        _check_one(name, value, hint, limits, where)


def _check_one(name: str, value: Any, hint: Any, limits: Range | None, where: str | None) -> None:
    """Raises UserError unless a value is of a type and, if it is a number, in a range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if fits(value, hint) and not (is_number and limits is not None and value not in limits):
        return
    wanted = in_words(hint, limits)
    raise UserError(
        f"{name} is {printable(repr(value))}; it must be {wanted}.",
        where=where,
        fix=f"Bind {wanted}.",
    )


def _check_arguments(
    name: str, arguments: Mapping[str, Any], limits: Mapping[str, Range], provenance: Any
) -> None:
    """Checks a function's arguments, including those of functions that are its factors."""
    for key, value in arguments.items():
        place = _place(f"{name}.{key}", provenance)
        if key in limits and value is not None:
            _check_one(f"{name}.{key}", value, float, limits[key], place)
        # A factor is a number, or a schedule with arguments of its own.
        for factor in value if isinstance(value, list) else ():
            if isinstance(factor, Mapping):
                _check_arguments(f"{name}.{key}", factor["arguments"], limits, provenance)
            else:
                _check_one(f"{name}.{key}", factor, float, Range(), place)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what is in a list or mapping, or else the value itself, each named for messages."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((name, item) for item in value)
    else:
        yield name, value


def _place(name: str, provenance: Mapping[str, str]) -> str | None:
    """Where a field was set, or else where the part that contains it was set."""
    while name and name not in provenance:
        name = name.rpartition(".")[0]
    return provenance.get(name)
