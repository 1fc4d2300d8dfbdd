"""The ranges of settings, declared once beside each field and checked here, with the types.

    d_model: Annotated[int, Range(at_least=1)]
    dropout_rate: Annotated[float, Range(at_least=0, below=1)]

`check` compares every value of a configuration with its field's annotation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from t0repro.config.hints import describe_type, elements, fits, hints_of
from t0repro.errors import UserError
from t0repro.words import printable

MOST_32, MOST_64 = 2**31 - 1, 2**63 - 1
"""The largest integers of 32 and 64 bits: JAX counts steps, rows and tokens in 32."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field accepts.

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
            # Without a bound above, Inf would pass every comparison; NaN passes none.
            (isinstance(value, int) or math.isfinite(value))
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
    """The range of a field or of an argument; for a mapping of arguments, one range for each."""
    metadata = getattr(hints_of(kind)[field], "__metadata__", ())
    return next((item for item in metadata if isinstance(item, Range | Mapping)), None)


def check(value: Any, provenance: Mapping[str, str], prefix: str = "") -> None:
    """Checks every value in a dataclass, and in the dataclasses inside it; see `check_values`."""
    check_values(type(value), vars(value), provenance, prefix)


def check_values(
    kind: type, values: Mapping[str, Any], provenance: Mapping[str, str], prefix: str = ""
) -> None:
    """Checks values of a dataclass's fields, and the dataclasses inside them.

    Args:
      kind: The dataclass.
      values: Field -> value; fields that it lacks are not checked.
      provenance: Dotted field -> where its value was set.
      prefix: Prefix of the dotted names, for a dataclass inside another.

    Raises:
      UserError: For the first value whose type is not its field's or that is outside its field's
        range, with its place.
    """
    for field in dataclasses.fields(kind):
        if field.name not in values:
            continue
        name, item = f"{prefix}{field.name}", values[field.name]
        check_field(kind, field.name, item, place_of(name, provenance), shown=name)
        limits = range_of(kind, field.name)
        # Schedules and optax calls have one range per argument name.
        if isinstance(limits, Mapping):
            _check_arguments(name, item, limits, provenance)
        for part, inside in _parts(name, item):
            if dataclasses.is_dataclass(inside):
                check(inside, provenance, f"{part}.")


def check_divides(name: str, parts: int, batch_size: int, where: str | None) -> None:
    """Raises UserError unless the rows of a batch divide into `parts` equal parts."""
    if batch_size % parts:
        raise UserError(
            f"{name} = {parts} does not divide the batch of {batch_size}.",
            where=where,
            fix="Choose a divisor of the batch size.",
        )


def check_field(kind: Any, field: str, value: Any, where: str | None, shown: str = "") -> None:
    """Checks a value before it is assigned to a dataclass field.

    Args:
      kind: The dataclass, or a function with annotated arguments.
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
    if isinstance(value, int) and abs(value) > MOST_64:
        # Nothing holds more than 64 bits, whatever else the field accepts.
        given = limits or Range()
        limits = dataclasses.replace(
            given,
            at_least=-MOST_64 if given.at_least is None else given.at_least,
            at_most=MOST_64 if given.at_most is None else given.at_most,
        )
    if fits(value, hint) and not (is_number and limits is not None and value not in limits):
        return
    wanted = describe_type(hint, limits)
    raise UserError(
        # A text from a file may contain a terminal's escape sequences.
        f"{name} is {printable(repr(value))}; it must be {wanted}.",
        where=where,
        fix=f"Bind {wanted}.",
    )


def _check_arguments(
    name: str, arguments: Mapping[str, Any], limits: Mapping[str, Range], provenance: Any
) -> None:
    """Checks a function's arguments, including those of functions among its factors."""
    for key, value in arguments.items():
        place = place_of(f"{name}.{key}", provenance)
        if key in limits and value is not None:
            _check_one(f"{name}.{key}", value, float, limits[key], place)
        # A factor is a number, or a schedule with its own arguments.
        for factor in value if isinstance(value, list) else ():
            if isinstance(factor, Mapping):
                _check_arguments(f"{name}.{key}", factor["arguments"], limits, provenance)
            else:
                _check_one(f"{name}.{key}", factor, float, Range(), place)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the elements of a list or mapping, or else the value itself, named for messages."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((name, item) for item in value)
    else:
        yield name, value


def place_of(name: str, provenance: Mapping[str, str]) -> str | None:
    """The place that set a field, or else the part that contains the field."""
    while name and name not in provenance:
        name = name.rpartition(".")[0]
    return provenance.get(name)
