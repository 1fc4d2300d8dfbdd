"""What a clone without git-lfs has in place of large files, in every kind of file that is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t0repro.config.gin.imports import list_imports
from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.converters.tensor_bundle import BundleWriter
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape
from t0repro.tasks.rows import read_rows
from t0repro.tasks.template_files import read_template_file
from t0repro.tasks.vocabulary import VocabularyFile

POINTER = """\
version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 794346
"""
SHAPE = ModelShape(1, 1, 4, 4, 1, 4, 8, 4, ("wi",), True)


def is_named(file: Path, read: Callable[[], Any]) -> None:
    file.write_text(POINTER)
    with pytest.raises(UserError, match="Git LFS pointer") as caught:
        read()
    assert caught.value.where == str(file)
    assert "git lfs pull" in str(caught.value)


@pytest.mark.parametrize(
    ("to", "pattern"),
    [
        ("mtf", "*.index"),
        ("mtf", "*.data-*"),
        ("mtf", "checkpoint"),
        ("t5x", "*/checkpoint"),
        ("jax", "*/_METADATA"),
        ("hf", "config.json"),
        ("hf", "model.safetensors"),
        ("hf", "conversion.json"),
    ],
)
def test_of_a_checkpoint(tmp_path, to, pattern):
    write_checkpoint(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / to, to)
    (file,) = (tmp_path / to).glob(pattern)
    is_named(file, lambda: load_any(tmp_path / to))


def write_checkpoint(directory: Path) -> None:
    directory.mkdir()
    writer = BundleWriter(directory / "model.ckpt-0")
    writer.add("global_step", np.asarray(0, np.int64))
    for path, name in SHAPE.mesh_variables().items():
        writer.add(name, np.ones(SHAPE.parameters()[path], np.float32))
    writer.close()
    (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')


def test_of_a_chunk_of_a_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "t5x", "t5x")
    next((tmp_path / "t5x").glob("checkpoint_0/target.*kernel/0*")).write_text(POINTER)
    with pytest.raises(UserError, match="git lfs pull"):
        verify(tmp_path / "t5x")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "flax_model.msgpack"])
def test_of_other_weights(tmp_path, name):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    is_named(tmp_path / name, lambda: load_any(tmp_path))


def test_of_an_adapter(tmp_path):
    is_named(tmp_path / "adapter_config.json", lambda: load_any(tmp_path))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_of_rows(tmp_path, name):
    is_named(tmp_path / name, lambda: list(read_rows(tmp_path / name)))


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_of_a_vocabulary(tmp_path, name):
    file = tmp_path / name
    is_named(file, VocabularyFile(str(file)).processor)


def test_of_a_template_file(tmp_path):
    file = tmp_path / "templates.yaml"
    is_named(file, lambda: read_template_file(file))


def test_of_a_gin_file(tmp_path):
    file = tmp_path / "model.gin"
    is_named(file, lambda: list_imports([str(file)], [], [], ()))


def test_a_file_s_line_key_or_neighbor_may_follow_its_path(tmp_path):
    (tmp_path / "x").write_text(POINTER)
    for where in ("{}", "{}, key", "{}:3", "{}; other", "other; {}"):
        assert UserError("?", where=where.format(tmp_path / "x")).where == str(tmp_path / "x")
    for where in (None, "--flag", "a\0b", str(tmp_path)):
        assert UserError("?", where=where).where == where
