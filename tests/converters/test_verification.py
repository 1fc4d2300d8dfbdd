from __future__ import annotations

import json

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.safetensors_files import SafetensorsFile
from t0repro.converters.verification import verify
from t0repro.errors import UserError


@pytest.mark.parametrize("to", ["mtf", "jax", "t5x", "hf"])
def test_what_a_conversion_wrote_is_sound(tiny_checkpoint, tmp_path, to):
    convert(tiny_checkpoint, tmp_path / "out", to)
    verification = verify(tmp_path / "out")
    assert verification.problems == ()
    assert f"SHA-256 of {verification.tensors - (to == 'hf')} tensors" in verification.checks[-1]


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
