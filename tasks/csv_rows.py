"""Reads rows from CSV and TSV files: a header, UTF-8 with or without a byte-order mark.

Values have the types that `datasets` gives them, which reads CSV with pandas: a column of whole
numbers is int, one of numbers float, one of True and False bool, any other text; a value that
pandas takes for missing is None. The type is that of the whole column, so labels of which one is
missing are float, as in `datasets`.
"""

from __future__ import annotations

import codecs
import csv
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from t0repro.errors import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
# pandas' own list (pandas.io.parsers.readers, na_values).
_MISSING = frozenset(
    ("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN")
    + ("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null")
)
_TRUTH = {"true": True, "false": False}
_LONGEST_FIELD = 2**31 - 1  # Python's own limit is 128 KiB, which a document exceeds


def read_csv(path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields rows `start` to `stop` (exclusive), with their columns' types.

    Raises:
      UserError: If the header or a line is broken, or the text is not UTF-8; it names the line.
    """
    status = path.stat()
    # Time and size are in the key, so that a changed file is read again.
    types = _column_types(path, status.st_mtime_ns, status.st_size)
    for _, fields in itertools.islice(_records(path), start, stop):
        yield {
            name: None if text in _MISSING else convert(text)
            for (name, convert), text in zip(types.items(), fields, strict=True)
        }


def count_csv(path: Path) -> int:
    """Number of rows below the header."""
    return sum(1 for _ in _records(path))


def line_of_row(path: Path, index: int) -> int:
    """The line on which row `index`, from 0, ends."""
    line, _ = next(itertools.islice(_records(path), index, None), (index + 2, []))
    return line


@functools.cache
def _column_types(path: Path, modified: int, size: int) -> dict[str, Callable[[str], Any]]:
    """Column -> the function that reads its values."""
    del modified, size  # part of the key alone
    names = _header(path)
    kinds = [_KINDS] * len(names)
    has_missing = [False] * len(names)
    has_values = [False] * len(names)
    for _, fields in _records(path):
        for at, text in enumerate(fields):
            if text in _MISSING:
                has_missing[at] = True
            else:
                has_values[at] = True
                kinds[at] = tuple(kind for kind in kinds[at] if _can_read(kind, text))
    types: dict[str, Callable[[str], Any]] = {}
    for name, possible, missing, values in zip(names, kinds, has_missing, has_values, strict=True):
        # A column without any value is text.
        types[name] = convert = possible[0] if possible and values else str
        if missing and convert is _read_signed:
            types[name] = _read_float  # pandas has no missing integer
        elif convert is int or (missing and convert is _read_unsigned):
            types[name] = str  # whole numbers that none of pandas' types holds
    return types


def _can_read(kind: Callable[[str], Any], text: str) -> bool:
    try:
        kind(text)
    except (ValueError, KeyError):
        return False
    # Python also reads "1_000" and digits of other scripts, which are text for pandas.
    return "_" not in text and text.isascii()


def _read_int(text: str, lowest: int, highest: int) -> int:
    number = int(text)
    if not lowest <= number <= highest:
        raise ValueError(text)
    return number


def _read_signed(text: str) -> int:
    return _read_int(text, -(2**63), 2**63 - 1)


def _read_unsigned(text: str) -> int:
    return _read_int(text, 0, 2**64 - 1)


def _read_float(text: str) -> float:
    if text.strip().lstrip("+-").isdigit():
        _read_int(text, -(2**63), 2**64 - 1)  # a float would drop digits of a longer number
    number = float(text)
    if math.isnan(number):  # pandas' own spellings of it are in _MISSING
        raise ValueError(text)
    return number


def _read_truth(text: str) -> bool:
    return _TRUTH[text.lower()]


# What a column may hold besides text, the narrowest first.
_KINDS: tuple[Callable[[str], Any], ...] = (
    *(_read_signed, _read_unsigned, int),
    *(_read_float, _read_truth),
)


def _header(path: Path) -> list[str]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            # Blank lines before the header are skipped, as those below it.
            names = next(filter(None, csv.reader(file, delimiter=DELIMITERS[path.suffix])), [])
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from error
    names = _name_unnamed(names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _broken_row_error(path, 1, f"the header has {twice[0]!r} twice")
    if not names:
        raise _broken_row_error(path, 1, "the file has no header")
    if len(names) == 1 and (other := next((each for each in ";\t," if each in names[0]), None)):
        raise _broken_row_error(
            path, 1, f"the header is one field, {names[0]!r}, which {other!r} separates"
        )
    return names


def _name_unnamed(names: Sequence[str]) -> list[str]:
    """Names of all columns: pandas' for an index, which it writes without a name.

    A file that was read and written with its index again has two.
    """
    taken = {*names}
    named = list(names)
    for at, name in enumerate(names):
        if not name:
            free = (f"Unnamed: {at}" + (f".{n}" if n else "") for n in itertools.count())
            named[at] = next(each for each in free if each not in taken)
            taken.add(named[at])
    return named


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (its last line's number, its fields) of each row."""
    csv.field_size_limit(_LONGEST_FIELD)
    names = _header(path)
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=DELIMITERS[path.suffix], strict=True)
        try:
            next(filter(None, reader))
            begins = reader.line_num + 1
            for fields in reader:
                begins = reader.line_num + 1
                if not fields:  # a blank line
                    continue
                if len(fields) != len(names):
                    what = f"it has {len(fields)} fields, and the header has {len(names)}"
                    raise _broken_row_error(path, reader.line_num, what)
                yield reader.line_num, fields
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from error
        except csv.Error as error:
            # The module's words for a quotation mark that nothing closes.
            unclosed = str(error) == "unexpected end of data"
            reason = "the quotation mark of a field is not closed" if unclosed else str(error)
            line = begins if unclosed else reader.line_num
            raise _broken_row_error(path, line, reason) from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    # Text is decoded in blocks of many lines, so look for the line.
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    return _broken_row_error(path, 1, "the file is UTF-16; save it as UTF-8")
                return _broken_row_error(path, number, "it is not UTF-8; save the file as UTF-8")
    return _broken_row_error(path, 1, str(error))


def _broken_row_error(path: Path, line: int, reason: str) -> UserError:
    kind = path.suffix[1:].upper()
    return UserError(
        f"A line is not a row of {kind}: {reason}.",
        where=f"{path}, line {line}",
        fix=f"Write the file as {kind} in UTF-8, with a header, and quote fields that contain"
        f" {'commas' if kind == 'CSV' else 'tabs'}, quotes or line breaks.",
    )
