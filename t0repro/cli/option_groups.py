"""Groups of options that several commands share, each defined once as a dataclass.

A command takes such a dataclass as a parameter; `with_groups` gives the command an option for each
field, in the parameter's place, and hands it the filled dataclass. A group's `HEADING`, if it has
one, stands above its options in the help.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that Typer can read: parameters that are dataclasses become their fields.

    The dataclasses' fields must have defaults, and the annotations that Typer takes.
    """
    types = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: type_ for name, type_ in types.items() if dataclasses.is_dataclass(type_)
    }

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{field: values.pop(field) for field in fields})
        return command(**values)

    parameters = [
        parameter
        for name, given in inspect.signature(command).parameters.items()
        for parameter in (
            _options(groups[name]) if name in groups else [given.replace(annotation=types[name])]
        )
    ]
    # Typer reads both: the order from one, the types from the other.
    wrapped.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _options(group: Any) -> Iterator[inspect.Parameter]:
    types = typing.get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        (owner,) = [
            each for each in group.__mro__ if field.name in vars(each).get("__annotations__", ())
        ]
        for option in getattr(types[field.name], "__metadata__", ()):
            # Shared annotations, such as GinFiles, get the same heading wherever they stand.
            option.rich_help_panel = vars(owner).get("HEADING")
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=field.default,
            annotation=types[field.name],
        )
