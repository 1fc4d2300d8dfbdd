"""The Jinja environment in which renderings repeat."""

from __future__ import annotations

import contextlib
import datetime
import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils


class PromptEnvironment(jinja2.sandbox.SandboxedEnvironment):
    """A Jinja sandbox in which a rendering depends only on the row and its random seed.

    Python prints some values with their address, which differs in every process; a row's dates can
    read the clock and the time zone; and a set's order differs in every process. All three are
    refused.
    """

    intercepted_binops = frozenset({"-"})

    def take(self, filters: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Sets the filters and the global names that templates may use."""
        seeded = {"choice": _choice, "random": _random}
        self.filters = {name: _wrap_filter(each) for name, each in {**filters, **seeded}.items()}
        self.globals = {**names, "cycler": _Cycler, "joiner": _Joiner}
        # It takes random text from Python's global generator. No prompt of promptsource calls it.
        self.globals.pop("lipsum", None)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in Jinja; a method can be called, but not printed."""
        return _wrap_method(super().getattr(obj, attribute), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As in Jinja; a method can be called, but not printed."""
        return _wrap_method(super().getitem(obj, argument), argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Jinja."""
        function = obj.function if isinstance(obj, _Method) else obj
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in Jinja, without the methods of dates that read the clock or the time zone."""
        if isinstance(obj, datetime.date) and attr in _CLOCK_AND_ZONE:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As in Jinja, except that a set is refused."""
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (set, frozenset)):
            raise TemplateFailure(
                "it subtracts the keys of mappings, which gives a set, and a set has no fixed"
                " order; loop over the keys and leave some out with `if` instead"
            )
        return result


_CLOCK_AND_ZONE = frozenset({"now", "today", "utcnow", "fromtimestamp", "timestamp", "astimezone"})


class _NotText:
    """A value that cannot be printed, since Python prints it with its address."""

    advice = "it prints an object that is not text"

    def __repr__(self) -> str:
        raise TemplateFailure(self.advice)

    __str__ = __repr__


class _Method(_NotText):
    """A callable attribute that a template reads; `PromptEnvironment.call` calls it."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.function = function
        self.advice = f"it prints the method {name!r}, not its result; write {name}()"

    def __call__(self) -> Any:
        raise NotImplementedError  # makes it `callable` in Jinja's words


class _Items(_NotText):
    """The items that a filter such as `map` computes one by one."""

    advice = "it prints the result of a filter such as map before | list or | join"

    def __init__(self, items: Iterator[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def __next__(self) -> Any:
        return next(self._items)


class _Cycler(_NotText, jinja2.utils.Cycler):
    """Jinja's cycler."""


class _Joiner(_NotText, jinja2.utils.Joiner):
    """Jinja's joiner."""


def _wrap_method(found: Any, name: Any) -> Any:
    if callable(found) and not isinstance(found, (jinja2.Undefined, type)):
        return _Method(found, str(name))
    return found


def _wrap_filter(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter_)  # with the marks by which Jinja passes the context
    def filter_items(*args: Any, **kwargs: Any) -> Any:
        result = filter_(*args, **kwargs)
        return _Items(result) if isinstance(result, Iterator) else result

    return filter_items


def constant_text(environment: jinja2.Environment, jinja: str) -> str | None:
    """The rendering of a Jinja text if it is the same for every row, else None.

    It is the same if the text reads no variable and makes no random choice.
    """
    if jinja2.meta.find_undeclared_variables(environment.parse(jinja)) - set(environment.globals):
        return None
    with _draws_of("") as draws:
        text = environment.from_string(jinja).render()
    return None if draws.made else text


class _Draws:
    """The random choices of one rendering, from a generator created at the first one."""

    def __init__(self, key: str | None):
        self._key, self.made = key, False
        self._generator: random.Random | None = None

    def choice(self, items: Sequence[Any]) -> Any:
        self.made = True
        if self._key is None:
            return random.choice(items)
        # Seeded with a string, Python's generator gives the same choices in every process.
        self._generator = self._generator or random.Random(self._key)
        return self._generator.choice(items)


@contextlib.contextmanager
def _draws_of(key: str | None) -> Iterator[_Draws]:
    """Context in which this thread's templates use one generator, seeded with the key."""
    draws = _drawing.draws = _Draws(key)
    try:
        yield draws
    finally:
        del _drawing.draws


def _draws() -> _Draws:
    # promptsource's own `Template.apply` renders outside of this context.
    return getattr(_drawing, "draws", None) or _Draws(None)


# Most templates choose from a constant list. Jinja evaluates a filter of a constant at compile
# time, which would make one choice for all examples, unless the filter takes the context.
@jinja2.pass_context
def _choice(context: jinja2.runtime.Context, items: Sequence[Any]) -> Any:
    """The filter `choice`, which promptsource adds."""
    del context
    return _draws().choice(items)


@jinja2.pass_context
def _random(context: jinja2.runtime.Context, items: Sequence[Any]) -> Any:
    """Jinja's filter `random`, which returns an undefined value for an empty list."""
    if not items:
        return context.environment.undefined("No random item, sequence was empty.")
    return _draws().choice(items)


class TemplateFailure(Exception):
    """A template cannot render a row; the message is written for the template's author.

    Attributes:
      line: The template's line, from 1; None if it is not known.
    """

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.line = line


class UndefinedVariable(TemplateFailure):
    """A template reads a variable that the row does not have."""


_drawing = threading.local()
