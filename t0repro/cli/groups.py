"""Groups of options that commands share, each defined once as a dataclass.

A command takes such a dataclass as a parameter; `expand_groups` gives the command an option for
each field, in the parameter's place, and hands it the filled dataclass. A group's `HEADING`, if it
has one, stands above its options in the help; a command that annotates the parameter as
`Annotated[GROUP, heading]` shows the heading given there.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from t0repro.cli.commands import HelpAll, More


def expand_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that Typer can read: parameters that are dataclasses become their fields.

    The dataclasses' fields must have the annotations that Typer takes. If a heading is a `More`,
    the command also has --help-all.
    """
    types = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group, *headings = typing.get_args(types[name]) or (types[name],)
        if dataclasses.is_dataclass(group):
            groups[name] = group
            parameters += _options(group, *headings)
        else:
            parameters.append(parameter.replace(annotation=types[name]))
    shows_more = any(isinstance(_heading(each), More) for each in parameters)
    if shows_more:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        more = inspect.Parameter("help_all", kind, default=False, annotation=HelpAll)
        parameters.append(more)
    # A group may have required options, which Python wants before the others.
    parameters.sort(key=lambda each: each.default is not inspect.Parameter.empty)

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        values.pop("help_all", None)
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{field: values.pop(field) for field in fields})
        return command(**values)

    # Typer takes the order from one and the types from the other.
    wrapped.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _heading(parameter: inspect.Parameter) -> str | None:
    arguments = typing.get_args(parameter.annotation)
    return getattr(arguments[-1], "rich_help_panel", None) if arguments else None


def _options(group: Any, heading: str | None = None) -> Iterator[inspect.Parameter]:
    types = typing.get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        # The heading is that of the class that declares the field, not of one that inherits it.
        (owner,) = [
            each for each in group.__mro__ if field.name in vars(each).get("__annotations__", ())
        ]
        # Copied, because in a command without the group the same option has no heading.
        option = copy.copy(types[field.name].__metadata__[0])
        option.rich_help_panel = heading or vars(owner).get("HEADING", option.rich_help_panel)
        has_default = field.default is not dataclasses.MISSING
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=field.default if has_default else inspect.Parameter.empty,
            annotation=Annotated[types[field.name].__origin__, option],
        )
