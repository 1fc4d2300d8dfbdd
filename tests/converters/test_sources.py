from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from t0repro.converters import mtf
from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint, list_checkpoints
from t0repro.converters.sources import load_any, open_checkpoint
from t0repro.errors import UserError
from t0repro.parameters import naming


@pytest.fixture
def mixed(tmp_path, tiny_family, mesh_variables, write_mesh_checkpoint):
    """A model_dir with Mesh TensorFlow's steps 3 and 7 and JAX's step 5."""
    directory = tmp_path / "mixed"
    for step in (3, 7):
        write_mesh_checkpoint(directory, mesh_variables(tiny_family, step=step))
    write_mesh_checkpoint(tmp_path / "five", mesh_variables(tiny_family, step=5))
    convert(tmp_path / "five", directory, "jax", force=True)
    return directory


def test_a_step_beside_a_path_that_names_another_is_to_be_left_out(mixed):
    with pytest.raises(UserError, match="The path names step 5, but step 8") as refused:
        find_checkpoint(mixed / "checkpoint_5", 8)
    assert refused.value.fix == "Leave the step out."
    with pytest.raises(UserError, match="The path names step 5, but step 7") as refused:
        find_checkpoint(mixed / "checkpoint_5", 7)
    assert refused.value.fix == f"Leave the step out, or give the folder, {mixed}."


def test_in_a_mixed_directory_the_higher_step_wins(mixed):
    assert (find_checkpoint(mixed).format, find_checkpoint(mixed).step) == ("mtf", 7)
    for file in mixed.glob("model.ckpt-7.*"):
        file.unlink()
    (mixed / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-3"\n')
    assert (find_checkpoint(mixed).format, find_checkpoint(mixed).step) == ("jax", 5)


def test_at_the_same_step_jax_wins(mixed):
    report = convert(mixed / "model.ckpt-7", mixed, "jax", force=True)
    assert f"{mixed}/model.ckpt-7, of the same step, stays" in " ".join(report.notes)
    assert find_checkpoint(mixed).path == str(mixed / "checkpoint_7")
    assert find_checkpoint(mixed, 7).format == "jax"


def test_all_checkpoints_are_listed_by_step(mixed):
    refs = list_checkpoints(mixed)
    assert [(ref.format, ref.step) for ref in refs] == [("mtf", 3), ("jax", 5), ("mtf", 7)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.ckpt-3", ("mtf", 3)),
        ("model.ckpt-3.index", ("mtf", 3)),
        ("checkpoint_5", ("jax", 5)),
        ("checkpoint_5/", ("jax", 5)),
    ],
)
def test_a_checkpoint_is_found_by_its_own_name(mixed, name, expected):
    ref = find_checkpoint(f"{mixed}/{name}")
    assert (ref.format, ref.step) == expected


def test_a_step_is_found_in_either_format(mixed):
    assert find_checkpoint(mixed, 3).path == str(mixed / "model.ckpt-3")
    assert find_checkpoint(mixed, 5).path == str(mixed / "checkpoint_5")


def test_the_state_file_decides_among_mesh_tensorflow_s_checkpoints(mixed):
    shutil.rmtree(mixed / "checkpoint_5")
    (mixed / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-3"\n')
    assert find_checkpoint(mixed).step == 3
    (mixed / "checkpoint").unlink()
    assert find_checkpoint(mixed).step == 7


def test_a_step_that_is_not_there_is_told_with_those_that_are(mixed):
    with pytest.raises(UserError, match="no checkpoint of step 4; it has steps 3, 5, 7") as caught:
        find_checkpoint(mixed, 4)
    assert str(caught.value.fix).startswith("Choose one of these")


def test_a_state_file_that_names_what_is_gone_is_told(mixed):
    (mixed / "model.ckpt-7.index").unlink()
    with pytest.raises(UserError, match=r"model\.ckpt-7 that this file names is not there"):
        find_checkpoint(mixed)


def test_a_state_file_that_names_nothing_is_told(mixed):
    (mixed / "checkpoint").write_text("model_checkpoint_pa")
    with pytest.raises(UserError, match=rf"(?s)names none.*{mixed}/checkpoint"):
        find_checkpoint(mixed)


@pytest.mark.parametrize("is_left", [True, False])
def test_a_copied_directory_is_read_itself_whatever_path_its_state_file_has(mixed, is_left):
    (mixed / "checkpoint").write_text(f'model_checkpoint_path: "{mixed}/model.ckpt-7"\n')
    mtf.check_state_file(mixed)  # this directory's own path, as tf.train.Saver writes it
    copy = mixed.with_name("copy")
    shutil.copytree(mixed, copy)
    if not is_left:
        shutil.rmtree(mixed)
    assert find_checkpoint(copy).path == f"{copy}/model.ckpt-7"
    # TensorFlow would read the other directory, or start again.
    with pytest.raises(UserError, match=rf"(?s){mixed}/model.ckpt-7, outside its.*{copy}/checkp"):
        mtf.check_state_file(copy)
    for file in copy.glob("model.ckpt-7.*"):
        file.unlink()
    with pytest.raises(UserError, match=rf"{mixed}/model\.ckpt-7 that this file names is not"):
        find_checkpoint(copy)


def test_a_file_is_no_checkpoint_and_an_absent_one_is_told_with_the_steps_there(mixed):
    (mixed / "notes.txt").write_text("text")
    with pytest.raises(UserError, match="This file is not a checkpoint"):
        find_checkpoint(mixed / "notes.txt")
    for name in ("checkpoint_4", "model.ckpt-4", "model.ckpt-4.index"):
        with pytest.raises(UserError, match="not found; its directory has steps 3, 5, 7"):
            find_checkpoint(mixed / name)


@pytest.mark.parametrize("path", ["bigscience/T0_3B", "t0_3b", "T0-3B"])
def test_a_released_checkpoints_name_is_told_how_to_get_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="checkpoint fetch bigscience/T0_3B --to DIR"):
        find_checkpoint(path)
    with pytest.raises(UserError, match="There is no such file or folder"):
        find_checkpoint(f"runs/{path}")


def test_a_folder_of_runs_is_told_where_the_checkpoints_are(mixed, tmp_path):
    shutil.copytree(mixed, tmp_path / "run" / "model")
    with pytest.raises(UserError, match=f"There are some in {tmp_path}/run/model\\."):
        find_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("below", ["checkpoint-500", "snapshots/abc", "0_Transformer"])
def test_a_folder_of_transformers_models_is_told_where_they_are(tmp_path, below):
    (tmp_path / below).mkdir(parents=True)
    (tmp_path / below / "model.safetensors").touch()
    with pytest.raises(UserError, match=f"There are some in {tmp_path}/{below}\\."):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-00001-of-00002.safetensors", "model.safetensors.index.json, which lists them"),
        ("model.fp16-00001-of-00002.safetensors", "which lists them(.|\n)*give it that name"),
        ("model-00001-of-00002.fp16.safetensors", "which lists them(.|\n)*give it that name"),
        ("model.safetensors.incomplete", "did not finish(.|\n)*Download it again"),
        ("t5.tar.gz", "an archive(.|\n)*Unpack it"),
        ("pytorch_model.bin.index.json", "index.json, but no weights"),
        ("latest_checkpointed_iteration.txt", "Megatron"),
        ("saved_model.pb", "SavedModel(.|\n)*exported from"),
        ("model.bin", "not read"),
        ("onnx", "not read"),
        ("config.json", "config.json, but no weights(.|\n)*Copy model.safetensors"),
        ("model.fp16.safetensors", "is not named model.safetensors(.|\n)*Rename it"),
        ("global_step100", "DeepSpeed(.|\n)*zero_to_fp32.py"),
        ("__0_0.distcp", "FSDP(.|\n)*accelerate merge-weights"),
        ("target.encoder.encoder_norm.scale", "not named checkpoint_<step>"),
    ],
)
def test_other_layouts_are_named_with_the_way_out(tmp_path, name, words):
    (tmp_path / name).touch()
    (tmp_path / "optimizer.pt").touch()
    with pytest.raises(UserError, match=words):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("model.ckpt-7.data-00000-of-00001", "Give its prefix: {}/model.ckpt-7."),
        ("model.ckpt-7.meta", "Give its prefix: {}/model.ckpt-7."),
        ("checkpoint", "Give its directory: {}."),
    ],
)
def test_a_file_of_mesh_tensorflow_s_leads_to_its_checkpoint(tiny_checkpoint, name, fix):
    folder = Path(tiny_checkpoint)
    (folder / "model.ckpt-7.meta").touch()
    with pytest.raises(UserError, match="a file of a checkpoint of the format mtf") as caught:
        find_checkpoint(folder / name)
    assert caught.value.fix == fix.format(folder)


def test_a_link_to_weights_that_are_gone_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(UserError, match="is a link to a file that is not there"):
        find_checkpoint(tmp_path)


def test_the_hub_s_page_of_a_released_checkpoint_is_told_how_to_get_it():
    with pytest.raises(UserError, match="checkpoint fetch google/flan-t5-small --to DIR"):
        find_checkpoint("https://huggingface.co/google/flan-t5-small")


def test_the_folders_of_orbax_s_checkpoint_manager_are_read(mixed, tmp_path):
    """It names folders by the step alone, and the item in them "default"."""
    source = find_checkpoint(mixed, source="jax")
    shutil.copytree(source.path, tmp_path / "run" / "12" / "default")
    for path in ("12", "12/default"):
        ref = find_checkpoint(tmp_path / "run" / path)
        assert open_checkpoint(ref).tensors == open_checkpoint(source).tensors
    with pytest.raises(UserError, match=f"There are some in {tmp_path}/run/12\\."):
        find_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("path", ["", "checkpoint_3"])
def test_t5x_s_arrays_without_the_file_that_lists_them_are_told(tmp_path, path):
    (tmp_path / "checkpoint_3" / "target.encoder.encoder_norm.scale").mkdir(parents=True)
    with pytest.raises(UserError, match="not the file that lists them: checkpoint"):
        find_checkpoint(tmp_path / path)


def test_an_empty_directory_and_a_wrong_path_are_told_with_what_to_give(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=r"model\.ckpt-<step>\.index or checkpoint_<step>/"):
            find_checkpoint(path)


def test_a_folder_of_another_kind_is_called_what_it_is(tmp_path):
    (tmp_path / "run_state.json").write_text("{}")
    with pytest.raises(UserError, match="run has begun here, and has saved no checkpoint yet"):
        find_checkpoint(tmp_path)
    report = {"provenance": {"checkpoint": "runs/model/checkpoint_7"}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match="It is an evaluation, of runs/model/checkpoint_7"):
        find_checkpoint(tmp_path)


def test_a_step_must_be_a_number(mixed):
    with pytest.raises(UserError, match="The step is '7', not a whole number"):
        find_checkpoint(mixed, "7")
    assert find_checkpoint(mixed, np.int64(7)).step == 7


def test_a_misspelled_path_is_answered_with_the_names_beside_it(mixed):
    wrong = str(mixed.parent / f"{mixed.name[:-1]}_")
    with pytest.raises(UserError, match="no such file or folder") as error:
        find_checkpoint(wrong)
    assert error.value.fix.endswith(f" Nearest: {mixed}.")
    with pytest.raises(UserError, match=f"or folder. There are checkpoints in {mixed}"):
        find_checkpoint(str(mixed / "pytorch_model.bin"))


def test_load_any_gives_the_same_tree_from_both_formats(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    from_mtf, from_jax = load_any(tiny_checkpoint), load_any(tmp_path / "jax")
    assert from_mtf.keys() == from_jax.keys()
    for key, array in from_mtf.items():
        assert array.dtype == from_jax[key].dtype
        assert array.shape == from_jax[key].shape
        assert array.tobytes() == from_jax[key].tobytes()


def test_load_any_gives_t5x_s_tree_with_dummies_for_slots_that_are_not_used(tiny_checkpoint):
    tree = load_any(tiny_checkpoint)
    query = "encoder/layers_0/attention/query/kernel"
    assert tree[naming.STEP] == 7
    assert tree[naming.STEP].dtype == np.int32
    shapes = {slot: tree[naming.slot_key(query, slot)].shape for slot in naming.ADAFACTOR_SLOTS}
    assert shapes == {"v_row": (128,), "v_col": (128,), "v": (1,), "m": (1,)}
    norm = "encoder/encoder_norm/scale"
    shapes = {slot: tree[naming.slot_key(norm, slot)].shape for slot in naming.ADAFACTOR_SLOTS}
    assert shapes == {"v_row": (1,), "v_col": (1,), "v": (128,), "m": (1,)}


def test_load_any_can_leave_the_slots_out(tiny_checkpoint, tiny_family):
    tree = load_any(tiny_checkpoint, slots=False)
    assert len(tree) == len(tiny_family.parameters()) + 1
