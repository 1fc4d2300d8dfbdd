from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest

from t0repro.converters import mtf
from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.errors import UserError
from t0repro.storage.locks import LOCK_FILE

from .checkpoint_files import assert_same_bits, read_variables


@pytest.mark.parametrize("to", ["mtf", "jax"])
def test_the_manifest_describes_every_tensor_of_the_target(tiny_checkpoint, tmp_path, to):
    convert(tiny_checkpoint, tmp_path / "out", to)
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert manifest["source"]["format"] == "mtf"
    assert manifest["source"]["path"] == str(tiny_checkpoint / "model.ckpt-7")
    assert manifest["target"] == {"format": to, "step": 7}
    assert manifest["versions"]["numpy"] == np.__version__
    if to == "mtf":
        tensors = read_variables(tmp_path / "out")
        assert manifest["tensors"].keys() == tensors.keys()
    else:
        from t0repro.training.checkpoints import load_tree

        tensors = load_tree(tmp_path / "out" / "checkpoint_7")
        assert manifest["tensors"].keys() <= tensors.keys()
    for name, entry in manifest["tensors"].items():
        array = tensors[name]
        assert entry["shape"] == list(array.shape)
        assert entry["dtype"] == array.dtype.name
        assert entry["sha256"] == hashlib.sha256(array.tobytes()).hexdigest()


def test_a_dry_run_reports_the_same_and_writes_nothing(tiny_checkpoint, tmp_path):
    dry = convert(tiny_checkpoint, tmp_path / "out", "jax", dry_run=True)
    assert not (tmp_path / "out").exists()
    wet = convert(tiny_checkpoint, tmp_path / "out", "jax")
    assert dry.dry_run
    assert not wet.dry_run
    assert (dry.target, dry.tensors, dry.bytes) == (wet.target, wet.tensors, wet.bytes)


@pytest.mark.parametrize("to", ["mtf", "jax"])
def test_a_destination_that_is_there_is_an_error_without_force(tiny_checkpoint, tmp_path, to):
    convert(tiny_checkpoint, tmp_path / "out", to)
    with pytest.raises(UserError, match="already exists"):
        convert(tiny_checkpoint, tmp_path / "out", to)


def test_a_destination_that_is_a_link_to_nothing_is_told_and_nothing_left(
    tiny_checkpoint, tmp_path
):
    (tmp_path / "out").symlink_to("gone")
    before = sorted(tmp_path.iterdir())
    for force in (False, True):
        with pytest.raises(UserError, match="a link to gone, which is not there"):
            convert(tiny_checkpoint, tmp_path / "out", "jax", force=force)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("to", ["mtf", "jax"])
def test_force_replaces_the_checkpoint_and_keeps_other_files(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, to
):
    for seed in (0, 1):
        write_mesh_checkpoint(tmp_path / f"source_{seed}", mesh_variables(tiny_family, seed=seed))
    convert(tmp_path / "source_0", tmp_path / "out", to)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = sorted(os.listdir(tmp_path / "out"))
    convert(tmp_path / "source_1", tmp_path / "out", to, force=True)
    # The lock's file stays, as in every directory that a run has held.
    assert sorted(set(os.listdir(tmp_path / "out")) - {LOCK_FILE}) == before
    convert(tmp_path / "out", tmp_path / "back", "mtf")
    assert_same_bits(read_variables(tmp_path / "source_1"), read_variables(tmp_path / "back"))


def test_an_empty_directory_and_a_new_step_of_a_model_dir_are_written_to(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    (tmp_path / "out").mkdir()
    for step in (7, 9, 8):
        variables = mesh_variables(tiny_family, step=step)
        source = write_mesh_checkpoint(tmp_path / f"step_{step}", variables)
        convert(source, tmp_path / "out", "mtf", force=step != 7)
    assert mtf.mtf_steps(tmp_path / "out") == [7, 8, 9]
    assert find_checkpoint(tmp_path / "out").step == 9
