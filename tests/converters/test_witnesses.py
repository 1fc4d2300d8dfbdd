"""A checkpoint that was copied in part is never mistaken for another model: some file tells."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import flax.traverse_util
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import serialization

from t0repro.converters import hf
from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.evaluation.opened import open_checkpoint
from t0repro.parameters.shape import ModelShape
from t0repro.training.checkpoints import load_tree

from .checkpoint_files import assert_same_bits
from .older_t5x import write_by_older_t5x

FAMILY = ModelShape(1, 3, 8, 12, 2, 4, 16, 4, ("wi_0", "wi_1"), False)
DECODER_ONLY = ModelShape(0, 3, 8, 12, 2, 4, 16, 4, ("wi",), False)
LOGITS = "target/decoder/logits_dense/kernel"
NORM_SLOT = "state/param_states/encoder/encoder_norm/scale/v"


@pytest.fixture
def source(mesh_variables, write_mesh_checkpoint, tmp_path) -> Path:
    return write_mesh_checkpoint(tmp_path / "source", mesh_variables(FAMILY))


def write_orbax(directory: Path, tree: dict[str, np.ndarray], *, ocdbt: bool, zarr3: bool) -> None:
    """What any program that uses Orbax leaves."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, flax.traverse_util.unflatten_dict(tree, sep="/"))


def lose(directory: Path, name: str) -> None:
    """Removes an array, or a chunk of it, from files or from a store."""
    if (directory / "manifest.ocdbt").is_file():
        base = {"driver": "file", "path": f"{directory}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        store.delete_range(ts.KvStore.KeyRange(name, name + "0")).result()
    else:
        array = directory / name
        shutil.rmtree(array) if array.is_dir() else array.unlink()


# --- Orbax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_an_array_or_a_chunk_that_orbax_s_metadata_calls_for_is_missed(
    source, tmp_path, ocdbt, zarr3
):
    tree = load_any(source)
    write_orbax(tmp_path / "model" / "checkpoint_7", tree, ocdbt=ocdbt, zarr3=zarr3)
    assert_same_bits(tree, load_any(tmp_path / "model"))
    assert not any("missing chunks" in gap for gap in verify(tmp_path / "model").unchecked)
    for number, name in enumerate((LOGITS, NORM_SLOT)):
        copy = shutil.copytree(tmp_path / "model", tmp_path / f"copy{number}")
        lose(copy / "checkpoint_7", name.replace("/", "."))
        pattern = f"(?s)1 array is missing: {name}. _METADATA names it.*{copy}.*_METADATA"
        for read in (load_any, verify, lambda path: load_tree(path / "checkpoint_7")):
            with pytest.raises(UserError, match=pattern):
                read(copy)
    copy = shutil.copytree(tmp_path / "model", tmp_path / "chunk")
    chunk = f"{LOGITS.replace('/', '.')}/{'c/0/0' if zarr3 else '0.0'}"
    lose(copy / "checkpoint_7", chunk)
    for read in (load_any, lambda path: load_tree(path / "checkpoint_7")):
        with pytest.raises(UserError, match=f"(?s)A chunk of {LOGITS} is missing.*{chunk}"):
            read(copy)


@pytest.mark.parametrize("layout", [{}, {"layout": "orbax"}, {"scan": True, "layout": "orbax"}])
def test_a_t5_1_1_that_lost_its_logits_is_not_scored_as_a_tied_one(source, tmp_path, layout):
    convert(source, tmp_path / "model", "t5x" if layout else "jax", **layout)
    (tmp_path / "model" / "conversion.json").unlink()
    directory = tmp_path / "model" / "checkpoint_7" / ("state" if layout else "")
    (directory / "integrity.json").unlink()
    shutil.rmtree(directory / "target.decoder.logits_dense.kernel")
    for read in (verify, load_any, lambda path: convert(path, tmp_path / "out", "hf")):
        with pytest.raises(UserError, match=f"missing: {LOGITS}. _METADATA names it"):
            read(tmp_path / "model")
    with pytest.raises(UserError, match=f"missing: {LOGITS}"):
        open_checkpoint(str(tmp_path / "model"), None, "float32")


@pytest.mark.parametrize("family", [FAMILY, DECODER_ONLY], ids=["whole", "decoder only"])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_that_is_gone_makes_no_shallower_model(
    mesh_variables, write_mesh_checkpoint, tmp_path, family, layer
):
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    (source / "operative_config.gin").write_text("Unitransformer.input_full_attention = False\n")
    convert(source, tmp_path / "model", "jax")
    (tmp_path / "model" / "checkpoint_7" / "integrity.json").unlink()
    for name in ("_METADATA", "conversion.json"):
        for array in (tmp_path / "model" / "checkpoint_7").glob(f"*decoder.layers_{layer}.*"):
            shutil.rmtree(array)
        with pytest.raises(UserError, match=rf"arrays are missing: .*layers_{layer}/.* {name} nam"):
            load_any(tmp_path / "model")
        # The next witness is left alone.
        metadata = tmp_path / "model" / "checkpoint_7" / "_METADATA"
        content = json.loads(metadata.read_text())
        tree = content["tree_metadata"]
        content["tree_metadata"] = {k: v for k, v in tree.items() if f"layers_{layer}" not in k}
        metadata.write_text(json.dumps(content))


@pytest.mark.parametrize("array", ["target.decoder.logits_dense.kernel", NORM_SLOT])
def test_an_array_without_its_description_does_not_vanish(source, tmp_path, array):
    convert(source, tmp_path / "model", "jax")
    for name in ("conversion.json", "checkpoint_7/integrity.json"):
        (tmp_path / "model" / name).unlink()
    array = array.replace("/", ".")
    (tmp_path / "model" / "checkpoint_7" / array / ".zarray").unlink()
    with pytest.raises(UserError, match=f"The chunks of {array} are there, but not .*, .zarray"):
        load_any(tmp_path / "model")


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
def test_a_directory_without_its_own_first_file_is_refused(source, tmp_path, name):
    write_orbax(tmp_path / "checkpoint_7", load_any(source), ocdbt=True, zarr3=False)
    (tmp_path / "checkpoint_7" / name).unlink()
    with pytest.raises(UserError, match=rf"(?s)file of the checkpoint is missing.*{name}"):
        load_any(tmp_path / "checkpoint_7")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compressor", None),
        ("chunks", None),
        ("chunks", [32, 16]),
        ("chunks", [0, 16]),
        ("chunks", [8]),
        ("shape", [16, 16]),
        ("shape", [4, 16]),
        ("dtype", ">f4"),
        ("dtype", "<i4"),
        ("order", "F"),
        ("dimension_separator", "/"),
    ],
)
def test_a_description_that_no_writer_makes_is_refused_by_its_file(source, tmp_path, field, value):
    convert(source, tmp_path / "model", "jax")
    (tmp_path / "model" / "conversion.json").unlink()
    (tmp_path / "model" / "checkpoint_7" / "integrity.json").unlink()
    array = tmp_path / "model" / "checkpoint_7" / "target.decoder.logits_dense.kernel"
    content = json.loads((array / ".zarray").read_text())
    content = (
        content | {field: value} if value else {k: v for k, v in content.items() if k != field}
    )
    (array / ".zarray").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{array}|{LOGITS}"):
        load_any(tmp_path / "model")


# --- T5X's index ---------------------------------------------------------------------------------


def test_an_array_beside_t5x_s_index_that_it_does_not_name_is_refused(source, tmp_path):
    write_by_older_t5x(tmp_path / "checkpoint_7", load_any(source))
    array = tmp_path / "checkpoint_7" / "target.decoder.logits_dense.kernel"
    content = serialization.msgpack_restore((tmp_path / "checkpoint_7" / "checkpoint").read_bytes())
    del content["optimizer"]["target"]["decoder"]["logits_dense"]
    (tmp_path / "checkpoint_7" / "checkpoint").write_bytes(serialization.msgpack_serialize(content))
    with pytest.raises(UserError, match=f"{array.name} is here, but checkpoint does not name it"):
        load_any(tmp_path)


def test_an_array_of_another_shape_than_t5x_s_index_says_is_refused(source, tmp_path):
    write_by_older_t5x(tmp_path / "checkpoint_7", load_any(source))
    array = tmp_path / "checkpoint_7" / "target.decoder.logits_dense.kernel"
    shutil.rmtree(array)
    shutil.copytree(array.with_name("target.token_embedder.embedding"), array)
    with pytest.raises(UserError, match=rf"(?s)\[16, 8\], but checkpoint says \[8, 16\].*{array}"):
        load_any(tmp_path)


# --- A run's files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("operative_config.gin", "Unitransformer.d_model = 16\n", "d_model is 8"),
        (
            "operative_config.gin",
            "Unitransformer.shared_embedding_and_softmax_weights = True\n",
            "tied is False",
        ),
        ("config.gin", "network.T5Config.num_decoder_layers = 4\n", "num_decoder_layers is 3"),
        (
            "model-info.txt",
            "Variable    decoder/layers_3/mlp/wo/kernel    size 96  shape (mlp=12, embed=8)\n"
            "Total number of parameters: 96\n",
            "missing: .*model-info.txt names",
        ),
    ],
)
def test_a_run_s_own_files_contradict_another_model(source, name, text, what):
    (source / name).write_text(text)
    for read in (verify, lambda path: convert(path, path / "out", "jax")):
        with pytest.raises(UserError, match=rf"(?s){what}.*{source}/{re.escape(name)}"):
            read(source)
    with pytest.raises(UserError, match=what):
        open_checkpoint(str(source), None, "float32")


# --- Hugging Face --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_model", 16),
        ("d_kv", 8),
        ("num_heads", 4),
        ("num_layers", 2),
        ("num_decoder_layers", 2),
        ("num_decoder_layers", "3"),
        ("d_ff", 24),
        ("vocab_size", 32),
        ("relative_attention_num_buckets", 32),
        ("feed_forward_proj", "relu"),
        ("is_gated_act", False),
    ],
)
def test_a_size_in_config_json_that_the_weights_do_not_have_is_refused(
    source, tmp_path, field, value
):
    convert(source, tmp_path / "hf", "hf", slots=False)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=rf"{field} is {value!r}, but the weights are") as caught:
        load_any(tmp_path / "hf")
    assert caught.value.where == f"{tmp_path}/hf/config.json, {field}"


def test_a_config_without_sizes_of_its_own_contradicts_nothing(source, tmp_path):
    convert(source, tmp_path / "hf", "hf", slots=False)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    before = load_any(tmp_path / "hf")
    del config["d_kv"], config["feed_forward_proj"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert load_any(tmp_path / "hf").keys() == before.keys()


@pytest.mark.parametrize("field", ["layer_norm_epsilon", "relative_attention_max_distance"])
@pytest.mark.parametrize("value", ["1e-6", None, True, 0, -1, [1]])
def test_a_number_in_config_json_that_is_none_is_refused_by_its_field(
    source, tmp_path, field, value
):
    convert(source, tmp_path / "hf", "hf", slots=False)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=f"{field} is {re.escape(repr(value))}, not a"):
        load_any(tmp_path / "hf")


def test_an_untied_model_without_its_logits_is_refused(source, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    convert(source, tmp_path / "hf", "hf", slots=False)
    (tmp_path / "hf" / "conversion.json").unlink()
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match=r"(?s)lm_head.weight is missing.*tie_word_embeddings"):
        load_any(tmp_path / "hf")


@pytest.fixture
def shards(source, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(hf, "SHARD_BYTES", 2000)
    convert(source, tmp_path / "hf", "hf", slots=False)
    (tmp_path / "hf" / "conversion.json").unlink()
    return tmp_path / "hf"


def test_an_index_and_its_shards_name_the_same_tensors(shards):
    index = json.loads((shards / hf.INDEX).read_text())
    name = "decoder.block.2.layer.2.DenseReluDense.wo.weight"
    file = index["weight_map"].pop(name)
    (shards / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"(?s){name} is here, but {hf.INDEX} does not.*{file}"):
        load_any(shards)
    index["weight_map"] |= {name: file, "decoder.block.3.layer.2.DenseReluDense.wo.weight": file}
    (shards / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"(?s)missing: decoder.block.3.*{file}"):
        load_any(shards)


def test_an_index_that_forgot_a_shard_is_refused(shards):
    index = json.loads((shards / hf.INDEX).read_text())
    weights = index["weight_map"]
    last = max(weights.values())
    index["weight_map"] = {name: file for name, file in weights.items() if file != last}
    (shards / hf.INDEX).write_text(json.dumps(index))
    count = len(set(weights.values()))
    with pytest.raises(UserError, match=rf"names {count - 1} files of {count:05d}"):
        load_any(shards)


def test_slots_without_the_record_that_holds_their_step_are_refused(source, tmp_path):
    convert(source, tmp_path / "hf", "hf")
    parameters = load_any(tmp_path / "hf", slots=False)
    (tmp_path / "hf" / "conversion.json").unlink()
    for read in (load_any, verify, lambda path: convert(path, tmp_path / "jax", "jax")):
        with pytest.raises(UserError, match=rf"(?s)no conversion.json.*{hf.SLOTS_FILE}"):
            read(tmp_path / "hf")
    # The parameters need no step.
    convert(tmp_path / "hf", tmp_path / "jax", "jax", slots=False)
    open_checkpoint(str(tmp_path / "hf"), None, "float32")
    assert_same_bits(
        parameters | {"state/step": np.int32(0)}, load_any(tmp_path / "hf", slots=False)
    )
    (tmp_path / "hf" / hf.SLOTS_FILE).unlink()
    assert load_any(tmp_path / "hf")["state/step"] == 0


@pytest.mark.parametrize("layout", ["mtf", "jax", "t5x"])
def test_a_renamed_checkpoint_is_read_and_verify_tells_its_own_step(source, tmp_path, layout):
    if layout == "mtf":
        for file in source.glob("model.ckpt-7.*"):
            file.rename(file.with_name(file.name.replace("ckpt-7", "ckpt-8")))
        renamed = source / "model.ckpt-8"
    else:
        convert(source, tmp_path / "model", layout)
        renamed = (tmp_path / "model" / "checkpoint_7").rename(tmp_path / "model" / "checkpoint_8")
    assert load_any(renamed)["state/step"] == 7
    open_checkpoint(str(renamed), None, "float32")
    assert verify(renamed).problems == (
        "The name says step 8, but the checkpoint's own step is 7.",
    )
    with pytest.raises(UserError, match="says step 8"):
        convert(renamed, tmp_path / "out", "hf")
