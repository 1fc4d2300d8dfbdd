"""Wording shared by everything that people read: counts with their nouns, names safe to print."""

from __future__ import annotations

import unicodedata


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 example`, `2,000 examples`; `plural` where adding an s is wrong."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def shortened(text: str, length: int) -> str:
    """The text, or its first `length` - 1 characters and an ellipsis."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "\u2026"


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with everything that a terminal would act on rather than show made visible.

    Escape sequences, other control characters, characters that turn the direction of writing round
    and lone surrogates become their Python escapes (`\x1b`); line breaks and tabs become spaces.

    Args:
      text: from a file that others may have written.
      keep: characters to leave as they are, for instance line breaks.
    """
    if text.isprintable():
        return text
    return "".join(char if char in keep else _visible(char) for char in text)


def _visible(char: str) -> str:
    if char in "\n\r\t\v\f\u2028\u2029":
        return " "
    # Cc: control, Cf: format (direction marks among them), Cs: surrogates
    if unicodedata.category(char) in ("Cc", "Cf", "Cs"):
        return char.encode("unicode_escape").decode("ascii")
    return char
