"""gin files read as text: their statements, includes followed and macros resolved.

Nothing is imported, and no configurable is called or even known, so that gin files of either
dialect can be read anywhere: to list what they import, and to compare them with a checkpoint.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gin.config_parser import BindingStatement, ImportStatement, IncludeStatement

from gin import config_parser

__all__ = ["BindingStatement", "ImportStatement", "IncludeStatement"]

OpenInclude = Callable[[str, Sequence[str]], tuple[str, str] | None]
"""Maps an included name and the files around it, outermost first, to the path and text to read.

None leaves the file out.
"""


@dataclasses.dataclass(frozen=True)
class Macro:
    """A reference to a macro, as in `module = %MIXTURE_OR_TASK_MODULE`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Binding:
    """A value that a gin file binds.

    Attributes:
      configurable: Its name without its modules; of a macro, the macro's name.
      argument: "" for a macro.
      line: The statement.
      place: `file:line`.
    """

    scope: str
    configurable: str
    argument: str
    value: Any
    line: str
    place: str


Bindings = Mapping[tuple[str, str, str], Binding]  # by scope, configurable and argument


class _Unresolved:
    """A delegate of gin's parser that resolves nothing: of a reference it keeps a macro's name."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Macro | None:
        """Called by gin's parser for @name."""
        # `%name` is gin's shorthand for `@name/gin.macro()`; files have either.
        name = scoped_configurable_name.removesuffix("/macro").removesuffix("/gin.macro")
        return Macro(name) if evaluate and name != scoped_configurable_name else None

    def macro(self, macro_name: str) -> Macro:
        """Called by gin's parser for %name."""
        return Macro(macro_name)


def parse_statements(text: str, file: str | os.PathLike[str] | None = None) -> list[Any]:
    """The statements of one gin text; includes are not followed.

    Args:
      text: Of a file, or of overrides.
      file: The text's file, for the statements' locations; None for the command line.

    Raises:
      SyntaxError, ValueError: If it is not gin.
    """
    source = io.StringIO(text)
    if file is not None:
        source.name = os.fspath(file)
    return list(config_parser.ConfigParser(source, _Unresolved()))


def read_statements(
    text: str,
    file: str | os.PathLike[str] | None,
    open_include: OpenInclude,
    within: Sequence[str] = (),
) -> Iterator[Any]:
    """Yields imports and bindings in the order in which gin executes them, includes followed.

    Args:
      text: As for `parse_statements`.
      file: As for `parse_statements`.
      open_include: Finds included files.
      within: The files that include this one.

    Raises:
      SyntaxError, ValueError: As from `parse_statements`.
    """
    within = (*within, *([] if file is None else [os.fspath(file)]))
    for statement in parse_statements(text, file):
        if not isinstance(statement, IncludeStatement):
            yield statement
        elif included := open_include(statement.filename, within):
            path, included_text = included
            yield from read_statements(included_text, path, open_include, within)


def last_bindings(statements: Iterable[Any]) -> dict[tuple[str, str, str], Binding]:
    """The binding that counts for each argument and macro: gin takes the last."""
    bindings = (
        Binding(
            each.scope,
            # gin accepts a configurable with or without its module path.
            each.selector.rpartition(".")[2],
            each.arg_name,
            each.value,
            each.location.line_content.strip(),
            place_of(each),
        )
        for each in statements
        if isinstance(each, BindingStatement)
    )
    return {(each.scope, each.configurable, each.argument): each for each in bindings}


def resolve_macros(binding: Binding, bindings: Bindings) -> Binding:
    """Follows a binding through macros to the one that holds the value.

    A macro without a value remains: the last binding's value is then a `Macro`.
    """
    passed = set[str]()
    while isinstance(binding.value, Macro) and binding.value.name not in passed:
        name = binding.value.name
        passed.add(name)
        # A macro's value is bound as `name = ...`, or as `name/macro.value = ...`.
        definition = bindings.get(("", name, "")) or bindings.get((name, "macro", "value"))
        binding = definition or binding
    return binding


def place_of(statement: Any) -> str:
    """`file:line` of a statement, or the statement on the command line."""
    location = statement.location
    if location.filename is None:
        return f"the command line: {location.line_content.strip()!r}"
    return f"{location.filename}:{location.line_num}"
