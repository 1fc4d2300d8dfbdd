"""Reads rows from JSON: an object a line, or one list of objects; or gzipped."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import itertools
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t0repro.errors import UserError
from t0repro.words import json_fault

DEPTH = 100
"""How deeply the lists and objects of a row may be nested."""
_LINES = (".jsonl", ".jsonl.gz")
_GZIP = b"\x1f\x8b"
_HEAD = 4096  # bytes in which a file's first row begins
_TOO_DEEP = f"its lists and objects are nested more than {DEPTH} deep"


def read_json(path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields rows `start` to `stop` (exclusive); lines before `start` are not parsed.

    Raises:
      UserError: If a line is not a row in UTF-8; it names the file and the line.
    """
    if _is_list(path):
        yield from _read_list(path)[start:stop]
        return
    if not path.name.endswith(_LINES):
        _check_has_rows(path)
    for number, line in itertools.islice(_lines(path), start, stop):
        yield _parse(line, path, f"line {number}")


def count_json(path: Path) -> int:
    """Number of rows; lines are not parsed."""
    return len(_read_list(path)) if _is_list(path) else sum(1 for _ in _lines(path))


def place_json(path: Path, index: int) -> str:
    """Where row `index`, from 0, is: its line, or its number in a list."""
    if _is_list(path):
        return f"row {index + 1}"
    # Blank lines are not rows, so find the line's number by counting.
    number, _ = next(itertools.islice(_lines(path), index, None), (index + 1, b""))
    return f"line {number}"


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.BufferedIOBase]:
    try:
        with open(path, "rb") as file:
            # Some programs pack a file and leave the ending out.
            packed = path.suffix == ".gz" or file.peek(2).startswith(_GZIP)
            yield gzip.GzipFile(fileobj=file) if packed else file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"The file cannot be unpacked: {error}", where=str(path), fix="Get it again."
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line) of each line that is not blank, that is, of each row."""
    # In bytes: each line is decoded by itself, so that an error names its line.
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if line and not line.isspace():
                yield number, line


def _is_list(path: Path) -> bool:
    """Whether a file has one list, as pandas writes it, rather than an object a line."""
    with _open(path) as file:
        # Not a line, which may be the whole list.
        return file.read(_HEAD).removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def _check_has_rows(path: Path) -> None:
    """Refuses a `.json` file of columns, as pandas' to_json writes: it would pass for one row."""
    lines = list(itertools.islice(_lines(path), 2))
    if len(lines) != 1:
        return
    number, line = lines[0]
    values = [*_parse(line, path, f"line {number}").values()]
    is_columns = any(all(isinstance(value, kind) for value in values) for kind in (list, dict))
    if values and is_columns and len({len(value) for value in values}) == 1:
        raise UserError(
            "The file is one JSON object of columns, not rows.",
            where=str(path),
            fix='Write rows, with pandas by to_json(path, orient="records", lines=True). If it is'
            " one row, give the file the ending .jsonl.",
        )


def _read_list(path: Path) -> list[dict[str, Any]]:
    status = path.stat()
    # Time and size are in the key, so that a changed file is read again.
    return _read_list_once(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _read_list_once(path: Path, modified: int, size: int) -> list[dict[str, Any]]:
    del modified, size  # part of the key alone
    try:
        with _open(path) as file:
            content = file.read()
        rows = _DECODER.decode(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = _TOO_DEEP if isinstance(error, RecursionError) else _fault(content, error)
        raise UserError(
            f"The file is not a list of rows in JSON: {reason}.",
            where=str(path),
            fix="Correct it, or write one JSON object a line.",
        ) from error
    for number, row in enumerate(rows, start=1):
        place = f"row {number}"
        _check_row(row, path, place)
        _check_text(row, path, place)
    return rows


def _parse(line: bytes, path: Path, place: str) -> dict[str, Any]:
    try:
        row = _DECODER.decode(line.decode("utf-8"))
    except ValueError as error:  # includes UnicodeError
        raise _broken_row_error(path, place, _fault(line, error)) from error
    except RecursionError as error:
        raise _broken_row_error(path, place, _TOO_DEEP) from error
    if b"\\ud" in line or b"\\uD" in line:
        _check_text(row, path, place)
    # Counting brackets is cheap, and most lines have too few to be nested that deeply.
    if line.count(b"[") + line.count(b"{") > DEPTH or not isinstance(row, dict):
        _check_row(row, path, place)
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; json would keep the last value of a key that is given twice."""
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)


def _fault(content: bytes, error: ValueError) -> str:
    if b"\0" in content[:_HEAD]:
        return "the file is UTF-16; save it as UTF-8"
    return json_fault(error)


def _check_row(row: Any, path: Path, place: str) -> None:
    if _depth(row) > DEPTH:
        raise _broken_row_error(path, place, _TOO_DEEP)
    if not isinstance(row, dict):
        raise _broken_row_error(path, place, "it is not an object of field names and values")


def _check_text(row: Any, path: Path, place: str) -> None:
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise _broken_row_error(path, place, str(error)) from error


def _depth(value: Any) -> int:
    """How deeply lists and objects are nested; computed without recursion."""
    deepest, waiting = 0, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, depth + 1)
            inside = item.values() if isinstance(item, dict) else item
            # Use an explicit stack: the nesting may exceed Python's recursion limit.
            waiting += [(each, depth + 1) for each in inside]
    return deepest


def _broken_row_error(path: Path, place: str, reason: str) -> UserError:
    each = place.split()[0]
    return UserError(
        f"A {'line' if each == 'line' else 'value'} is not a row in JSON: {reason}.",
        where=f"{path}, {place}",
        fix=f"Fix or remove that {each}; each {each} must be one JSON object in UTF-8.",
    )
