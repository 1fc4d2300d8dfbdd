"""Whether a value is of the type that an annotation declares, and that type in words.

gin binds any value to any argument. What has an annotation is compared with it before it is used,
so that a list for a number or a text for a truth value is an error of the user's and not of the
code that trips over it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

_UNIONS = (typing.Union, types.UnionType)
_LISTS = (tuple, list, Sequence)
_MAPPINGS = (dict, Mapping)


@functools.cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The annotations of a class or function by name, `Annotated` included."""
    return typing.get_type_hints(kind, include_extras=True)


def bare(hint: Any) -> Any:
    """An annotation without what `Annotated` adds to it."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of any other annotation, itself alone."""
    hint = bare(hint)
    return typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)


def elements(hint: Any, value: Any) -> Any:
    """The declared type of what a list or mapping contains; None if the hint declares none."""
    for part in alternatives(hint):
        origin, arguments = typing.get_origin(part), typing.get_args(part)
        if origin in _MAPPINGS and isinstance(value, Mapping):
            return arguments[1]
        if origin in _LISTS and _is_list(value):
            # A tuple of fixed length, such as a pair, is judged as a whole.
            fixed = origin is tuple and arguments[1:] != (Ellipsis,)
            return None if fixed else arguments[0]
    return None


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type.

    A whole number passes for a number and a list for a tuple. A truth value is not a number, and
    only True and False are truth values. What an annotation says in another form than those of
    this project's dataclasses passes.
    """
    return any(_fits_one(value, part) for part in alternatives(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if origin in _MAPPINGS:
        return isinstance(value, Mapping) and all(fits(x, arguments[1]) for x in value.values())
    if origin is tuple and arguments[1:] != (Ellipsis,):
        return _is_list(value) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in _LISTS:
        return _is_list(value) and all(fits(item, arguments[0]) for item in value)
    if hint in (int, float):
        # bool is a subclass of int, but True is not a number that a user meant.
        numbers = int if hint is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if hint is None or hint is types.NoneType:
        return value is None
    if collections.abc.Callable in (origin, hint):
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


def in_words(hint: Any, limits: Any = None) -> str:
    """A declared type as an error message says it: "a whole number, at least 1, or None".

    Args:
      hint: The annotation.
      limits: What its numbers must be besides, such as a `Range`; None for nothing.
    """

    def rank(part: Any) -> int:
        # Numbers come first, since what the limits say is of them; then words, lists and None.
        is_container = typing.get_origin(part) in (*_LISTS, *_MAPPINGS)
        return 0 if part in (int, float) else 3 if part is types.NoneType else 1 + is_container

    ordered = sorted(alternatives(hint), key=rank)
    return ", or ".join(_one_in_words(part, limits) for part in ordered)


def _one_in_words(hint: Any, limits: Any) -> str:
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
    if collections.abc.Callable in (origin, hint):
        return "a function such as @name"
    return getattr(hint, "__name__", str(hint))


def declared_arguments(function: Any) -> dict[str, Any]:
    """The declared type of each argument of a function or class.

    An argument without an annotation whose default is a truth value is declared as one.
    """
    try:
        source = function.__init__ if inspect.isclass(function) else function
        hints = hints_of(function if dataclasses.is_dataclass(function) else source)
        parameters = inspect.signature(function).parameters
    # Annotations of other people's code may name what cannot be imported.
    except (TypeError, ValueError, NameError, AttributeError):
        return {}
    found = {}
    for name, parameter in parameters.items():
        if name in hints:
            found[name] = hints[name]
        elif isinstance(parameter.default, bool):
            found[name] = bool
    return found
