"""Wording of everything that people read: counts, lists, names safe to print, no passwords."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def parse_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8, with or without a byte-order mark.

    Raises:
      ValueError: If it is none; the message says why.
    """
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        fault = "it is UTF-16; save it as UTF-8" if is_utf16 else json_fault(error)
        raise ValueError(fault) from error


def json_fault(error: ValueError | RecursionError) -> str:
    """What is wrong with a text in JSON, and where; of a single line, only the column is named."""
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"{error.msg} ({line}column {error.colno})"
    return str(error)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 example`, `2,000 examples`; `plural` for irregular nouns."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def sized(number: int) -> str:
    """A number of bytes in the largest decimal unit that keeps it at 1 or more: `1.31 GB`."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("KB", 3)):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}"
    return counted(number, "byte")


def some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """The first names and the number of others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def shortened(text: str, length: int) -> str:
    """The text, or its first `length` - 1 characters and an ellipsis."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "\u2026"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: left-aligned columns, two spaces apart, none shortened."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(line).rstrip() for line in cells]


def printable(text: str, *, keep: str = "") -> str:
    r"""Escapes everything in a text that a terminal would interpret instead of displaying.

    Control characters (escape sequences among them), format characters such as marks that reverse
    the writing direction, and lone surrogates become their Python escapes (`\x1b`); line breaks
    and tabs become spaces.

    Args:
      text: text that may come from a file that others wrote.
      keep: characters to leave unchanged, for instance line breaks.
    """
    if text.isprintable():
        # The usual case, without a loop over characters.
        return text
    return "".join(char if char in keep else _visible(char) for char in text)


def _visible(char: str) -> str:
    if char in "\n\r\t\v\f\u2028\u2029":
        return " "
    # Cc: control, Cf: format (direction marks among them), Cs: surrogates
    if unicodedata.category(char) in ("Cc", "Cf", "Cs"):
        return char.encode("unicode_escape").decode("ascii")
    return char


_names: dict[str, str] = {}


def show_as(name: str, shown: str) -> None:
    """Has everything that people read say a name in another way, as an address for its copy."""
    _names[name] = shown


@contextlib.contextmanager
def shown_as(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, each of these names or phrases is shown as its value."""
    # Not a context variable: threads write messages too.
    _names.update(names)
    try:
        yield
    finally:
        for name in names:
            _names.pop(name, None)


def rename_for_reader(text: str) -> str:
    """A text with the names that its reader knows."""
    for name, shown in _names.items():
        text = text.replace(name, shown)
    return text


# The user and password of an address: all up to the last @ before its path.
_USER = re.compile(r"(?<=://)[^\s/?#'\"<>]*@")
_SECRET_WORDS = r"token(?![a-z])|secret|passw(?:or)?d|passphrase|credential|signature|api_?key"
# `sig` is the signature of Azure's addresses, `key` a key of Google's.
_QUERY = re.compile(
    rf"([?&#](?:[^=&#\s]*(?:{_SECRET_WORDS})[^=&#\s]*|sig|key)=)[^&#\s'\"]+", re.IGNORECASE
)
_NAME = re.compile(rf"{_SECRET_WORDS}|(?:^|_)keys?(?:_|$)|_pwd(?:_|$)", re.IGNORECASE)
_SECRET_WORD = re.compile(_SECRET_WORDS, re.IGNORECASE)
# In a command: HF_TOKEN=value as `env` takes it, --token=value, --token value. A value ends where
# the shell's quotes do, and before double quotes and backslashes, so that JSON stays JSON.
_GIVEN = re.compile(
    r"(?P<quote>(?<!\w)')?(?P<name>(?<![\w.-])(?:[A-Z][A-Z0-9_]*=|--[a-z][\w-]*(?:=| (?!-))))"
    r"(?(quote)[^'\"\\]+|(?:'[^'\"\\]*'|[^\s'\"\\]+))"
)


def remove_passwords(text: str) -> str:
    """The text with `***` for the secrets of addresses and of commands.

    Those are users, passwords and secret parameters of addresses, and the values of variables and
    options with a secret's name.
    """
    return _GIVEN.sub(_hide_value, _QUERY.sub(r"\1***", _USER.sub("***@", text)))


def _hide_value(given: re.Match[str]) -> str:
    # A key is a secret in a variable (WANDB_API_KEY), but rarely in an option (--key_map).
    name = given["name"]
    pattern = _SECRET_WORD if name.startswith("--") else _NAME
    if not pattern.search(name.rstrip("= ").replace("-", "_")):
        return given[0]
    return f"{given['quote'] or ''}{name}***"


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable looks like a secret, by its name or a password in it."""
    return bool(_NAME.search(name)) or remove_passwords(value) != value


def remove_secrets(text: str) -> str:
    """The text without passwords of addresses, and without the secrets in this environment."""
    for name, value in os.environ.items():
        # A short value also occurs in other text, and a path only shows where a secret is.
        if len(value) >= 8 and not os.path.isabs(value) and _NAME.search(name):
            text = text.replace(value, "***")
    return remove_passwords(text)
