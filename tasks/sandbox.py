"""Renders templates that are not promptsource's own in a separate, restricted process.

A template file may come from a stranger, and Jinja is a programming language. There are three
layers of protection:

  Jinja's sandbox blocks attributes that lead to Python's internals;
  a process that cannot write to files, is killed after SECONDS of processor time on a row, and has
    BYTES of memory beyond what it starts with (`"a" * (4 * 10**9)` needs no attribute at all);
  answers in JSON: even if the process is taken over, nothing that it sends is ever executed.

Such templates are also checked more strictly than promptsource's. A variable that a row lacks is an
error (write `{{ text | default("") }}` if it may be missing), and so are values that T0's schemas
exclude: labels below 0, non-finite numbers (NaN or Inf), binary columns. Rows without a label or
with an empty target are dropped, while T0 would train on a wrong answer or on "<NO LABEL>".

Rows travel as JSON, by `encode_row` and `decode_row`, with which caching spools them too.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import datetime
import decimal
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from t0repro.errors import UserError
from t0repro.tasks.templates import (
    NO_LABEL,
    SEPARATOR,
    CompiledTemplate,
    Drop,
    PromptEnvironment,
    Rendering,
    TemplateFailure,
    UndefinedVariable,
    constant_text,
    promptsource_environment,
)
from t0repro.words import counted

SECONDS = 2.0
"""Processor seconds for one row; ordinary templates take a thousandth of a second."""
BYTES = 1 << 29
"""Maximum memory for rendering."""
CHARACTERS = 1 << 24
"""Maximum characters of a rendering; sequence lengths keep a few thousand."""


class SandboxedTemplate:
    """A template that the sandbox process compiles and renders; see `CompiledTemplate`.

    Args:
      template: Any object with `name`, `jinja` and `answer_choices`.
      cut: Whether to truncate variables to 2,048 characters, as promptsource does.
    """

    def __init__(self, template: Any, cut: bool = True):
        self.name: str = template.name
        self._request = {
            "name": template.name,
            "jinja": template.jinja,
            "answer_choices": template.answer_choices,
            "cut": cut,
        }

    def render(self, row: Mapping[str, Any], draw_key: str | None = None) -> Rendering | Drop:
        """Renders one row, or returns why it gives no example.

        Raises:
          TemplateFailure: If the template cannot render the row, or exceeds a limit.
        """
        answer = _process.ask("render", **self._request, row=dict(row), draw_key=draw_key)
        return Drop[answer] if isinstance(answer, str) else Rendering(*answer)


def check_jinja(text: str) -> None:
    """Compiles a stranger's Jinja, in the sandbox because compiling evaluates constants.

    Raises:
      jinja2.TemplateSyntaxError: If it is not valid, with the line.
      TemplateFailure: If compiling exceeds a limit.
    """
    _process.ask("check", text=text)


def variables(text: str) -> frozenset[str]:
    """The variables that a stranger's Jinja reads; empty if it is not valid."""
    return frozenset(_process.ask("variables", text=text))


def fixed_choices(text: str) -> tuple[str, ...] | None:
    """The answer choices if they are the same for every row, else None."""
    found = _process.ask("fixed_choices", text=text)
    return None if found is None else tuple(found)


# This side -------------------------------------------------------------------------------------


class _Process:
    """The sandbox process, started on first use and restarted after it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Sends one request and waits for its answer.

        Raises:
          TemplateFailure: If the template fails or exceeds a limit.
          jinja2.TemplateSyntaxError: If it is not valid Jinja.
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(encode_row([operation, arguments]) + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            # A line without a line break is incomplete: the process died while it answered.
            if not line.endswith(b"\n"):
                raise self._ended(process)
        answer = json.loads(line)
        if "answer" in answer:
            return answer["answer"]
        raise _failure(answer["failure"], answer["message"], answer.get("line"))

    def _started(self) -> subprocess.Popen[bytes]:
        # After a fork, the pipes belong to the parent: both processes' requests would mix.
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            # -P: modules are not looked for in the working directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "t0repro.tasks.sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # no Ctrl-C reaches it; it ends when its input does
            )
        return self._process

    def _ended(self, process: subprocess.Popen[bytes]) -> TemplateFailure:
        """The error for a process that has died; the next request starts another."""
        self.close()
        # SIGPROF comes from the timer that `_serve` sets before each row.
        if process.returncode == -signal.SIGPROF:
            return TemplateFailure(f"it ran for more than {SECONDS:g} s of processor time")
        return TemplateFailure(
            f"its process was ended (status {process.returncode}), perhaps because memory ran out"
        )

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        # Closing its input is what ends it.
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            process.wait(timeout=SECONDS)  # it ends by itself when its input does
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_process = _Process()
atexit.register(_process.close)


def _failure(kind: str, message: str, line: int | None) -> Exception:
    if kind == "syntax":
        return jinja2.TemplateSyntaxError(message, line or 1)
    if kind == "undefined":
        return UndefinedVariable(message)
    return TemplateFailure(message)


# The other side --------------------------------------------------------------------------------


class NoLabel(Exception):
    """A template looked up a choice by a label that is hidden or null."""


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
        strict = {"string": _text_of, _INDEX: _index}
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
        index = argument if isinstance(argument, _Index) else _NO_INDEX
        below = index < 0 and isinstance(obj, Sequence)
        if below and index.hidden:
            raise NoLabel
        found = super().getitem(obj, argument)
        missing = isinstance(found, jinja2.Undefined) and isinstance(obj, list)
        if not below and not missing:
            return found
        many = f"there {'is' if len(obj) == 1 else 'are'} {counted(len(obj), 'choice')}"
        fault = f"but {many}" if isinstance(argument, int) else "which is no whole number"
        return self.undefined(f"{index.described} is {argument!r}, {fault}", exc=OutOfRange)


def _text_of(value: Any) -> Any:
    if value is None:
        raise UndefinedVariable("it prints a field that is null")
    return jinja2.filters.soft_str(value)


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
    except OutOfRange as error:
        return {"failure": "template", "message": str(error)}
    except (UndefinedVariable, jinja2.UndefinedError) as error:
        return {"failure": "undefined", "message": str(error)}
    except MemoryError:
        return {"failure": "template", "message": f"it needs more than {BYTES >> 20} MB of memory"}
    except UserError as error:  # invalid Jinja
        return {"failure": "template", "message": error.what}
    except (TemplateFailure, jinja2.exceptions.SecurityError) as error:
        return {"failure": "template", "message": str(error)}
    except Exception as error:  # an expression can raise anything
        return {"failure": "template", "message": repr(error)}


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


# ---- Rows as JSON and back without loss; unlike unpickling, decoding cannot run code -------------

# JSON lacks some types in Parquet files: bytes, dates, decimals, tuples. Such a value is written as
# a mapping with the single key `_TAG`; a row's own mapping with that key is tagged too.

_TAG = "\0t0repro"
_PLAIN = (str, int, float, bool, type(None))


def encode_row(value: Any) -> bytes:
    """Encodes a value as one line of ASCII, without a line break.

    Raises:
      TypeError: If the value contains a type that rows cannot have.
    """
    return json.dumps(_tagged(value)).encode("ascii")


def decode_row(data: bytes) -> Any:
    """The value that was encoded, with its types."""
    return json.loads(data, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_tagged(item) for item in value]
    # Exact types: a subclass would come back as its base.
    if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _tagged(item) for key, item in value.items()}
    if kind is dict:
        return _tag("dict", [[_tagged(key), _tagged(item)] for key, item in value.items()])
    if kind is tuple:
        return _tag("tuple", [_tagged(item) for item in value])
    # Compare exact types here too: a datetime is also a date, and would lose its time.
    for name, (of_kind, write, _) in _OTHERS.items():
        if kind is of_kind:
            return _tag(name, write(value))
    raise TypeError(f"A row cannot hold a {kind.__name__}.")


def _tag(name: str, content: Any) -> dict[str, Any]:
    return {_TAG: [name, content]}


def _untagged(mapping: dict[str, Any]) -> Any:
    if _TAG not in mapping:
        return mapping
    name, content = mapping[_TAG]
    if name == "dict":
        return {key: item for key, item in content}
    if name == "tuple":
        return tuple(content)
    return _OTHERS[name][2](content)


_MICROSECOND = datetime.timedelta(microseconds=1)

# Name -> type, function to write it, function to read it back.
_OTHERS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda data: base64.b64encode(data).decode(), base64.b64decode),
    "datetime": (datetime.datetime, str, datetime.datetime.fromisoformat),
    "date": (datetime.date, str, datetime.date.fromisoformat),
    "time": (datetime.time, str, datetime.time.fromisoformat),
    "microseconds": (
        datetime.timedelta,
        lambda span: span // _MICROSECOND,
        lambda count: datetime.timedelta(microseconds=count),
    ),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
}


if __name__ == "__main__":
    _serve()
