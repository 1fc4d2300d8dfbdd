"""T5X's own layouts: what is written T5X restores, and what T5X writes is read."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import serialization

from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.converters.t5x_msgpack import FlaxFile
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint

from .checkpoint_files import assert_same_bits, read_variables
from .older_t5x import write_by_older_t5x
from .t5x_reader import restore_as_t5x
from .t5x_writer import write_by_t5x_manager


@pytest.mark.parametrize("layout", ["legacy", "orbax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t5x_restores_what_is_written_in_either_layout(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path, layout, dtype
):
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(tiny_family, dtype=dtype))
    convert(source, tmp_path / "t5x", "t5x", layout=layout)
    assert_same_bits(load_any(source), restore_as_t5x(tmp_path / "t5x", 7))


def test_by_default_t5x_of_any_age_reads_what_is_written(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x")
    directory = tmp_path / "t5x" / "checkpoint_7"
    assert (directory / "checkpoint").is_file()
    # By these T5X takes a directory for one of Orbax's.
    assert not list(directory.rglob("*_METADATA"))


@pytest.mark.parametrize("layout", ["legacy", "orbax"])
def test_what_is_written_for_t5x_is_verified_by_the_manifest_and_goes_back(
    tiny_checkpoint, tmp_path, layout
):
    convert(tiny_checkpoint, tmp_path / "t5x", "t5x", layout=layout)
    verification = verify(tmp_path / "t5x")
    assert verification.problems == ()
    assert any("SHA-256 of" in check for check in verification.checks)
    convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "mtf"))


def test_only_t5x_has_layouts(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match="--layout"):
        convert(tiny_checkpoint, tmp_path / "out", "jax", layout="orbax")


@pytest.mark.parametrize("ocdbt", [True, False])
def test_t5x_s_orbax_checkpoint_is_read_slots_and_all(tiny_checkpoint, tmp_path, ocdbt):
    tree = load_any(tiny_checkpoint)
    directory = write_by_t5x_manager(tmp_path / "t5x", tree, ocdbt=ocdbt)
    for path in (tmp_path / "t5x", directory, directory / "state"):
        assert find_checkpoint(path).format == "t5x"
        assert_same_bits(tree, load_any(path))
    convert(tmp_path / "t5x", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "mtf"))


def test_an_item_that_was_copied_alone_is_read(tiny_checkpoint, tmp_path):
    tree = load_any(tiny_checkpoint)
    directory = write_by_t5x_manager(tmp_path / "t5x", tree)
    (directory / "state").rename(tmp_path / "alone")
    assert_same_bits(tree, load_any(tmp_path / "alone"))
    assert convert(tmp_path / "alone", tmp_path / "mtf", "mtf").source.step == 7


def test_t5x_s_place_in_its_data_is_named_and_left_out(tiny_checkpoint, tmp_path):
    directory = write_by_t5x_manager(tmp_path / "t5x", load_any(tiny_checkpoint), dataset=True)
    report = convert(directory, tmp_path / "mtf", "mtf")
    assert any("train_ds-000-of-001" in note for note in report.notes)
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "mtf"))


@pytest.mark.parametrize(
    "prefix",
    [
        "state/param_states/inner_states/all/0/trace/",
        "state/states/1/param_states/",
        "flax_mutables/running_means/",
    ],
)
def test_of_a_checkpoint_with_other_state_the_parameters_are_read(
    tiny_checkpoint, tmp_path, prefix
):
    tree = load_any(tiny_checkpoint, slots=False)
    slots = {key.replace("target/", prefix): tree[key] for key in tree if "kernel" in key}
    write_by_t5x_manager(tmp_path / "t5x", tree | slots)
    for read in (load_any, verify, lambda path: convert(path, tmp_path / "out", "mtf")):
        with pytest.raises(UserError, match="neither Adafactor nor Adam") as caught:
            read(tmp_path / "t5x")
        assert "--no_slots" in str(caught.value.fix)
    report = convert(tmp_path / "t5x", tmp_path / "out", "mtf", slots=False)
    assert any(prefix in note for note in report.notes)
    found = load_any(tmp_path / "out")
    for key in tree:
        np.testing.assert_array_equal(found[key], tree[key])
    open_checkpoint(str(tmp_path / "t5x"), None, "float32")  # to evaluate


def test_of_a_download_without_the_optimizer_s_state_the_parameters_are_read(
    tiny_checkpoint, tmp_path
):
    directory = tmp_path / "t5x" / "checkpoint_7"
    write_by_older_t5x(directory, load_any(tiny_checkpoint))
    lost, *others = directory.glob("state.*")
    for folder in others:
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="missing"):  # it is damaged
        load_any(tmp_path / "t5x", slots=False)
    shutil.rmtree(lost)
    for read in (load_any, verify, lambda path: convert(path, tmp_path / "out", "mtf")):
        with pytest.raises(UserError, match="names its optimizer's state") as caught:
            read(tmp_path / "t5x")
        assert "--no_slots" in str(caught.value.fix)
    report = convert(tmp_path / "t5x", tmp_path / "out", "mtf", slots=False)
    assert report.slots == "none"
    tree = load_any(tiny_checkpoint, slots=False)
    assert_same_bits(tree, load_any(tmp_path / "out"))
    assert_same_bits(tree, load_any(tmp_path / "t5x", slots=False))
    open_checkpoint(str(tmp_path / "t5x"), None, "float32")  # to evaluate


def test_orbax_s_msgpack_of_2023_with_placeholders_is_read(tiny_checkpoint, tmp_path):
    tree = load_any(tiny_checkpoint)
    directory = write_by_t5x_manager(tmp_path / "t5x", tree, ocdbt=False)
    nested: dict = {}
    for name, array in tree.items():
        *parents, leaf = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        inline = leaf in ("step", "m")  # what is not partitioned is in the file itself
        node[leaf] = array if inline else f"PLACEHOLDER://{name.replace('/', '.')}"
    (directory / "state" / "checkpoint").write_bytes(serialization.msgpack_serialize(nested))
    (directory / "state" / "_METADATA").unlink()
    assert_same_bits(tree, load_any(tmp_path / "t5x"))


# --- Lost chunks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["target.decoder.logits_dense.kernel", "*"])
def test_a_copy_without_the_files_that_begin_with_a_dot_is_named_so(
    tiny_checkpoint, tmp_path, name
):
    directory = tmp_path / "t5x" / "checkpoint_7"
    write_by_older_t5x(directory, load_any(tiny_checkpoint))
    for file in directory.glob(f"{name}/.zarray"):
        file.unlink()
    with pytest.raises(UserError, match=r"not the file that describes them, \.zarray") as caught:
        load_any(tmp_path / "t5x")
    assert "cp -r" in str(caught.value.fix)


@pytest.mark.parametrize("layout", ["legacy", "orbax"])
def test_a_chunk_that_is_gone_is_named_and_never_taken_for_zeros(tiny_checkpoint, tmp_path, layout):
    tree = load_any(tiny_checkpoint)
    if layout == "legacy":
        directory = tmp_path / "t5x" / "checkpoint_7"
        write_by_older_t5x(directory, tree)
        array = directory / "target.token_embedder.embedding"
    else:
        directory = write_by_t5x_manager(tmp_path / "t5x", tree, ocdbt=False)
        array = directory / "state" / "target.token_embedder.embedding"
    chunk = max(path for path in array.iterdir() if path.name[0].isdigit())
    chunk.unlink()
    pattern = f"(?s)chunk of target/token_embedder/embedding is missing.*{re.escape(str(chunk))}"
    with pytest.raises(UserError, match=pattern):
        convert(directory, tmp_path / "out", "mtf")
    with pytest.raises(UserError, match=pattern):
        verify(directory)


def test_verify_says_which_arrays_could_lose_chunks_unseen(tiny_checkpoint, tmp_path):
    directory = tmp_path / "t5x" / "checkpoint_7"
    write_by_older_t5x(directory, load_any(tiny_checkpoint), fill_value=0)
    verification = verify(directory)
    assert verification.problems == ()
    lost, flipped = verification.unchecked
    assert "fill value" in lost
    assert "flipped bits" in flipped
    assert "CRC" not in " ".join(verification.checks)


# --- Files that T5X wrote ------------------------------------------------------------------------

T5X_FILES = Path(
    os.environ.get("T5X_CHECKPOINTS") or Path(__file__).resolve().parents[3] / "shared" / "t5x-data"
)
written_by_t5x = pytest.mark.skipif(
    not T5X_FILES.is_dir(), reason=f"no checkpoints that T5X wrote: T5X_CHECKPOINTS or {T5X_FILES}"
)


@written_by_t5x
@pytest.mark.parametrize(
    ("directory", "state"),
    [
        ("ckpt/final_a_square_orbax", "state_final_a_square.npz"),
        ("ckpt/final_a_square_orbax/checkpoint_12/state", "state_final_a_square.npz"),
        ("ckpt/final_a_legacy", "state_final_a.npz"),
    ],
)
def test_every_value_of_a_checkpoint_that_t5x_wrote_is_read(directory, state):
    with np.load(T5X_FILES / state) as expected:
        assert_same_bits(dict(expected), load_any(T5X_FILES / directory))


@written_by_t5x
def test_a_scanned_tree_that_t5x_wrote_is_unstacked_and_stacked_to_the_same_bits():
    from t0repro.converters import jax_tree, t5x_msgpack
    from t0repro.converters.sources import check_checkpoint, open_checkpoint

    reader = open_checkpoint(find_checkpoint(T5X_FILES / "ckpt/scalable_legacy"))
    stored = t5x_msgpack.MsgpackArrays(reader.ref.path)
    outputs = list(jax_tree.jax_outputs(reader.tensors, check_checkpoint(reader), scan=True))
    assert {output.name for output in outputs} == set(stored.tensors)
    for output in outputs:
        array = output.build(reader.read(key) for key in output.keys)
        expected = stored.read(output.name)
        assert array.shape == expected.shape, output.name
        np.testing.assert_array_equal(array, expected, err_msg=output.name)


def test_a_msgpack_of_numbers_is_no_flax_model(tmp_path):
    file = tmp_path / "flax_model.msgpack"
    file.write_bytes(serialization.msgpack_serialize([1, 2]))
    with pytest.raises(UserError, match="it holds no tree of arrays"):
        FlaxFile(str(file))
