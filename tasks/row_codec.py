"""Rows as JSON and back without loss; unlike unpickling, decoding cannot run code.

JSON lacks some types in Parquet files: bytes, dates, decimals, tuples. Such a value is written as a
mapping with the single key `_TAG`; a row's own mapping with that key is tagged too.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Callable, Mapping
from typing import Any

_TAG = "\0t0repro"


_PLAIN = (str, int, float, bool, type(None))


def encode_row(value: Any) -> bytes:
    """Encodes a value as one line of ASCII, without a line break.

    Raises:
      TypeError: If the value contains a type that rows cannot have.
    """
    return json.dumps(_encode(value)).encode("ascii")


def decode_row(data: bytes) -> Any:
    """The value that was encoded, with its types."""
    return json.loads(data, object_hook=_decode)


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(item) for item in value]
    # Exact types: a subclass would come back as its base.
    if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item) for key, item in value.items()}
    if kind is dict:
        return _tag("dict", [[_encode(key), _encode(item)] for key, item in value.items()])
    if kind is tuple:
        return _tag("tuple", [_encode(item) for item in value])
    # Compare exact types here too: a datetime is also a date, and would lose its time.
    for name, (of_kind, write, _) in _OTHERS.items():
        if kind is of_kind:
            return _tag(name, write(value))
    raise TypeError(f"A row cannot hold a {kind.__name__}.")


def _tag(name: str, content: Any) -> dict[str, Any]:
    return {_TAG: [name, content]}


def _decode(mapping: dict[str, Any]) -> Any:
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
