"""Descriptions of Zarr arrays, versions 2 and 3: an array's shape, dtype and chunks.

Orbax and T5X write through TensorStore and use little of Zarr: numbers, little-endian and in C
order, in chunks no larger than their array. Any other description counts as damaged: one flipped
bit turns "<f4" into the big-endian ">f4".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t0repro.converters.tensors import TensorInfo
from t0repro.converters.witnesses import damaged

# The file in an array's directory that describes it, of either version.
DESCRIPTIONS = (".zarray", "zarr.json")
_FIELDS = ("shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters")


@dataclasses.dataclass(frozen=True)
class Description:
    """An array of numbers.

    Attributes:
      info: Its shape and type.
      chunks: The shape of a chunk.
      version: Zarr's, 2 or 3.
      prefix: The text before the numbers in a chunk's name.
      separator: The text between them.
      has_fill_value: Whether a missing chunk stands for a single value.
      is_plain: Whether the array is one chunk of its bytes and nothing else.
    """

    info: TensorInfo
    chunks: tuple[int, ...]
    version: int
    prefix: str
    separator: str
    has_fill_value: bool
    is_plain: bool

    @property
    def driver(self) -> str:
        """TensorStore's name of the version."""
        return "zarr3" if self.version == 3 else "zarr"

    @property
    def first_chunk(self) -> str:
        """The name of the first chunk."""
        return self._name((0,) * len(self.chunks))

    def chunk_names(self) -> Iterator[str]:
        """Yields the name of each chunk that the array has."""
        # Round up: chunks at the ends may extend beyond the array.
        sizes = zip(self.info.shape, self.chunks, strict=True)
        counts = [-(-size // chunk) if size else 0 for size, chunk in sizes]
        return map(self._name, np.ndindex(*counts))

    def _name(self, place: tuple[int, ...]) -> str:
        # A scalar has one chunk: "0" in version 2, "c" in version 3.
        numbers = self.separator.join(map(str, place))
        if self.version == 3 and self.prefix:
            return self.separator.join(filter(None, (self.prefix, numbers)))
        return numbers or "0"


def parse(path: str, content: bytes) -> Description:
    """Reads a description.

    Args:
      path: Its file, for messages.
      content: The file's content.

    Raises:
      UserError: If it does not describe an array of numbers as TensorStore writes one.
    """
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise damaged(path, "it is not JSON") from None
    if not isinstance(parsed, dict):
        raise damaged(path, "it is not a description of an array")
    description = _third(path, parsed) if parsed.get("zarr_format") == 3 else _second(path, parsed)
    sizes = list(zip(description.info.shape, description.chunks, strict=False))
    fits = len(description.chunks) == len(description.info.shape)
    if not fits or not all(0 < chunk <= size or chunk == size for size, chunk in sizes):
        raise damaged(
            path,
            f"chunks of shape {list(description.chunks)} do not divide an array of shape"
            f" {list(description.info.shape)}",
        )
    return description


def _second(path: str, content: Mapping[str, Any]) -> Description:
    if missing := [field for field in _FIELDS if field not in content]:
        raise damaged(path, f"it does not say the array's {missing[0]!r}")
    dtype = str(content["dtype"])
    if content["order"] != "C" or dtype.startswith(">"):
        raise damaged(
            path,
            f"it describes an array of {dtype!r} in {content['order']!r} order, not '<' and 'C'",
        )
    info = _info(path, content["dtype"], content["shape"])
    chunks = _sizes(path, content["chunks"])
    return Description(
        info,
        chunks,
        version=2,
        prefix="",
        separator=_separator(path, content.get("dimension_separator", ".")),
        has_fill_value=content["fill_value"] is not None,
        is_plain=content["compressor"] is None
        and not content["filters"]
        and chunks == info.shape
        # An array without elements has no chunk to read.
        and math.prod(info.shape) > 0,
    )


def _third(path: str, content: Mapping[str, Any]) -> Description:
    try:
        info = _info(path, content["data_type"], content["shape"])
        chunks = content["chunk_grid"]["configuration"]["chunk_shape"]
        encoding = content["chunk_key_encoding"]
        by_default = encoding["name"] == "default"
        # Zarr 3's defaults, which a description may leave out.
        separator = encoding.get("configuration", {}).get("separator", "/" if by_default else ".")
    except (KeyError, TypeError, AttributeError):
        raise damaged(path, "it does not describe a Zarr 3 array") from None
    return Description(
        info,
        _sizes(path, chunks),
        version=3,
        prefix="c" if by_default else "",
        separator=_separator(path, separator),
        has_fill_value=True,  # version 3 always has one
        is_plain=False,
    )


def _info(path: str, name: Any, shape: Any) -> TensorInfo:
    try:
        dtype = np.dtype(str(name))
    except (TypeError, ValueError):
        raise damaged(path, f"it describes an array of {name!r}") from None
    # Numbers only: an array of objects ("O") would be unpickled, which can run any code.
    if dtype.kind not in "biuf" and dtype != np.dtype("bfloat16"):
        raise damaged(path, f"it describes an array of {name!r}")
    return TensorInfo(_sizes(path, shape), dtype)


def _sizes(path: str, sizes: Any) -> tuple[int, ...]:
    # A bool is an int to Python.
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise damaged(path, f"it describes an array with the sizes {sizes!r}")
    return tuple(sizes)


def _separator(path: str, separator: Any) -> str:
    if separator not in (".", "/"):
        raise damaged(path, f"the names of its chunks are separated by {separator!r}")
    return separator


def plain_chunk(shape: Sequence[int]) -> str:
    """The name of the only chunk of an array that `plain_text` describes."""
    return ".".join("0" for _ in shape) or "0"


def plain_text(array: np.ndarray) -> str:
    """The content of `.zarray` for an array in one uncompressed chunk."""
    # numpy's own code for bfloat16 is a void type ("<V2"); Zarr's readers use the name.
    dtype = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
    return json.dumps(
        {
            "chunks": list(array.shape),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype,
            # Without a fill value TensorStore reports a lost chunk instead of reading zeros.
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(array.shape),
            "zarr_format": 2,
        }
    )
