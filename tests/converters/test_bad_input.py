from __future__ import annotations

import errno
import os
import shutil

import numpy as np
import pytest

from t0repro.converters import mtf
from t0repro.converters.convert import convert
from t0repro.errors import UserError
from t0repro.storage import lock_folder

from .checkpoint_files import assert_same_bits, read_variables


def convert_changed(tmp_path, variables, write_mesh_checkpoint):
    """Converts a checkpoint of these variables and checks that nothing is written if that fails."""
    source = write_mesh_checkpoint(tmp_path / "changed", variables)
    try:
        return convert(source, tmp_path / "out", "jax")
    finally:
        assert not (tmp_path / "out").exists()


def test_an_unknown_variable_is_named_with_the_nearest(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    variables["encoder/block_000/layer_000/SelfAttention/kk"] = np.zeros((2, 2), np.float32)
    with pytest.raises(UserError) as caught:
        convert_changed(tmp_path, variables, write_mesh_checkpoint)
    assert "'encoder/block_000/layer_000/SelfAttention/kk'" in caught.value.what
    assert "nearest: 'encoder/block_000/layer_000/SelfAttention/k'" in caught.value.what


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decoder/block_001/layer_001/EncDecAttention/o", "missing: .*EncDecAttention/o"),
        ("decoder/logits/kernel_slot_vc", "slot is missing: decoder/logits/kernel_slot_v"),
        ("encoder/rms_norm/scale_slot_v", "slot is missing: encoder/rms_norm/scale_slot_v"),
        ("global_step", "missing: global_step"),
    ],
)
def test_a_missing_variable_is_named_as_mesh_tensorflow_does(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, name, message
):
    variables = mesh_variables(tiny_family)
    for missing in [name] if "_slot_" in name else [n for n in variables if n.startswith(name)]:
        del variables[missing]
    with pytest.raises(UserError, match=message):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


def test_a_slot_without_its_variable_is_named(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    del variables["encoder/block_000/layer_001/DenseReluDense/wo/kernel"]
    with pytest.raises(UserError, match="DenseReluDense/wo/kernel_slot_v"):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


def test_a_slot_of_another_shape_is_named(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    name = "encoder/block_000/layer_000/rms_norm/scale_slot_v"
    variables[name] = np.zeros(3, np.float32)
    with pytest.raises(UserError, match=rf"{name} has the shape \(3,\) where \(128,\)"):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


def test_a_variable_of_another_shape_is_named_with_both(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    name = "decoder/block_001/layer_002/DenseReluDense/wi_0/kernel"
    variables[name] = np.zeros((128, 17), np.float32)
    with pytest.raises(UserError, match=rf"{name} has the shape \(128, 17\).*\(128, 16\)"):
        convert_changed(tmp_path, variables, write_mesh_checkpoint)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_cut_data_file_is_named_and_nothing_written(tiny_checkpoint, tmp_path, damage):
    data = tiny_checkpoint / "model.ckpt-7.data-00000-of-00001"
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:-1])
    message = {"missing": "is missing", "cut": "damaged"}[damage]
    with pytest.raises(UserError, match=rf"(?s){message}.*{data}"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


def test_a_damaged_jax_checkpoint_is_told_and_nothing_written(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    largest = max(
        (p for p in (tmp_path / "jax" / "checkpoint_7").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(UserError):
        convert(tmp_path / "jax", tmp_path / "out", "mtf")
    assert not (tmp_path / "out").exists()


def test_an_index_with_another_magic_number_is_told(tiny_checkpoint, tmp_path):
    index = tiny_checkpoint / "model.ckpt-7.index"
    index.write_bytes(index.read_bytes()[:-8] + bytes(8))
    with pytest.raises(UserError, match=rf"(?s)does not end as an index file does.*{index}"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")


def test_a_source_that_is_written_to_meanwhile_is_told(tiny_checkpoint, tmp_path, monkeypatch):
    read = mtf.MtfReader.read

    def read_while_another_writes(self, key):
        data = tiny_checkpoint / "model.ckpt-7.data-00000-of-00001"
        os.utime(data, ns=(0, 0))
        return read(self, key)

    monkeypatch.setattr(mtf.MtfReader, "read", read_while_another_writes)
    with pytest.raises(UserError, match="was written to while it was read"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["model.ckpt-7.data-00000-of-00001.tempstate1", "checkpoint_9.orbax-checkpoint-tmp-1"]
)
def test_a_checkpoint_that_is_not_finished_is_told(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).mkdir()
    with pytest.raises(UserError, match="is being written, or its writing was interrupted"):
        convert(tmp_path / "model", tmp_path / "out", "jax")


def test_another_conversion_to_the_same_destination_is_told(tiny_checkpoint, tmp_path):
    with lock_folder(tmp_path / ".out.conversion", "converting a checkpoint"):
        with pytest.raises(UserError, match="Another run holds .* converting a checkpoint"):
            convert(tiny_checkpoint, tmp_path / "out", "jax")


def test_nothing_is_converted_into_a_directory_that_a_training_holds(tiny_checkpoint, tmp_path):
    with lock_folder(tmp_path / "model", "training"):
        with pytest.raises(UserError, match="Another run holds .* training"):
            convert(tiny_checkpoint, tmp_path / "model", "jax", force=True)
    assert not list((tmp_path / "model").glob("checkpoint_*"))
    convert(tiny_checkpoint, tmp_path / "model", "jax")  # its lock's files are not content


def test_no_space_left_in_the_middle_is_told_and_the_conversion_can_go_on(
    tiny_checkpoint, tmp_path, monkeypatch
):

    add, count = mtf.MtfWriter.add, 0

    def add_until_full(self, output, array):
        nonlocal count
        count += 1
        if count > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, output, array)

    with monkeypatch.context() as patch:
        patch.setattr(mtf.MtfWriter, "add", add_until_full)
        with pytest.raises(UserError, match="(?s)No space left.*continues where it stopped"):
            convert(tiny_checkpoint, tmp_path / "out", "mtf")
    assert convert(tiny_checkpoint, tmp_path / "out", "mtf").resumed == 10
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "out"))


def test_a_name_that_says_another_step_than_the_checkpoint_is_told(tiny_checkpoint, tmp_path):
    for file in list(tiny_checkpoint.glob("model.ckpt-7.*")):
        file.rename(file.with_name(file.name.replace("ckpt-7", "ckpt-8")))
    with pytest.raises(UserError, match="says step 8, but the checkpoint's own step is 7"):
        convert(tiny_checkpoint / "model.ckpt-8", tmp_path / "out", "jax")


def test_a_step_beyond_int32_is_refused(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    with pytest.raises(UserError, match="does not fit T5X's int32"):
        convert_changed(tmp_path, mesh_variables(tiny_family, step=2**31), write_mesh_checkpoint)


def test_too_little_free_space_is_told_before_the_first_byte(
    tiny_checkpoint, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"only .* free"):
        convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_is_told_with_those_that_there_are(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match="no format 'onnx'(.|\n)*one of mtf, t5x, jax, hf"):
        convert(tiny_checkpoint, tmp_path / "out", "onnx")


@pytest.mark.parametrize("to", ["t5x", "jax"])
@pytest.mark.parametrize("change", ["unknown", "missing"])
def test_unknown_and_missing_arrays_of_a_tree_are_named(tiny_checkpoint, tmp_path, to, change):
    item, choices = ("", {}) if to == "jax" else ("state", {"layout": "orbax"})
    convert(tiny_checkpoint, tmp_path / "model", to, slots=False, **choices)
    directory = tmp_path / "model" / "checkpoint_7" / item
    name = "target/encoder/layers_0/mlp/wi_1/kernel"
    other = name.replace("wi_1", "wi_l")
    for file in (directory / "integrity.json", tmp_path / "model" / "conversion.json"):
        file.unlink()  # they would tell before
    if change == "unknown":
        metadata = directory / "_METADATA"
        metadata.write_text(metadata.read_text().replace("wi_1", "wi_l"))
        for place in directory.glob("*.wi_1.*"):
            place.rename(place.with_name(place.name.replace("wi_1", "wi_l")))
        message = f"unknown variable.*'{other}' \\(nearest: '{name}'"
    else:
        shutil.rmtree(directory / name.replace("/", "."))
        message = rf"(?s)missing: {name}\. _METADATA names it.*{directory}/target\.enc"
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "model", tmp_path / "out", "mtf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["jax", "t5x", "hf"])
def test_no_space_left_is_told_and_gone_on_from_in_every_format(
    tiny_checkpoint, tmp_path, to, monkeypatch
):
    """The disk says so at the tenth tensor, when it is to be synced."""
    from t0repro.converters import staging

    describe, count = staging.describe, 0

    def describe_until_full(array):
        nonlocal count
        count += 1
        if count == 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return describe(array)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "describe", describe_until_full)
        with pytest.raises(UserError, match="(?s)No space left.*continues where it stopped"):
            convert(tiny_checkpoint, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    assert convert(tiny_checkpoint, tmp_path / "out", to).resumed == 9
    convert(tmp_path / "out", tmp_path / "back", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "back"))
