"""The settings of a run: how a dataclass declares them, and how they are checked and read.

    @arguments(t5x="utils.SaveCheckpointConfig", mtf="utils.run")
    @dataclasses.dataclass(frozen=True)
    class SaveConfig:
        keep: Annotated[int | None, Range(at_least=1), Mtf("keep_checkpoint_max")] = None
        from_first_step: Annotated[bool, Only(t5x=True, mtf=False)] = True

A field has a type, a `Range` if it is a number, and gin names in both dialects. It is an argument
of its class's configurable under its own name, unless it says otherwise: by another argument, by
the full name of an argument of another configurable, or by `Only`, the value that it always has in
a dialect. Reading, `explain`, translation, the checks and the lists in the docs follow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from t0repro.errors import UserError
from t0repro.words import printable

Dialect = Literal["mtf", "t5x"]
UNSET: Any = object()
"""No value: a required argument's default, or a dialect that can bind any value."""

_Class = TypeVar("_Class", bound=type)


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


def freeze(value: Any) -> Any:
    """A value, or a tuple for a list: gin reads lists, and a run is frozen."""
    return tuple(value) if isinstance(value, list) else value


def arguments(**configurables: str) -> Callable[[_Class], _Class]:
    """Declares the configurables, one a dialect, whose arguments a class's fields are."""

    def declare(kind: _Class) -> _Class:
        kind.gin_configurables = configurables  # pyright: ignore[reportAttributeAccessIssue]
        return kind

    return declare


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


# Python evaluates each annotation's text, and every value of a run asks for its own.
@functools.cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The annotations of a class or function by name, `Annotated` included."""
    return typing.get_type_hints(kind, include_extras=True)


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
        is_fixed = _only_value(kind, field.name, dialect) is not UNSET
        if argument is None and (configurable is None or is_fixed):
            continue
        argument = argument or _ARGUMENTS[dialect]()
        name = argument.name or field.name
        if "." not in name:
            name = f"{configurable}.{name}"
        arguments[field.name] = dataclasses.replace(argument, name=name)
    return arguments


def _only_value(kind: type, field: str, dialect: Dialect) -> Any:
    """What `Only` gives a field in a dialect; UNSET if an argument sets it."""
    return getattr(_annotation(kind, field, Only), dialect, UNSET)


def fixed_values(kind: type, dialect: Dialect) -> dict[str, Any]:
    """Field -> its value in a dialect, of the fields that have only one there."""
    values = {each.name: _only_value(kind, each.name, dialect) for each in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value not in (UNSET, RULE)}


def shared_values(source: Any, kind: Any) -> dict[str, Any]:
    """Field -> value, of the fields of a dataclass that an object of another class has too."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


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


def _annotation(kind: Any, field: str, sort: Any) -> Any:
    metadata = getattr(hints_of(kind)[field], "__metadata__", ())
    return next((item for item in metadata if isinstance(item, sort)), None)


class Found(NamedTuple):
    """An argument where a run's files set it, or its default.

    Attributes:
      read: Its value, from the prefix of what is inside it.
      place: Where it was set.
      shown: Its name in messages.
    """

    read: Callable[[str], Any]
    place: str | None
    shown: str


def read_fields(
    kind: type,
    dialect: Dialect,
    find: Callable[[Argument], Found | None],
    places: MutableMapping[str, str],
    prefix: str,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Field -> value of a class of settings: the argument that its annotation names.

    Args:
      kind: The dataclass.
      dialect: The dialect of the files.
      find: Finds an argument; None if nothing calls its configurable.
      places: Dotted field -> where its value was set; what is read is added.
      prefix: Prefix of the class's dotted fields.
      given: The values of fields that rules give.

    Raises:
      UserError: For a value of another type or outside its range, with its place.
    """
    values = {**fixed_values(kind, dialect), **given}
    for field, argument in arguments_of(kind, dialect).items():
        if (found := find(argument)) is None:
            continue
        if found.place:
            places.setdefault(f"{prefix}{field}", found.place)
        if field in given:
            continue
        value = found.read(f"{prefix}{field}.")
        if argument.read is not None:
            value = argument.read(value)
        # What is read as None is not outside the range.
        also = (0,) if argument.read is or_none else ()
        check_field(kind, field, value, found.place, shown=found.shown, also=also)
        values[field] = value
    return values


def range_of(kind: Any, field: str) -> Range | Mapping[str, Range] | None:
    """The range of a field or of an argument; for a mapping of arguments, one range for each."""
    return _annotation(kind, field, Range | Mapping)


def check_settings(value: Any, provenance: Mapping[str, str], prefix: str = "") -> None:
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
                check_settings(inside, provenance, f"{part}.")


def check_divides(name: str, parts: int, batch_size: int, where: str | None) -> None:
    """Raises UserError unless the rows of a batch divide into `parts` equal parts."""
    if batch_size % parts:
        raise UserError(
            f"{name} = {parts} does not divide the batch of {batch_size}.",
            where=where,
            fix="Choose a divisor of the batch size.",
        )


def check_field(
    kind: Any,
    field: str,
    value: Any,
    where: str | None,
    shown: str = "",
    also: tuple[float, ...] = (),
) -> None:
    """Checks a value before it is assigned to a dataclass field.

    Args:
      kind: The dataclass, or a function with annotated arguments.
      field: The name of the field or argument.
      value: The value.
      where: The place that set it.
      shown: The name to use in messages; defaults to the field's own.
      also: Numbers outside the range that the dialect takes too.

    Raises:
      UserError: If the value, or one inside it, is not of the field's type or is outside its range.
    """
    hint, limits, name = hints_of(kind)[field], range_of(kind, field), shown or field
    limits = limits if isinstance(limits, Range) else None
    if limits is not None and (also := tuple(each for each in also if each not in limits)):
        limits = dataclasses.replace(limits, also=(*limits.also, *also))
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
    name: str, arguments: Mapping[str, Any], limits: Mapping[str, Any], provenance: Any
) -> None:
    """Checks a function's arguments, including those of functions among its factors."""
    ranges = [limits]
    if isinstance(factors := arguments.get("factors"), str):
        # T5X's are names in one text, and each reads some of the product's arguments.
        ranges = [limits["factors"].get(each.strip(), {}) for each in ("", *factors.split("*"))]
    for key, value in arguments.items():
        place = place_of(f"{name}.{key}", provenance)
        for limit in (each.get(key) for each in ranges):
            if isinstance(limit, Range) and value is not None:
                _check_one(f"{name}.{key}", value, float, limit, place)
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


_UNIONS = (typing.Union, types.UnionType)
_LISTS = (tuple, list, Sequence)
_MAPPINGS = (dict, Mapping)


def bare(hint: Any) -> Any:
    """An annotation without what `Annotated` adds to it."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; for any other annotation, the annotation itself."""
    hint = bare(hint)
    return typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)


def elements(hint: Any, value: Any) -> Any:
    """The declared element type of a list or mapping; None if the hint declares none."""
    for part in alternatives(hint):
        origin, arguments = typing.get_origin(part), typing.get_args(part)
        if origin in _MAPPINGS and isinstance(value, Mapping):
            return arguments[1]
        if origin in _LISTS and _is_list(value):
            # Check a tuple of fixed length, such as a pair, as one value.
            fixed = origin is tuple and arguments[1:] != (Ellipsis,)
            return None if fixed else arguments[0]
    return None


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type.

    An int passes for a float and a list for a tuple. A bool is not a number, and only True and
    False are bools. Annotations in forms that this project's dataclasses do not use always pass.
    """
    return any(_fits_one(value, part) for part in alternatives(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        # Python holds True equal to 1 and 1 to 1.0, so the types must be equal too.
        return any(type(value) is type(word) and value == word for word in arguments)
    if origin in _MAPPINGS:
        return isinstance(value, Mapping) and all(fits(x, arguments[1]) for x in value.values())
    if origin is tuple and arguments[1:] != (Ellipsis,):
        return _is_list(value) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in _LISTS:
        return _is_list(value) and all(fits(item, arguments[0]) for item in value)
    if hint in (int, float):
        # bool is a subclass of int, but users do not mean True as a number.
        numbers = int if hint is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if hint is None or hint is types.NoneType:
        return value is None
    if Callable in (origin, hint):
        return callable(value)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


_WORDS = {
    bool: ("True or False", "truth values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text in quotation marks", "texts"),
}


def describe_type(hint: Any, limits: Any = None) -> str:
    """A declared type as an error message says it: "a whole number, at least 1, or None".

    Args:
      hint: The annotation.
      limits: Further limits on its numbers, such as a `Range`; None for none.
    """

    def rank(part: Any) -> int:
        # Numbers come first, since the limits apply to them; then words, lists and None.
        is_container = typing.get_origin(part) in (*_LISTS, *_MAPPINGS)
        return 0 if part in (int, float) else 3 if part is types.NoneType else 1 + is_container

    ordered = sorted(alternatives(hint), key=rank)
    return ", or ".join(_describe_one(part, limits) for part in ordered)


def _describe_one(hint: Any, limits: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin in (*_LISTS, *_MAPPINGS):
        kind = "a list" if origin in _LISTS else "a mapping such as {'inputs': ...}"
        item = bare(arguments[-1] if origin in _MAPPINGS else arguments[0])
        return f"{kind} of {_WORDS[item][1]}" if item in _WORDS else kind
    if hint in _WORDS:
        words = _WORDS[hint][0]
        return f"{words}, {limits}" if limits is not None and hint in (int, float) else words
    if hint is types.NoneType:
        return "None"
    if Callable in (origin, hint):
        return "a function such as @name"
    # A class of this project's whose objects gin files make says how they write it.
    return getattr(hint, "IN_GIN", None) or getattr(hint, "__name__", str(hint))
