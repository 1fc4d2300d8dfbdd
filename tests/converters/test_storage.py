"""Checkpoints that are not on this machine's disk: fsspec's memory file system stands for any."""

from __future__ import annotations

import os
import shutil

import pytest

from t0repro import storage
from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.inspection import compare, verify
from t0repro.converters.sources import load_any
from t0repro.errors import UserError

from .checkpoint_files import assert_same_bits, read_variables
from .older_t5x import write_by_older_t5x


@pytest.fixture
def upload():
    import fsspec

    system = fsspec.filesystem("memory")

    def put(directory, name):
        system.put(str(directory), f"/bucket/{name}", recursive=True)
        return f"memory://bucket/{name}"

    yield put
    system.rm("/bucket", recursive=True)


def save_with_orbax(directory, source, use_ocdbt):
    import flax.traverse_util
    import orbax.checkpoint as ocp

    nested = flax.traverse_util.unflatten_dict(load_any(source), sep="/")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(directory / "checkpoint_7", nested)


def make(kind, directory, source):
    """A directory with the checkpoint `source` in another format and layout."""
    if kind == "Orbax's OCDBT":
        save_with_orbax(directory, source, use_ocdbt=True)
    elif kind == "Orbax's Zarr":
        save_with_orbax(directory, source, use_ocdbt=False)
    elif kind == "T5X's older layout":
        write_by_older_t5x(directory / "checkpoint_7", load_any(source))
    elif kind == "scanned":
        convert(source, directory, "t5x", scan=True, slots=False)  # some slots are changed by it
    else:
        convert(source, directory, kind)


KINDS = ["mtf", "jax", "t5x", "hf", "scanned", "Orbax's OCDBT", "Orbax's Zarr"]


@pytest.mark.parametrize("kind", [*KINDS, "T5X's older layout"])
def test_any_format_is_read_from_an_address_that_fsspec_opens(
    tiny_checkpoint, tmp_path, upload, kind
):
    make(kind, tmp_path / "local", tiny_checkpoint)
    address = upload(tmp_path / "local", "model")
    shutil.rmtree(tmp_path / "local")
    convert(address, tmp_path / "out", "mtf")
    slots = kind != "scanned"
    expected = read_variables(tiny_checkpoint)
    expected = {name: x for name, x in expected.items() if slots or "_slot_" not in name}
    assert_same_bits(expected, read_variables(tmp_path / "out"))
    assert verify(address).problems == ()
    assert not compare(address, tiny_checkpoint, slots=slots).differences


@pytest.mark.parametrize(("kind", "name"), [("mtf", "model.ckpt-7"), ("jax", "checkpoint_7")])
def test_a_remote_checkpoint_is_found_by_its_own_name(
    tiny_checkpoint, tmp_path, upload, kind, name
):
    make(kind, tmp_path / "local", tiny_checkpoint)
    address = upload(tmp_path / "local", "model")
    assert find_checkpoint(f"{address}/{name}") == find_checkpoint(address)
    assert find_checkpoint(f"{address}/{name}/" if kind == "jax" else address).step == 7


def test_copies_of_remote_stores_are_removed(tiny_checkpoint, tmp_path, upload, monkeypatch):
    make("Orbax's OCDBT", tmp_path / "local", tiny_checkpoint)
    address = upload(tmp_path / "local", "model")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    convert(address, tmp_path / "out", "mtf")
    assert os.listdir(tmp_path / "temporary") == []


def test_a_copy_for_which_there_is_no_room_is_told(tiny_checkpoint, tmp_path, upload, monkeypatch):
    make("Orbax's OCDBT", tmp_path / "local", tiny_checkpoint)
    address = upload(tmp_path / "local", "model")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"(?s)must be copied here.*TMPDIR"):
        convert(address, tmp_path / "out", "mtf")


@pytest.mark.parametrize("again", ["answers", "is reset"])
def test_an_answer_that_was_cut_is_taken_for_no_empty_folder(
    tiny_checkpoint, upload, monkeypatch, again
):
    """As s3fs, which finds nothing where the answer to its request was cut."""
    import fsspec

    address, memory = upload(tiny_checkpoint, "model"), type(fsspec.filesystem("memory"))
    ls, calls = memory.ls, []

    def cut(self, path, detail=True, **kwargs):
        calls.append(path)
        if len(calls) == 1:
            return []
        if again == "is reset":
            raise ConnectionResetError("the connection was reset")
        return ls(self, path, detail, **kwargs)

    monkeypatch.setattr(memory, "ls", cut)
    if again == "answers":
        assert find_checkpoint(address).step == find_checkpoint(tiny_checkpoint).step
    else:
        with pytest.raises(UserError, match="(?s)did not answer.*was reset.*connection"):
            find_checkpoint(address)
    assert len(calls) > 1


def test_a_damaged_remote_file_is_told_by_its_address(tiny_checkpoint, tmp_path, upload):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    file = tmp_path / "jax" / "checkpoint_7" / "target.token_embedder.embedding" / "0.0"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    address = upload(tmp_path / "jax", "model")
    with pytest.raises(UserError, match=f"(?s)CRC-32 differs.*{address}/checkpoint_7/target.token"):
        convert(address, tmp_path / "out", "mtf")
    assert not (tmp_path / "out").exists()


def test_a_remote_source_that_is_written_to_meanwhile_is_told(
    tiny_checkpoint, tmp_path, upload, monkeypatch
):
    address = upload(tiny_checkpoint, "model")
    read_into = storage.read_into

    def read_while_another_writes(path, start, array):
        data = "model.ckpt-7.data-00000-of-00001"
        upload(tiny_checkpoint / data, f"model/{data}")
        return read_into(path, start, array)

    monkeypatch.setattr(storage, "read_into", read_while_another_writes)
    with pytest.raises(UserError, match="was written to while it was read"):
        convert(address, tmp_path / "out", "mtf")


def test_an_address_that_nothing_here_opens_is_told(tmp_path):
    with pytest.raises(UserError, match="Addresses that begin with nowhere:// cannot be opened"):
        convert("nowhere://bucket/model", tmp_path / "out", "mtf")


@pytest.mark.parametrize("method", ["info", "ls", "cat_file"])
def test_a_store_that_does_not_answer_is_told_and_taken_for_no_missing_file(
    tiny_checkpoint, tmp_path, upload, monkeypatch, method
):
    import fsspec

    address = upload(tiny_checkpoint, "model")

    def reset(*args, **kwargs):
        raise ConnectionResetError("the connection was reset")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), method, reset)
    with pytest.raises(UserError, match="(?s)did not answer.*was reset.*memory://.*connection"):
        convert(address, tmp_path / "out", "mtf")
