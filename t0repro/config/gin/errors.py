"""Turns errors of gin's parser, and of functions that gin calls, into UserErrors.

gin raises whatever the file, the tokenizer or a configurable raised, and puts the place in the
message, in an attribute or nowhere. The UserErrors from here have all three parts: what is wrong,
where, and what to do.
"""

from __future__ import annotations

import ast
import contextlib
import re
import tokenize
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

from t0repro.config.gin import door
from t0repro.config.gin.door import Bindings, Key
from t0repro.config.gin.folders import is_shipped, no_gin_file
from t0repro.errors import UserError, nearest_names, place_in_module
from t0repro.tasks.registry import how_to_register, registered_mixtures, registered_tasks

ANYWHERE = "the gin files and the command line of this run"
_FIX = "Correct the gin file or the override."
# Of the names that T5X's gin files have from elsewhere than `from t5x import ...`.
_IMPORT_LINES = {
    "adapters": "from t0repro import adapters",
    "choices": "from t0repro.config import choices",
    "network": "from t5x.examples.t5 import network",
    "optax": "import optax",
    "seqio": "import seqio",
    "train_script": "import __main__ as train_script",
}
_LONGEST = 400  # characters kept of an exception's message


@contextlib.contextmanager
def configuration_errors(bindings: Bindings | None = None, *, t5x: bool = False) -> Iterator[None]:
    """Turns an exception inside the block into a UserError with a place, keeping gin's message.

    Any failure there comes from a user's file or override; the original exception stays attached as
    the cause.

    Args:
      bindings: Where the bindings were set, once they are parsed; for errors raised while gin calls
        the functions it configured.
      t5x: Whether T5X's gin files are read, in which names are imported.
    """
    with door.track_files() as files:
        try:
            yield
        except UserError as error:
            # gin may raise an object of a subclass that it makes for it, whose __init__ takes no
            # arguments.
            classes = type(error).__mro__
            kind = next(
                each for each in classes if each is UserError or "__init__" not in vars(each)
            )
            if error.where and error.fix and kind is type(error) and not place_in_module(error):
                raise
            where = " in ".join(filter(None, (error.where, place_in_module(error))))
            where = where or _place_in(str(error)) or ANYWHERE
            raise kind(error.what, where=where, fix=error.fix or _FIX) from error
        except Exception as error:
            raise _describe(error, files, bindings or Bindings({}), t5x) from error


def _describe(error: Exception, files: list[str], bindings: Bindings, t5x: bool) -> UserError:
    """The UserError for an exception raised while `files`, innermost last, were being parsed."""
    text, file = str(error), files[-1] if files else None
    # seqio's own message, which has no class of its own; that for a name of another type is bare.
    unknown = re.match(r"""No Task or Mixture found with name ['"](.*)['"]""", text)
    if isinstance(error, AssertionError):
        unknown = re.match("Got: (.*)", text)
    if unknown:
        return unknown_mixture(unknown[1], _places_of_value(unknown[1], bindings))
    if found := _describe_module(error, file) or _describe_file(error, files, bindings):
        return found
    if re.match(r"'[\w.]+' was not provided by an import statement", text):
        return _missing_import_error(text, _place_in(text) or file or ANYWHERE, t5x)
    where = _place_of(error, file) or _place_of_call(text, bindings) or ANYWHERE
    fix = _fix_of_value(error) or nearest_parameter(text) or _FIX
    # With dynamic registration, gin misses an import line instead.
    name = re.search(r"No configurable matching (?:reference )?'@?(?:(\w+)\.)?", text)
    if t5x and file and name:
        imports = _import_line(name[1]) if name[1] else "an import line for each name"
        fix = (
            f"Begin the file with `from __gin__ import dynamic_registration` and {imports}: import"
            " lines define names only after the first. Or name the file after one that has both, as"
            " a model's or a run's does."
        )
    return UserError(_words(error), where=where, fix=fix)


def _describe_module(error: Exception, file: str | None) -> UserError | None:
    """The UserError for a module that is missing or fails when it is imported; else None."""
    importer = _place_in(str(error))
    if isinstance(error, ModuleNotFoundError):
        return UserError(
            # gin raises a copy of the error, which has its text and traceback and nothing else.
            f"{_words(error)}{_importer(error)}.",
            where=importer or "--module_import, or an `import` line of a gin file",
            fix="Check the module's name; it is looked for among what is installed, in PYTHONPATH"
            " and in the working folder.",
        )
    if (place := place_in_module(error)) is None:
        return None
    importer = importer or file
    return UserError(
        f"A module cannot be imported: {type(error).__name__}: {_message(error)}",
        where=place + (f", imported by {importer}" if importer else ""),
        fix="Correct the module; --debug shows the traceback.",
    )


def _describe_file(error: Exception, files: list[str], bindings: Bindings) -> UserError | None:
    """The UserError for a gin file that is missing, is no text or includes itself; else None."""
    text, file = str(error), files[-1] if files else None
    missing = re.match(r"Unable to open file: (.*?)\. Searched config paths: (.*?)\.(\n|$)", text)
    if missing:
        return no_gin_file(missing[1], _parse_list(missing[2]), _place_in(text) or "--gin_file")
    if isinstance(error, SyntaxError) and (error.text or "").startswith("\ufeff"):
        return UserError(
            "The gin file begins with a byte order mark, which gin does not read.",
            where=_place_of(error, file),
            fix="Save it as UTF-8 without a byte order mark (BOM).",
        )
    # gin does not say which file it could not decode, so no place is in the message.
    if isinstance(error, UnicodeDecodeError):
        return UserError(
            f"The gin file is not UTF-8 text: {error.reason} at byte {error.start}.",
            where=file,
            fix="Save the file as UTF-8, or check that it is a gin file.",
        )
    if isinstance(error, RecursionError):
        return UserError(
            "Gin files include each other, or values are nested, without end.",
            # A file that is open twice includes itself; without one, a value refers to itself.
            where=next((name for name in files if files.count(name) > 1), file)
            or "; ".join(_places_where(bindings, lambda key, value: _calls(value, key[1:2])))
            or ANYWHERE,
            fix="Remove the `include` or the `@name()` that leads back to itself.",
        )
    return None


def _import_line(name: str) -> str:
    return f"`{_IMPORT_LINES.get(name, f'from t5x import {name}')}`"


def _importer(error: ModuleNotFoundError) -> str:
    """Which line of an importable module imports the missing one; "" if a gin file does."""
    frames = traceback.extract_tb(error.__traceback__)
    # Frames of importlib lie between the `import` statement and the error.
    frame = next(each for each in reversed(frames) if "importlib" not in each.filename)
    if frame.line is None or "import " not in frame.line:
        return ""
    return f", which {frame.filename}:{frame.lineno} imports"


def _missing_import_error(text: str, where: str, t5x: bool) -> UserError:
    """The error for a name that no `import` line defines; only T5X's files need such lines."""
    name = text.split("'")[1]
    if t5x:
        return UserError(
            f"No import line of the gin file defines {name!r}.",
            where=where,
            fix=f"Add its import line to that file, such as {_import_line(name)}.",
        )
    return UserError(
        "This gin file is T5X's, and this command reads Mesh TensorFlow's.",
        where=where,
        fix="Run it with `t0repro train`, `t0repro eval` or `t0repro infer`; with `t0repro"
        " explain`, add --run_mode=train, eval, infer or precompile.",
    )


def _parse_list(text: str) -> list[str]:
    """The strings of a list as Python prints it, or nothing."""
    with contextlib.suppress(ValueError, SyntaxError):
        return [str(item) for item in ast.literal_eval(text)]
    return []


def _words(error: Exception) -> str:
    """An exception's message without the place and the configuration that gin appends."""
    if isinstance(error, tokenize.TokenError):
        return f"The text ends in the middle of a statement: {error.args[0]}."
    if isinstance(error, SyntaxError):
        # gin shows the node of Python's parser, with its address in memory, before the token.
        token = _BAD_TOKEN.search(error.msg)
        reason = f"{token[1]} is not a value" if token else _short(error.msg).rstrip(".")
        return f"This is not a gin statement: {reason}."
    return _message(error) or f"{type(error).__name__}."


def _message(error: Exception) -> str:
    # gin's addition begins at one of these.
    return _short(re.split(r"\n  In (?:file|bindings)| in config string:", str(error))[0])


_BAD_TOKEN = re.compile(r"Failed to parse token ('.*')")
_PYTHON_VALUES = {
    **dict.fromkeys(("true", "yes", "on"), "True"),
    **dict.fromkeys(("false", "no", "off"), "False"),
    **dict.fromkeys(("null", "none"), "None"),
}
_CURLY_QUOTES = re.compile("[\u2018\u2019\u201c\u201d]")
# Spaces of other kinds, and characters of no width: pages and chats put them into what is copied.
_UNSEEN = re.compile("[\u00a0\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]")


def _fix_of_value(error: Exception) -> str | None:
    """The fix for an invalid value, usually a text without quotation marks."""
    if not isinstance(error, SyntaxError):
        return None
    if unseen := _UNSEEN.search(error.text or ""):
        return (
            f"Write a plain space for U+{ord(unseen[0]):04X}, or nothing: the line has this"
            " character, which cannot be seen."
        )
    token = _BAD_TOKEN.search(error.msg)
    if not (token or "Unable to parse value" in error.msg):
        return None
    if token and (value := _PYTHON_VALUES.get(token[1].strip("'").lower())):
        return f"Write {value}: gin's values are Python's."
    if re.search(r"(^|=)\s*$", error.text or ""):
        return "Write a value after the =; a variable of the shell's may be empty."
    if _CURLY_QUOTES.search(error.text or ""):
        return "Write straight quotation marks: 'text'. Word processors make curly ones of them."
    if call := re.search(r"=\s*([\w./]+\(\))", error.text or ""):
        return f"Write @{call[1]}: gin calls what begins with @."
    if name := re.search(r"=\s*(\w+(?:\.\w+)+)\s*$", error.text or ""):
        return (
            f"Write @{name[1]}(), or @{name[1]} without a call, if it is a function; if it is a"
            f""" text, in quotation marks within those of the shell: --gin_param="NAME = 'text'"."""
        )
    return (
        "Correct the value. A text stands in quotation marks, within those of the shell:"
        """ --gin.NAME="'text'", --gin_param="NAME = 'text'"."""
    )


def _short(text: str) -> str:
    """A message on one line, truncated to _LONGEST characters."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


_IN_FILE = re.compile(
    r'\n  In (?:file "(?P<file>[^"]+)",|bindings string) line (?P<line>\d+)\n(?P<text>.*)'
)


def _place_in(text: str) -> str | None:
    """The place that gin appended to a message; if there are several, the first and innermost."""
    match = _IN_FILE.search(text)
    if match is None:
        return None
    if match["file"]:
        return f"{match['file']}:{match['line']}: {_short(match['text'])}"
    # A binding without a value ends the text.
    return f"the command line: {_short(match['text'])!r}" if match["text"] else "the command line"


def _place_of(error: Exception, file: str | None) -> str | None:
    """The file and line that an exception of the parser refers to."""
    # gin appends no place to this one, because Python's own attributes have file and line.
    if isinstance(error, SyntaxError):
        line = f"{error.lineno}" if error.lineno else "?"
        text = _short(error.text or "")
        name = error.filename or file
        return f"{name}:{line}: {text}" if name else f"the command line: {text!r}"
    if isinstance(error, tokenize.TokenError):
        line = error.args[1][0] if len(error.args) > 1 else "?"
        return f"{file}:{line}" if file else f"the command line, line {line}"
    return _place_in(str(error)) or file


def _places_where(bindings: Bindings, matches: Callable[[Key, Any], bool]) -> list[str]:
    """The places of the bindings of which a test of key and value is true."""

    def value(key: Key) -> Any:
        return door.bound().get(key[:2], {}).get(key[2])

    return [place for key, place in bindings.places.items() if matches(key, value(key))]


def _names(selector: str | None, called: Collection[str]) -> bool:
    """Whether a selector, or its last part, is among the configurables called."""
    return selector is not None and bool({selector, selector.rpartition(".")[2]} & {*called})


def _calls(value: Any, called: Collection[str]) -> bool:
    """Whether `@name()` of one of the configurables is in a value."""
    parts = filter(door.is_called, door.flatten_value(value))
    return any(_names(door.selector_of(part), called) for part in parts)


def _place_of_call(text: str, bindings: Bindings) -> str | None:
    """The places of up to three bindings of the configurables that gin was calling."""
    called = set(re.findall(r"configurable '([\w./]+)'", text))
    # The bindings that request the call, else those of the configurable called.
    places = _places_where(bindings, lambda _, value: _calls(value, called))
    places = places or _places_where(bindings, lambda key, _: _names(key[1], called))
    # Put the user's own first, overrides before files: a shipped file is seldom at fault.
    places.sort(key=lambda place: (is_shipped(place), not place.startswith("--")))
    return "; ".join(dict.fromkeys(places[:3])) or None


def nearest_parameter(text: str) -> str | None:
    """The fix for a misspelled argument or configurable, with the nearest names; else None."""
    argument = re.search(
        r"[Cc]onfigurable '([\w./]+)' doesn't have a parameter named '(\w+)'", text
    )
    if argument:
        selector = argument.group(1)
        known = door.argument_names(selector)
        return f"Nearest: {nearest_names(argument.group(2), known, 3)}. {_FIX}" if known else None
    name = re.search(r"No configurable matching (?:reference )?'@?([\w./]+?)(?:\(\))?'", text)
    if name:
        wanted = name.group(1).rpartition(".")[2]
        return f"Nearest: {nearest_names(wanted, door.short_names(), 3)}. {_FIX}"
    return None


def _places_of_value(value: str, bindings: Bindings) -> str | None:
    """Where a mixture of this name is bound; None if its place is unknown."""

    def is_value(key: Key, bound: Any) -> bool:
        followed = door.follow_macros(bound)
        # A number too is a mixture's name only where one is asked for.
        is_name = key[2] == "mixture_or_task_name" or key[0].startswith("MIXTURE_")
        return followed == value or (is_name and str(followed) == value)

    return "; ".join(dict.fromkeys(_places_where(bindings, is_value))) or None


def unknown_mixture(name: str, where: str | None = None) -> UserError:
    """The error for a task or mixture that no imported module registers, with the nearest names.

    Args:
      name: The unknown name.
      where: The place that binds it, if it is known.
    """
    known = sorted({*registered_mixtures(), *registered_tasks()})
    return UserError(
        f"There is no task or mixture {name!r}.",
        where=where or f"{len(known)} tasks and mixtures are registered by the imported modules",
        fix=how_to_register(name, nearest_names(name, known))
        + " For t5's own: --module_import t5.data.mixtures.",
    )
