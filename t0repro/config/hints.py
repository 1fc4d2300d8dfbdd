"""The declared types of settings: whether a value fits one, and how a message says it."""

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


# Python evaluates each annotation's text, and every value of a run asks for its own.
@functools.cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The annotations of a class or function by name, `Annotated` included."""
    return typing.get_type_hints(kind, include_extras=True)


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
    if collections.abc.Callable in (origin, hint):
        return "a function such as @name"
    return getattr(hint, "__name__", str(hint))


def declared_arguments(function: Any) -> dict[str, Any]:
    """The declared type of each argument of a function or class.

    An argument without an annotation but with a bool default is declared as bool.
    """
    try:
        # Of a class, typing would read the attributes rather than the constructor's arguments.
        source = function.__init__ if inspect.isclass(function) else function
        hints = hints_of(function if dataclasses.is_dataclass(function) else source)
        parameters = inspect.signature(function).parameters
    # Annotations in third-party code may name types that cannot be imported.
    except (TypeError, ValueError, NameError, AttributeError):
        return {}
    declared = {}
    for name, parameter in parameters.items():
        if name in hints:
            declared[name] = hints[name]
        # Mesh TensorFlow annotates few arguments; a default shows which are truth values.
        elif isinstance(parameter.default, bool):
            declared[name] = bool
    return declared
