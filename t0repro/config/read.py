"""The one reader of a run's settings: each field's argument, its place and its range."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Any, ClassVar, Protocol, TypeVar

from t0repro.config.names import Dialect, arguments_of, fixed_values
from t0repro.config.ranges import check_field

_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True)
class Setting:
    """An argument of a run.

    Attributes:
      name: Its name as the user's files write it.
      value: Its value, references resolved.
      place: The file and line that set it, or a note that it has its default.
    """

    name: str
    value: Any
    place: str | None


class Source(Protocol):
    """The arguments of a run in one dialect."""

    dialect: ClassVar[Dialect]

    def find(self, name: str) -> Setting | None:
        """An argument by its full name; None if the run does not call its configurable."""

    def build(self, value: Any, prefix: str) -> Any:
        """A field's value of what gin gives: parts of a run in place of calls."""


def read(
    kind: type[_Kind], source: Source, places: MutableMapping[str, str], prefix: str, **given: Any
) -> _Kind:
    """A part of a run, each field as its argument sets it.

    Args:
      kind: The part's dataclass.
      source: The run's arguments.
      places: Dotted field -> where its value was set; filled in.
      prefix: Prefix of the part's dotted fields.
      **given: The values of fields that rules give.

    Raises:
      UserError: For a value of another type or outside its range, with its place.
    """
    values = given
    for field, argument in arguments_of(kind, source.dialect).items():
        setting = source.find(argument.name)
        if setting is None:
            continue
        if setting.place:
            places.setdefault(f"{prefix}{field}", setting.place)
        if field in given:
            continue
        value = source.build(setting.value, f"{prefix}{field}.")
        if argument.read is not None:
            value = argument.read(value)
        check_field(kind, field, value, setting.place, shown=setting.name)
        values = {**values, field: value}
    return kind(**{**fixed_values(kind, source.dialect), **values})
