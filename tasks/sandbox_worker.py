"""The sandbox process: checks and renders strangers' Jinja within limits."""

from __future__ import annotations

import decimal
import functools
import json
import math
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from t0repro.errors import UserError
from t0repro.tasks.prompt_environment import (
    PromptEnvironment,
    TemplateFailure,
    UndefinedVariable,
    constant_text,
)
from t0repro.tasks.row_codec import decode_row
from t0repro.tasks.sandbox import BYTES, CHARACTERS, SECONDS
from t0repro.tasks.templates import (
    NO_LABEL,
    SEPARATOR,
    CompiledTemplate,
    Drop,
    Rendering,
    promptsource_environment,
)
from t0repro.words import counted, shortened


class NoLabel(Exception):
    """A template looked up a choice, or made a number, of a label that is hidden or null."""


class OutOfRange(jinja2.UndefinedError):
    """A template indexed a list beyond its end."""


class _Index(int):
    """An index that a template reads or computes, as opposed to the -1 in `words[-1]`.

    Attributes:
      described: The variable, or what it is computed from, in words.
      hidden: Whether a variable is a label that is hidden: -1 or, as in Winogrande, empty.
    """

    described: str = "the index"
    hidden: bool = False


@jinja2.pass_context
def _index(context: jinja2.runtime.Context, value: Any, *names: str) -> Any:
    """The filter around every index that reads a variable; names it for `getitem`."""
    if type(value) is not int:
        return value
    # The row's values, not what the template has set.
    index, values = _Index(value), [context.parent.get(name) for name in names]
    index.hidden = any(each in (-1, "") for each in values)
    index.described = names[0] if [value] == values else f"the index from {' and '.join(names)}"
    return index


_NO_INDEX = _Index()
"""Stands for an index that a template writes as a number, and for a key."""


# Not an identifier, so that no template can call the filter.
_INDEX = "computed index"


class StrictEnvironment(PromptEnvironment):
    """Jinja with promptsource's filters, in which missing values are errors rather than text."""

    # Jinja does not evaluate intercepted operators on constants while it compiles a template.
    intercepted_binops = PromptEnvironment.intercepted_binops | {"*", "**"}

    def __init__(self) -> None:
        promptsource = promptsource_environment()
        # StrictUndefined: a field that the row lacks is an error, not an empty text.
        super().__init__(loader=jinja2.BaseLoader(), undefined=jinja2.StrictUndefined)
        strict = {"string": _text_of, "int": _int, _INDEX: _index}
        self.take({**promptsource.filters, **strict}, promptsource.globals)

    def compile(self, source: str | jinja2.nodes.Template, *args: Any, **kwargs: Any) -> Any:
        """As in Jinja, with each index that reads a variable passed through `_index`."""
        tree = self.parse(source) if isinstance(source, str) else source
        for item in tree.find_all(jinja2.nodes.Getitem):
            index = item.arg
            read = [index] if isinstance(index, jinja2.nodes.Name) else []
            read += index.find_all(jinja2.nodes.Name)
            if read and not isinstance(index, jinja2.nodes.Slice):
                names: list[Any] = [jinja2.nodes.Const(name.name) for name in read]
                item.arg = jinja2.nodes.Filter(index, _INDEX, names, [], None, None)
        return super().compile(tree, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As in Jinja, except that a computed index counts no item from the end.

        Returns:
          The item, or an undefined value that says why there is none.

        Raises:
          NoLabel: For a label that is hidden or null.
        """
        if argument is None and isinstance(obj, list):
            raise NoLabel
        if isinstance(argument, jinja2.StrictUndefined):
            return argument  # which says what is undefined once it is printed
        index = argument if isinstance(argument, _Index) else _NO_INDEX
        below = index < 0 and isinstance(obj, Sequence)
        if below and index.hidden:
            raise NoLabel
        found = super().getitem(obj, argument)
        missing = isinstance(found, jinja2.Undefined) and isinstance(obj, list)
        if not below and not missing:
            return found
        many = f"there are {counted(len(obj), 'choice')}"
        if len(obj) == 1:  # `no, yes`
            only = shortened(repr(obj[0]), 60)
            many = f"there is 1 choice, {only}; {SEPARATOR} separates several"
        fault = f"but {many}" if isinstance(argument, int) else "which is not a whole number"
        if not isinstance(argument, int) and argument in range(len(obj)):  # 1.0
            fault = (
                "which is not an int: numbers in a column with an empty cell are floats, as in"
                " pandas. Fill the cell, or write it with the filter `| int`"
            )
        if isinstance(argument, str):
            is_number = argument.strip().removeprefix("-").isdecimal()  # else `| int` makes it 0
            advice = "write it with the filter `| int`"
            if not is_number:
                advice = (
                    "make the labels 0, 1, ..., or print it as the target, such as"
                    f" `{SEPARATOR} {{{{label}}}}`"
                )
            fault = f"which is text; {advice}"
        return self.undefined(f"{index.described} is {argument!r}, {fault}", exc=OutOfRange)


def _text_of(value: Any) -> Any:
    if value is None:
        raise UndefinedVariable("it prints a field that is null")
    return jinja2.filters.soft_str(value)


def _int(value: Any, default: int | None = None, base: int = 10) -> int:
    """As in Jinja, except that a missing label does not become 0, which is another label."""
    if default is None and (value is None or value == ""):
        raise NoLabel
    found = jinja2.filters.do_int(value, default, base)  # pyright: ignore[reportArgumentType]
    if found is None:
        raise TemplateFailure(f"`| int` gets {shortened(repr(value), 60)}, which is no number")
    return found


class _StrictTemplate:
    """A template compiled in the strict environment."""

    def __init__(self, template: Any, cut: bool):
        self._compiled = CompiledTemplate(template, cut, _environment())
        self._columns = {*_variables(template.jinja), *_variables(template.answer_choices or "")}

    def render(self, row: Mapping[str, Any], draw_key: str | None) -> Rendering | Drop:
        for name, value in row.items():
            # Rows have hyphens where templates have underscores (see CompiledTemplate.render).
            if type(value) is not str and name.replace("-", "_") in self._columns:
                _check_value(name, value)
        try:
            rendering = self._compiled.render(row, draw_key)
        except NoLabel:
            return Drop.NO_LABEL
        if isinstance(rendering, Rendering) and rendering.targets == NO_LABEL:
            return Drop.NO_TARGET
        return rendering


def _check_value(column: str, value: Any) -> None:
    """Refuses what Python prints as no text of the data: binary values, NaN and infinities.

    A template would print them as b'...', nan and inf, and compare NaN with numbers.
    """
    if isinstance(value, bytes):
        raise TemplateFailure(f"its column {column!r} is binary; write it as text in UTF-8")
    if isinstance(value, (float, decimal.Decimal)) and not math.isfinite(value):
        raise TemplateFailure(
            f"its column {column!r} is {value}; write a number, or null for a missing value"
        )
    if isinstance(value, Mapping):
        value = value.values()
    if not isinstance(value, str) and isinstance(value, Iterable):
        for item in value:
            _check_value(column, item)


@functools.cache
def _environment() -> StrictEnvironment:
    return StrictEnvironment()


class _Text:
    """The fields that `CompiledTemplate` needs of a template."""

    def __init__(self, name: str, jinja: str, answer_choices: str | None):
        self.name, self.jinja, self.answer_choices = name, jinja, answer_choices


# About as many templates as a run uses at once.
@functools.lru_cache(maxsize=256)
def _strict(name: str, jinja: str, answer_choices: str | None, cut: bool) -> _StrictTemplate:
    return _StrictTemplate(_Text(name, jinja, answer_choices), cut)


def _render(
    name: str,
    jinja: str,
    answer_choices: str | None,
    cut: bool,
    row: dict[str, Any],
    draw_key: str | None,
) -> Any:
    rendering = _strict(name, jinja, answer_choices, cut).render(row, draw_key)
    if isinstance(rendering, Drop):
        return rendering.name
    length = sum(map(len, (rendering.inputs, rendering.targets, *(rendering.answer_choices or ()))))
    if length > CHARACTERS:
        raise TemplateFailure(f"it renders to {length:,} characters")
    return rendering


def _check(text: str) -> None:
    _environment().compile(text)


def _variables(text: str) -> list[str]:
    environment = _environment()
    try:
        found = jinja2.meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateSyntaxError:
        return []
    # Jinja's own globals and promptsource's additions are not columns.
    return sorted(found - set(environment.globals) - {"answer_choices"})


def _fixed_choices(text: str) -> list[str] | None:
    constant = constant_text(_environment(), text)
    return None if constant is None else [choice.strip() for choice in constant.split(SEPARATOR)]


_OPERATIONS = {
    "render": _render,
    "check": _check,
    "variables": _variables,
    "fixed_choices": _fixed_choices,
}


def _answer(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": _OPERATIONS[operation](**arguments)}
    except jinja2.TemplateSyntaxError as error:
        return {"failure": "syntax", "message": error.message, "line": error.lineno}
    except Exception as error:  # an expression can raise anything
        return {**_describe(error), "line": _line_of(error)}


def _describe(error: Exception) -> dict[str, str]:
    if isinstance(error, OutOfRange):
        return {"failure": "template", "message": str(error)}
    if isinstance(error, (UndefinedVariable, jinja2.UndefinedError)):
        return {"failure": "undefined", "message": str(error)}
    if isinstance(error, MemoryError):
        return {"failure": "template", "message": f"it needs more than {BYTES >> 20} MB of memory"}
    if isinstance(error, UserError):  # invalid Jinja
        return {"failure": "template", "message": error.what}
    if isinstance(error, (TemplateFailure, jinja2.exceptions.SecurityError)):
        return {"failure": "template", "message": str(error)}
    return {"failure": "template", "message": repr(error)}


def _line_of(error: Exception) -> int | None:
    """The last line of the template in an error's traceback, which Jinja counts in its text."""
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return lines[-1] if lines else None


def _serve() -> None:
    """Answers requests, one line of JSON each, until the input ends."""
    import resource

    _environment()  # imports promptsource before memory and files are limited
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    # RLIMIT_AS counts what is mapped already, so the template's memory comes on top of that.
    resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, held + BYTES))
    # No file can grow, so nothing can be written, /tmp included.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # With the default action the kernel ends the process. A Python handler would not suffice: it
    # runs only between bytecodes, and a call into C may take any time.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # One line is one request: `encode_row` makes no line breaks.
    for line in sys.stdin.buffer:
        operation, arguments = decode_row(line)
        # ITIMER_PROF counts processor time, so that a busy machine ends no ordinary template.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer = json.dumps(_answer(operation, arguments))
        # The time to write the answer does not count as the template's.
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer.encode("ascii") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
