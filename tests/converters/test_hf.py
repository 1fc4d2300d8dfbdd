from __future__ import annotations

import json
import os
import shutil
import struct

import numpy as np
import pytest

from t0repro.converters import hf
from t0repro.converters.convert import convert
from t0repro.converters.finding import find_checkpoint
from t0repro.converters.inspection import inspect_checkpoint
from t0repro.converters.safetensors_files import SafetensorsFile
from t0repro.converters.sources import open_checkpoint
from t0repro.errors import UserError
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import assert_same_bits, read_variables

QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"


def test_kernels_and_relative_biases_are_transposed_and_the_embedding_is_not(
    tiny_checkpoint, tmp_path
):
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    variables = read_variables(tiny_checkpoint)
    file = SafetensorsFile(str(tmp_path / "hf" / "model.safetensors"))
    bias = "SelfAttention/relative_attention_bias"
    for name, variable in {
        QUERY: variables["encoder/block_000/layer_000/SelfAttention/q"].T,
        "decoder.block.1.layer.2.DenseReluDense.wo.weight": variables[
            "decoder/block_001/layer_002/DenseReluDense/wo/kernel"
        ].T,
        f"decoder.block.0.layer.0.{bias.replace('/', '.')}.weight": variables[
            f"decoder/block_000/layer_000/{bias}"
        ].T,
        "lm_head.weight": variables["decoder/logits/kernel"].T,
        "shared.weight": variables["shared/embedding"],
        "encoder.final_layer_norm.weight": variables["encoder/rms_norm/scale"],
    }.items():
        np.testing.assert_array_equal(file.read(name), variable)


def test_the_safetensors_package_reads_the_files(tiny_checkpoint, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    ours = SafetensorsFile(str(tmp_path / "hf" / "model.safetensors"))
    assert tensors.keys() == ours.tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, ours.read(name))


def test_slots_and_step_come_back_from_the_file_beside_the_weights(tiny_checkpoint, tmp_path):
    report = convert(tiny_checkpoint, tmp_path / "hf", "hf")
    assert any("optimizer_slots.safetensors" in note for note in report.notes)
    convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "mtf"))


def test_without_slots_there_is_no_such_file_and_the_step_still_comes_back(
    tiny_checkpoint, tmp_path
):
    report = convert(tiny_checkpoint, tmp_path / "hf", "hf", slots=False)
    assert report.slots == "dropped"
    assert not (tmp_path / "hf" / hf.SLOTS_FILE).exists()
    convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    variables = read_variables(tmp_path / "mtf")
    assert variables["global_step"] == 7
    assert not any("_slot_" in name for name in variables)


def test_large_models_are_written_in_shards_with_an_index(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 200_000)
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    index = json.loads((tmp_path / "hf" / hf.INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    for name in files:
        assert os.path.getsize(tmp_path / "hf" / name) < 210_000
    sizes = [SafetensorsFile(str(tmp_path / "hf" / name)).tensors for name in files]
    total = sum(info.nbytes for tensors in sizes for info in tensors.values())
    assert index["metadata"]["total_size"] == total
    convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "mtf"))


def test_one_file_is_read_before_shards_as_transformers_reads_it(
    tiny_checkpoint, tmp_path, monkeypatch
):
    """transformers' save_pretrained removes old shards and leaves their index."""
    convert(tiny_checkpoint, tmp_path / "one", "hf", slots=False)
    monkeypatch.setattr(hf, "SHARD_BYTES", 200_000)
    convert(tiny_checkpoint, tmp_path / "shards", "hf", slots=False)
    shutil.copy(tmp_path / "shards" / hf.INDEX, tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "mtf", "mtf")
    variables = read_variables(tiny_checkpoint)
    assert_same_bits(
        {name: variables[name] for name in variables if "_slot_" not in name},
        read_variables(tmp_path / "mtf"),
    )


def test_the_configuration_says_what_transformers_must_know(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        "model_type": "t5",
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "d_kv": 64,
        "dtype": "float32",
    }
    assert expected.items() <= config.items()


def test_the_model_card_says_where_the_model_came_from(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| Source | `{tiny_checkpoint}/model.ckpt-7` |" in card
    assert "| Global step | 7 |" in card


@pytest.mark.parametrize(
    ("vocab_size", "model_type", "name"), [(250_112, "mt5", "mT5"), (384, "t5", "ByT5")]
)
def test_mt5_and_byt5_are_recognized_by_their_vocabularies(
    mesh_variables, write_mesh_checkpoint, tmp_path, vocab_size, model_type, name
):
    family = ModelShape(1, 1, 2, 2, 1, 2, vocab_size, 4, ("wi_0", "wi_1"), False)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    report = convert(source, tmp_path / "hf", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert report.family.name == name
    assert config["model_type"] == model_type
    tokenizer = tmp_path / "hf" / "tokenizer_config.json"
    assert tokenizer.exists() == (name == "ByT5")
    convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(source), read_variables(tmp_path / "mtf"))


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("encoder.embed_tokens.weight", "shared.weight"),
        # In checkpoints older than transformers 4, such as allenai/unifiedqa-t5-large.
        (
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
    ],
)
def test_what_transformers_does_not_read_is_passed_over(tiny_checkpoint, tmp_path, name, like):
    safetensors = pytest.importorskip("safetensors.numpy")
    convert(tiny_checkpoint, tmp_path / "hf", "hf", slots=False)
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    tensors[name] = tensors[like]
    safetensors.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    reader = open_checkpoint(find_checkpoint(tmp_path / "hf"))
    assert len(reader.tensors) == len(tensors)  # one less, the step more


def test_logits_from_an_embedding_that_is_not_scaled_become_a_kernel_of_their_own(
    tiny_checkpoint, tmp_path
):
    """As transformers 5 saves a T5 1.1 that it made: config tied, but not scaled; no lm_head."""
    safetensors = pytest.importorskip("safetensors.numpy")
    convert(tiny_checkpoint, tmp_path / "hf", "hf", slots=False)
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "conversion.json").unlink()  # it has the tensor that is gone
    change_config(tmp_path / "hf", tie_word_embeddings=True, scale_decoder_outputs=False)
    # The embedding is listed and counted once, as the file has it.
    found = inspect_checkpoint(tmp_path / "hf")
    names = [item.name for item in found.tensors if item.key != naming.STEP]
    assert names == sorted(tensors)
    assert found.parameters == sum(tensor.size for tensor in tensors.values())
    convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    variables = read_variables(tmp_path / "mtf")
    np.testing.assert_array_equal(
        variables["decoder/logits/kernel"], variables["shared/embedding"].T
    )


def change_config(directory, **changes) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def test_a_kernel_that_overrides_a_tie_without_scaling_is_kept(tiny_checkpoint, tmp_path):
    """As transformers 5 saves a T5 1.1 that it loaded."""
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    change_config(tmp_path / "hf", tie_word_embeddings=True, scale_decoder_outputs=False)
    convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "mtf"))


def test_a_tied_model_whose_kernel_differs_from_its_embedding_is_refused(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "hf", "hf")
    change_config(tmp_path / "hf", tie_word_embeddings=True)
    with pytest.raises(UserError, match="lm_head.weight differs from shared.weight") as refused:
        convert(tmp_path / "hf", tmp_path / "mtf", "mtf")
    assert '"tie_word_embeddings": false' in str(refused.value.fix)


# --- Bad input -----------------------------------------------------------------------------------


@pytest.fixture
def hf_directory(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 400_000)
    convert(tiny_checkpoint, tmp_path / "hf", "hf", slots=False)
    return tmp_path / "hf"


def a_shard(directory):
    return sorted(directory.glob("model-*.safetensors"))[1]


def test_a_missing_shard_is_named(hf_directory, tmp_path):
    a_shard(hf_directory).unlink()
    with pytest.raises(UserError, match="(?s)is missing.*model-00002-of"):
        convert(hf_directory, tmp_path / "out", "mtf")
    assert not (tmp_path / "out").exists()


def test_a_cut_shard_is_named(hf_directory, tmp_path):
    shard = a_shard(hf_directory)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="(?s)damaged.*model-00002-of"):
        convert(hf_directory, tmp_path / "out", "mtf")


def test_a_file_that_is_no_safetensors_file_is_named(hf_directory, tmp_path):
    a_shard(hf_directory).write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(UserError, match="does not begin as a safetensors file"):
        convert(hf_directory, tmp_path / "out", "mtf")


def test_an_unknown_tensor_is_named_with_the_nearest(hf_directory, tmp_path):
    shard = a_shard(hf_directory)
    old = next(iter(SafetensorsFile(str(shard)).tensors))
    new = old.replace(".weight", ".weigth")
    shard.write_bytes(shard.read_bytes().replace(old.encode(), new.encode()))
    index = (hf_directory / hf.INDEX).read_text()
    (hf_directory / hf.INDEX).write_text(index.replace(old, new))
    with pytest.raises(UserError) as caught:
        convert(hf_directory, tmp_path / "out", "mtf")
    assert f"'{new}' (nearest: '{old}'" in caught.value.what


def test_a_quantized_tensor_is_refused(hf_directory, tmp_path):
    shard = a_shard(hf_directory)
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(b'"F32"', b'"F8_E4M3"')
    shard.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    with pytest.raises(UserError, match="F8_E4M3, in which no T5 is stored"):
        convert(hf_directory, tmp_path / "out", "mtf")


def test_another_architecture_and_a_missing_configuration_are_refused(hf_directory, tmp_path):
    config = json.loads((hf_directory / "config.json").read_text())
    (hf_directory / "config.json").write_text(json.dumps(config | {"model_type": "bart"}))
    with pytest.raises(UserError, match="'bart', not a T5"):
        convert(hf_directory, tmp_path / "out", "mtf")
    (hf_directory / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json"):
        convert(hf_directory, tmp_path / "out", "mtf")


def test_a_decoder_only_model_is_refused_before_anything_is_written(
    mesh_variables, write_mesh_checkpoint, tmp_path
):
    family = ModelShape(0, 1, 4, 4, 1, 2, 8, 4, ("wi",), True)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    with pytest.raises(UserError, match="no decoder-only T5"):
        convert(source, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_that_is_no_sentencepiece_model_is_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "vocab").write_bytes(b"hello")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        convert(tiny_checkpoint, tmp_path / "out", "hf", vocabulary=tmp_path / "vocab")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        convert(tiny_checkpoint, tmp_path / "out", "hf", vocabulary=tmp_path / "absent")


def test_the_step_s_flat_key_has_no_name_of_its_own():
    assert hf.hf_name(naming.STEP) is None
