from __future__ import annotations

import json

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.safetensors_files import SafetensorsFile
from t0repro.converters.sources import load_any
from t0repro.errors import UserError

T5X = [{"layout": layout, "scan": scan} for layout in ("legacy", "orbax") for scan in (False, True)]


@pytest.mark.parametrize(
    ("to", "options"), [("mtf", {}), ("jax", {}), ("hf", {}), *(("t5x", each) for each in T5X)]
)
def test_every_tensor_that_a_conversion_wrote_is_compared(tiny_checkpoint, tmp_path, to, options):
    convert(tiny_checkpoint, tmp_path / "out", to, **options)
    verification = verify(tmp_path / "out")
    assert verification.problems == verification.unchecked == ()
    written = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]
    assert len(written) >= (verification.tensors - (to == "hf") if not options.get("scan") else 40)
    hashed = len(written.keys() - {"global_step", "state/step", "step"})
    assert f"SHA-256 of {hashed} tensors" in verification.checks[-1]


@pytest.mark.parametrize("layout", ["legacy", "orbax"])
def test_a_stacked_array_that_the_conversion_did_not_write_so_is_named(
    tiny_checkpoint, tmp_path, layout
):
    convert(tiny_checkpoint, tmp_path / "out", "t5x", layout=layout, scan=True)
    record = tmp_path / "out" / "conversion.json"
    content = json.loads(record.read_text())
    name = "target/encoder/encoder/mlp/wo/kernel"
    content["tensors"][name]["sha256"] = "0" * 64
    record.write_text(json.dumps(content))
    (problem,) = verify(tmp_path / "out").problems
    assert problem == f"{name} is not what the conversion wrote (its SHA-256 differs)."


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_named(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, value
):
    variables = mesh_variables(tiny_family)
    variables["decoder/logits/kernel"][3, :2] = value
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    assert verify(source).problems == (
        "decoder/logits/kernel has 2 values that are NaN or infinite.",
    )


def test_a_tensor_that_the_conversion_did_not_write_so_is_named(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    path = tmp_path / "hf" / "model.safetensors"
    name = "encoder.final_layer_norm.weight"
    value = SafetensorsFile(str(path)).read(name).tobytes()
    path.write_bytes(path.read_bytes().replace(value, value[:-1] + bytes([value[-1] ^ 1])))
    (problem,) = verify(tmp_path / "hf").problems
    assert problem == f"{name} is not what the conversion wrote (its SHA-256 differs)."


@pytest.mark.parametrize("to", ["mtf", "jax", "t5x"])
def test_a_changed_byte_is_told_by_the_format_s_own_checksum(tiny_checkpoint, tmp_path, to):
    convert(tiny_checkpoint, tmp_path / "out", to)
    (tmp_path / "out" / "conversion.json").unlink()
    if to == "mtf":
        file = tmp_path / "out" / "model.ckpt-7.data-00000-of-00001"
    else:
        file = tmp_path / "out" / "checkpoint_7" / "target.token_embedder.embedding" / "0.0"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"(?s)damaged.*{file}"):
        verify(tmp_path / "out")


def test_a_missing_file_is_told(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "out", "jax")
    file = tmp_path / "out" / "checkpoint_7" / "target.token_embedder.embedding" / "0.0"
    file.unlink()
    with pytest.raises(UserError, match=rf"(?s)missing.*{file}"):
        verify(tmp_path / "out")


def test_a_manifest_of_another_step_is_not_held_against_a_checkpoint(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "out", "mtf")
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    manifest["target"]["step"] = 8
    (tmp_path / "out" / "conversion.json").write_text(json.dumps(manifest))
    assert not any("SHA-256" in check for check in verify(tmp_path / "out").checks)


# --- The manifest, compared by whoever reads ------------------------------------------------------


@pytest.fixture
def hugging_face(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    return tmp_path / "hf"


def test_a_flipped_bit_of_a_hugging_face_model_is_seen_by_convert_as_by_verify(
    hugging_face, tmp_path
):
    file = hugging_face / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="not what the conversion wrote"):
        convert(hugging_face, tmp_path / "mtf", "mtf")
    with pytest.raises(UserError, match="not what the conversion wrote"):
        load_any(hugging_face)
    (problem,) = verify(hugging_face).problems
    assert "SHA-256 differs" in problem


def test_slots_that_were_deleted_are_missed(hugging_face, tmp_path):
    (hugging_face / "optimizer_slots.safetensors").unlink()
    with pytest.raises(UserError, match=r"(?s)tensors .* gone.*optimizer_slots.safetensors"):
        convert(hugging_face, tmp_path / "mtf", "mtf")


@pytest.mark.parametrize("kept", [0, 40, 400])
def test_a_cut_record_of_a_conversion_is_no_step_0(hugging_face, tmp_path, kept):
    record = hugging_face / "conversion.json"
    record.write_bytes(record.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"(?s)record is damaged.*conversion\.json"):
        convert(hugging_face, tmp_path / "mtf", "mtf")


def test_a_cut_record_is_told_for_every_format_that_needs_it(tiny_checkpoint, tmp_path):
    for to in ("jax", "t5x"):
        convert(tiny_checkpoint, tmp_path / to, to)
        record = tmp_path / to / "conversion.json"
        record.write_text(record.read_text()[:100])
        with pytest.raises(UserError, match="record is damaged"):
            convert(tmp_path / to, tmp_path / "mtf", "mtf")


def test_a_model_without_a_record_is_verified_and_what_could_not_be_is_said(hugging_face):
    for name in ("conversion.json", "optimizer_slots.safetensors"):
        (hugging_face / name).unlink()
    verification = verify(hugging_face)
    assert verification.problems == ()
    assert any("no checksums" in gap for gap in verification.unchecked)
