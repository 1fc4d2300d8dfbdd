"""What is a safetensors file, and what is none, by the safetensors package's own judgment."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from t0repro.converters.safetensors_files import SafetensorsFile
from t0repro.errors import UserError


def entry(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


HEADERS = {
    "one": ({"a": entry(0, 8)}, 8),
    "none": ({}, 0),
    "in another order": ({"b": entry(8, 16), "a": entry(0, 8)}, 16),
    "an empty tensor": ({"a": entry(0, 0), "b": entry(0, 8)}, 8),
    "strings": ({"__metadata__": {"format": "pt"}, "a": entry(0, 8)}, 8),
    "null metadata": ({"__metadata__": None, "a": entry(0, 8)}, 8),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
    "one place for two": ({"a": entry(0, 8), "b": entry(0, 8)}, 8),
    "a hole": ({"a": entry(0, 8), "b": entry(12, 20)}, 20),
    "a hole at the start": ({"a": entry(4, 12)}, 12),
    "bytes left over": ({"a": entry(0, 8)}, 12),
    "too few bytes": ({"a": entry(0, 8)}, 4),
    "numeric metadata": ({"__metadata__": 7, "a": entry(0, 8)}, 8),
    "a number in metadata": ({"__metadata__": {"x": 7}, "a": entry(0, 8)}, 8),
    "metadata in a list": ({"__metadata__": ["x"], "a": entry(0, 8)}, 8),
    "a list": (["a"], 0),
    "half of an object": (b'{"a": {', 8),
    "no UTF-8": (b'{"\xff": {}}', 0),
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_same_files_are_accepted_as_by_the_safetensors_package(tmp_path, name):
    library = pytest.importorskip("safetensors")
    header, size = HEADERS[name]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    content = np.arange(size, dtype=np.uint8).tobytes()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    try:
        with library.safe_open(path, "numpy") as file:
            expected = {key: file.get_tensor(key).tobytes() for key in file.keys()}
    except library.SafetensorError:
        with pytest.raises(UserError, match=str(path)):
            SafetensorsFile(str(path))
    else:
        found = SafetensorsFile(str(path))
        assert {key: found.read(key).tobytes() for key in found.tensors} == expected


def test_a_header_of_more_than_a_t5_is_refused_unparsed(tmp_path, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    text = b'{"a":[' + b"0," * 600_000 + b"0]}"
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(UserError, match="more than any T5"):
        SafetensorsFile(str(path))
