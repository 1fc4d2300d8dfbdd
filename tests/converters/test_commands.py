from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from t0repro.cli import checkpoint, convert
from t0repro.errors import UserError

from ..helpers.own_lines import foreign_lines
from . import tensorflow_tables


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("convert")(convert.convert)
    app.command("inspect")(checkpoint.inspect)
    app.command("diff")(checkpoint.diff)
    app.command("verify")(checkpoint.verify)

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


def test_convert_says_what_it_wrote(run, tiny_checkpoint, tmp_path):
    result = run("convert", tiny_checkpoint, tmp_path / "out", "--to", "jax")
    assert result.exit_code == 0 and foreign_lines(result.stderr) == []
    assert f"Wrote {tmp_path}/out/checkpoint_7: T5 1.1, step 7" in result.output
    assert (tmp_path / "out" / "checkpoint_7").is_dir()


def test_a_dry_run_says_that_it_would(run, tiny_checkpoint, tmp_path):
    result = run("convert", tiny_checkpoint, tmp_path / "out", "--to", "jax", "--dry-run")
    assert result.stdout.startswith("Would write")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--to", "onnx"], ["--to", "mtf", "--mtf-norm-names", "norm"]])
def test_a_wrong_flag_is_refused_before_anything_is_written(run, tiny_checkpoint, tmp_path, flags):
    result = run("convert", tiny_checkpoint, tmp_path / "out", *flags)
    assert result.exit_code == 2
    assert flags[-1] in result.output
    assert not (tmp_path / "out").exists()


def test_a_files_name_is_no_folder_to_convert_to(run, tiny_checkpoint, tmp_path):
    result = run("convert", tiny_checkpoint, tmp_path / "m.safetensors", "--to", "hf")
    assert isinstance(result.exception, UserError)
    assert result.exception.fix == f"Name a folder, such as {tmp_path}/m."
    assert not list(tmp_path.glob("m*"))


def test_inspect_prints_names_shapes_types_norms_and_the_model(
    run, tiny_checkpoint, tiny_family, mesh_variables
):
    result = run("inspect", tiny_checkpoint)
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    name = "decoder/block_001/layer_001/EncDecAttention/q"
    norm = np.linalg.norm(mesh_variables(tiny_family)[name].astype(np.float64))
    assert [name, "128x128", "float32", f"{norm:.6g}"] in rows
    assert ["global_step", "scalar", "int64", "7"] in rows
    assert (
        "T5 1.1: 1+2 layers, d_model 128, d_ff 16, 2 heads of 64, vocabulary 128" in result.output
    )


def test_inspect_as_json_has_every_tensor(run, tiny_checkpoint, mesh_variables, tiny_family):
    result = run("inspect", tiny_checkpoint, "--json")
    inspection = json.loads(result.output)
    assert inspection["step"] == 7
    assert inspection["slots"] is True
    assert inspection["family"]["d_model"] == 128
    assert {item["name"] for item in inspection["tensors"]} == set(mesh_variables(tiny_family))


def test_diff_of_equal_checkpoints_says_so_and_exits_with_0(run, tiny_checkpoint, tmp_path):
    run("convert", tiny_checkpoint, tmp_path / "out", "--to", "jax")
    result = run("diff", tiny_checkpoint, tmp_path / "out")
    assert result.exit_code == 0
    assert "tensors are equal, bit for bit." in result.output


def test_diff_of_different_checkpoints_lists_them_and_exits_with_1(
    run, tiny_checkpoint, tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    variables["encoder/rms_norm/scale"] = variables["encoder/rms_norm/scale"] + np.float32(0.5)
    write_mesh_checkpoint(tmp_path / "other", variables)
    result = run("diff", tiny_checkpoint, tmp_path / "other")
    assert result.exit_code == 1
    assert "target/encoder/encoder_norm/scale  values      0.5" in result.output
    assert f"1 of {len(variables) - 1} tensors differ" in result.output
    assert run("diff", tiny_checkpoint, tmp_path / "other", "--tol", "0.51").exit_code == 0
    result = run("diff", tiny_checkpoint, tmp_path / "other", "--json")
    (difference,) = json.loads(result.stdout)["differences"]
    assert result.exit_code == 1 and difference["max"] == pytest.approx(0.5)


@pytest.mark.parametrize("to", ["mtf", "t5x", "jax", "hf"])
def test_every_format_can_be_inspected_compared_and_verified(run, tiny_checkpoint, tmp_path, to):
    flags = ["--layout", "orbax"] if to == "t5x" else []
    run("convert", tiny_checkpoint, tmp_path / "out", "--to", to, *flags)
    inspection = json.loads(run("inspect", tmp_path / "out", "--json").output)
    assert inspection["checkpoint"]["format"] == to
    assert inspection["name"] == "T5 1.1"
    assert inspection["slots"] is True
    difference = run("diff", tiny_checkpoint, tmp_path / "out")
    assert (difference.exit_code, "bit for bit" in difference.output) == (0, True)
    verification = run("verify", tmp_path / "out")
    assert verification.exit_code == 0
    assert verification.output.endswith("No problem.\n")
    found = json.loads(run("verify", tmp_path / "out", "--json").stdout)
    assert found["problems"] == []
    assert found["tensors"] == len(inspection["tensors"]) - 1  # the step


def test_verify_exits_with_1_when_a_value_is_no_number(
    run, tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    variables["encoder/rms_norm/scale"][0] = np.nan
    result = run("verify", write_mesh_checkpoint(tmp_path / "source", variables))
    assert result.exit_code == 1
    assert "Problem: encoder/rms_norm/scale has 1 values that are NaN" in result.output


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_verify_exits_with_1_when_a_file_is_missing_or_damaged(
    run, tiny_checkpoint, tmp_path, damage
):
    run("convert", tiny_checkpoint, tmp_path / "out", "--to", "jax")
    file = tmp_path / "out" / "checkpoint_7" / "target.token_embedder.embedding" / "0.0"
    content = file.read_bytes()
    file.unlink()
    if damage == "damaged":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = run("verify", tmp_path / "out")
    assert result.exit_code == 1
    (problem,) = re.findall(r"^Problem: .*\n  where: .*", result.stdout, re.MULTILINE)
    assert damage in problem and str(file) in problem
    again = run("verify", tmp_path / "out", "--json")
    assert again.exit_code == 1 and damage in json.loads(again.stdout)["problems"][0]


def test_verify_refuses_a_path_without_a_checkpoint(run, tmp_path):
    result = run("verify", tmp_path / "misspelled")
    assert isinstance(result.exception, UserError)
    assert "There is no such file or folder." in str(result.exception)


def test_convert_says_what_it_changed(run, tiny_checkpoint, tmp_path):
    result = run("convert", tiny_checkpoint, tmp_path / "out", "--to", "hf", "--dtype", "bfloat16")
    assert "rounded to bfloat16" in result.output
    assert "slots; they are in optimizer_slots.safetensors" in result.output
    assert "--vocab FILE" in result.output


def test_a_format_to_read_that_is_not_there_is_told(run, tiny_checkpoint, tmp_path):
    result = run("convert", tiny_checkpoint, tmp_path / "out", "--to", "hf", "--from", "jax")
    assert isinstance(result.exception, UserError)
    assert "no checkpoint of the format jax" in str(result.exception)


def test_every_command_takes_a_checkpoint_with_a_compressed_index(run, tiny_checkpoint, tmp_path):
    compressed = tmp_path / "compressed"
    shutil.copytree(tiny_checkpoint, compressed)
    tensorflow_tables.compress_index(compressed / "model.ckpt-7")
    assert run("diff", tiny_checkpoint, compressed).exit_code == 0
    inspected = [
        json.loads(run("inspect", path, "--json").output) for path in (compressed, tiny_checkpoint)
    ]
    assert inspected[0]["tensors"] == inspected[1]["tensors"]
    for to in ("jax", "mtf"):
        assert run("convert", compressed, tmp_path / to, "--to", to).exit_code == 0
        assert run("verify", tmp_path / to).exit_code == 0
        assert run("diff", tiny_checkpoint, tmp_path / to).exit_code == 0
    assert run("verify", compressed).exit_code == 0
