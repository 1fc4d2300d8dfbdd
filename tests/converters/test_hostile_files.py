"""Checkpoints that a stranger made: named as what they are, never run, kept to their own folder.

Reading executes nothing: no reader unpickles, opens what a file calls a driver, or follows a path
out of the checkpoint's directory.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest
from flax import serialization

import t0repro.converters
from t0repro.converters.convert import convert
from t0repro.converters.sources import load_any
from t0repro.errors import UserError

from .older_t5x import write_by_older_t5x

DEEP = "[" * 100_000


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_safetensors(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def hugging_face(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "hf", "hf", slots=False)
    (tmp_path / "hf" / "conversion.json").unlink()
    return tmp_path / "hf"


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        "text",
        {"shared.weight": None},
        {"shared.weight": []},
        {"shared.weight": "F32"},
        {"shared.weight": ENTRY | {"dtype": ["F32"]}},
        {"shared.weight": ENTRY | {"shape": 2}},
        {"shared.weight": ENTRY | {"shape": ["2"]}},
        {"shared.weight": ENTRY | {"shape": [-2]}},
        {"shared.weight": ENTRY | {"shape": [True, 2]}},
        {"shared.weight": ENTRY | {"data_offsets": [0]}},
        {"shared.weight": ENTRY | {"data_offsets": [-8, 0]}},
        {"shared.weight": ENTRY | {"data_offsets": ["0", "8"]}},
        {"shared.weight": {"dtype": "F32"}},
        DEEP.encode(),
        b"\xff\xfe",
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_safetensors_header_of_wrong_types_is_a_user_error(hugging_face, header):
    write_safetensors(hugging_face / "model.safetensors", header, bytes(8))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_any(hugging_face)


@pytest.mark.parametrize("content", ["[]", "1", DEEP, '{"model_type": ["t5"]}', ""])
def test_a_config_of_wrong_types_is_a_user_error(hugging_face, content):
    (hugging_face / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        load_any(hugging_face)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', DEEP]
)
def test_an_index_of_wrong_types_is_a_user_error(hugging_face, content):
    # An index is read only where there is no model.safetensors, as by transformers.
    (hugging_face / "model.safetensors").rename(hugging_face / "model-00001-of-00001.safetensors")
    (hugging_face / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError):
        load_any(hugging_face)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../x", "file:///x"])
def test_an_index_that_names_a_file_elsewhere_is_refused_by_name(hugging_face, name):
    (hugging_face / "model.safetensors").rename(hugging_face.parent / "other.safetensors")
    index = {"weight_map": {"shared.weight": name}}
    (hugging_face / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="not in its own directory"):
        load_any(hugging_face)


# --- msgpack and Zarr ----------------------------------------------------------------------------


def leaf_of(path, change):
    """A T5X file whose embedding's leaf is changed."""
    content = serialization.msgpack_restore((path / "checkpoint").read_bytes())
    embedder = content["optimizer"]["target"]["token_embedder"]
    embedder["embedding"] = change(embedder["embedding"])
    (path / "checkpoint").write_bytes(serialization.msgpack_serialize(content))


@pytest.fixture
def t5x(tiny_checkpoint, tmp_path):
    directory = tmp_path / "t5x" / "checkpoint_7"
    write_by_older_t5x(directory, load_any(tiny_checkpoint))
    return directory


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: "text",
        lambda spec: [1, "a"],
        lambda spec: spec | {"kvstore": "file"},
        lambda spec: spec | {"kvstore": {"driver": "file"}},
        lambda spec: spec | {"kvstore": {"driver": "file", "path": 7}},
        lambda spec: spec | {"kvstore": {"driver": "file", "path": "../../elsewhere"}},
        lambda spec: b"bytes",
    ],
)
def test_a_leaf_of_the_msgpack_of_a_wrong_type_is_a_user_error(t5x, change):
    leaf_of(t5x, change)
    with pytest.raises(UserError, match="embedding"):
        load_any(t5x)


@pytest.mark.parametrize(
    "content", [[], 7, {"version": "3"}, {"version": 3, "optimizer": 7}, {"version": 3}]
)
def test_a_msgpack_of_another_kind_is_a_user_error(t5x, content):
    (t5x / "checkpoint").write_bytes(msgpack.packb(content))
    with pytest.raises(UserError, match="checkpoint"):
        load_any(t5x)


def test_an_array_of_objects_in_the_msgpack_is_never_unpickled(t5x, tmp_path):
    mark = tmp_path / "ran"
    pickled = pickle.dumps(Bomb(mark))
    # As flax packs an array: extension 1 of shape, type and bytes.
    array = msgpack.ExtType(1, msgpack.packb(((1,), "object", pickled)))
    tree = {"version": 3, "optimizer": {"target": {"a": array}, "state": {"step": 7}}}
    (t5x / "checkpoint").write_bytes(msgpack.packb(tree))
    with pytest.raises(UserError, match="cannot be unpacked"):
        load_any(t5x)
    assert not mark.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "|O"},
        {"dtype": "<U4"},
        {"dtype": [["a", "<f4"]]},
        {"dtype": None},
        {"shape": [-1, 128]},
        {"shape": "128"},
        {"shape": [128.0, 128]},
    ],
    ids=str,
)
def test_a_zarr_array_that_is_none_of_numbers_is_a_user_error(t5x, tmp_path, change):
    description = t5x / "target.token_embedder.embedding" / ".zarray"
    description.write_text(json.dumps(json.loads(description.read_text()) | change))
    mark = tmp_path / "ran"
    for chunk in description.parent.glob("[0-9]*"):
        chunk.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(UserError, match="damaged"):
        load_any(t5x)
    assert not mark.exists()


@pytest.mark.parametrize("content", ["[]", '{"files": 7}', '{"files": {"a": 1}}', DEEP])
def test_a_list_of_files_of_wrong_types_is_a_user_error(tiny_checkpoint, tmp_path, content):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    (tmp_path / "jax" / "checkpoint_7" / "integrity.json").write_text(content)
    with pytest.raises(UserError, match="not a list of files"):
        load_any(tmp_path / "jax")


def test_a_list_of_files_that_names_one_elsewhere_is_refused(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    listing = tmp_path / "jax" / "checkpoint_7" / "integrity.json"
    files = json.loads(listing.read_text())["files"]
    files["../../../secret"] = {"bytes": 1, "crc32": 0}
    listing.write_text(json.dumps({"files": files}))
    with pytest.raises(UserError, match="secret"):
        load_any(tmp_path / "jax")


def test_no_reader_has_a_way_to_unpickle():
    """numpy's allow_pickle is off unless it is asked for; nobody asks, and nobody calls pickle."""
    (folder,) = t0repro.converters.__path__
    for path in Path(folder).rglob("*.py"):
        source = path.read_text()
        assert not any(word in source for word in ("allow_pickle", "import pickle"))
    assert inspect.signature(np.load).parameters["allow_pickle"].default is False
