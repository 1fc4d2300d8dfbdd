from __future__ import annotations

import dataclasses
import json

import pytest

from t0repro.converters.convert import convert
from t0repro.converters.model_gin import check_gin_file
from t0repro.errors import UserError

from .checkpoint_files import assert_same_bits, read_variables

FITTING = """
include 'models/t5.1.1.base.gin'
d_model = 128
d_ff = 16
num_heads = 2
d_kv = 64
num_layers = 2
encoder/transformer.make_layer_stack.num_layers = 1
"""


@pytest.fixture
def gin_file(tmp_path):
    def write(text):
        (tmp_path / "model.gin").write_text(text)
        return tmp_path / "model.gin"

    return write


def test_a_file_whose_sizes_are_the_checkpoint_s_goes_along(
    tiny_checkpoint, tiny_family, gin_file, tmp_path
):
    assert check_gin_file(gin_file(FITTING), tiny_family) == []
    convert(tiny_checkpoint, tmp_path / "out", "jax", gin_file=gin_file(FITTING))
    assert (tmp_path / "out" / "operative_config.gin").read_text() == FITTING


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("d_model = 512", r"`d_model = 512` does not fit .* whose d_model is 128"),
        ("d_ff = 17", r"`d_ff = 17` .* whose d_ff is 16"),
        ("num_layers = 3", r"`num_layers = 3` .* whose num_decoder_layers is 2"),
        (
            "encoder/transformer.make_layer_stack.num_layers = 4",
            r"make_layer_stack.num_layers = 4` .* whose num_encoder_layers is 1",
        ),
        ("transformer_layers.EncDecAttention.key_value_size = 32", "whose d_kv is 64"),
        ("Unitransformer.shared_embedding_and_softmax_weights = True", "whose tied is False"),
    ],
)
def test_a_size_that_is_not_the_checkpoint_s_is_told_with_its_binding_and_line(
    tiny_checkpoint, gin_file, tmp_path, line, message
):
    path = gin_file(FITTING + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        convert(tiny_checkpoint, tmp_path / "out", "hf", gin_file=path)
    assert caught.value.where == f"{path}:{len(FITTING.splitlines()) + 1}"
    assert not (tmp_path / "out").exists()


def test_a_gin_file_that_is_no_text_is_told(tiny_checkpoint, tmp_path):
    file = tmp_path / "a.gin"
    file.write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match="The gin file cannot be read") as caught:
        convert(tiny_checkpoint, tmp_path / "out", "hf", gin_file=file)
    assert caught.value.where == str(file) and not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="cannot be read: No such file") as caught:
        convert(tiny_checkpoint, tmp_path / "out", "hf", gin_file=tmp_path / "absent.gin")
    assert "operative_config.gin" in str(caught.value.fix)


def test_a_released_model_s_gin_file_is_read_through_its_includes(
    tiny_checkpoint, tmp_path, gin_file
):
    with pytest.raises(UserError, match="`d_model = 768` does not fit") as caught:
        convert(
            tiny_checkpoint,
            tmp_path / "out",
            "jax",
            gin_file=gin_file("include 'models/t5.1.1.base.gin'\n"),
        )
    assert "bi_bert_base.gin:5" in str(caught.value.where)


@pytest.mark.parametrize("configurable", ["T5Config", "TransformerConfig"])
def test_t5x_s_words_are_understood(configurable, tiny_family, gin_file):
    text = f"network.{configurable}:\n  emb_dim = 128\n  head_dim = 64\n  vocab_size = 128\n"
    assert check_gin_file(gin_file(text), tiny_family) == []
    wider = dataclasses.replace(tiny_family, vocab_size=256)
    with pytest.raises(UserError, match="`vocab_size = 128` .* whose vocab_size is 256"):
        check_gin_file(gin_file(text), wider)


def test_an_include_that_is_not_here_is_said(tiny_checkpoint, gin_file, tmp_path):
    path = gin_file("include 't5x/absent.gin'\nd_model = 128\n")
    report = convert(tiny_checkpoint, tmp_path / "out", "jax", gin_file=path, dry_run=True)
    assert any("t5x/absent.gin, which the gin file includes" in note for note in report.notes)


def test_a_file_that_is_no_gin_is_told(tiny_family, gin_file):
    with pytest.raises(UserError, match="not a gin file"):
        check_gin_file(gin_file(json.dumps({"d_model": 128})), tiny_family)


def test_a_byte_order_mark_is_named(tiny_family, gin_file):
    with pytest.raises(UserError, match="byte order mark"):
        check_gin_file(gin_file("\ufeffd_model = 128\n"), tiny_family)


def test_a_gin_file_that_is_not_there_is_told(tiny_checkpoint, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        convert(tiny_checkpoint, tmp_path / "out", "jax", gin_file=tmp_path / "absent.gin")


def test_mesh_tensorflow_s_checkpoint_gets_the_type_that_the_gin_file_asks_for(
    tiny_checkpoint, tmp_path, gin_file
):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    asked = gin_file("utils.get_variable_dtype.master_dtype = %KIND\nKIND = 'bfloat16'\n")
    report = convert(tmp_path / "jax", tmp_path / "mtf", "mtf", gin_file=asked)
    assert any("rounded to bfloat16, as master_dtype in" in note for note in report.notes)
    types = {
        name: array.dtype.name
        for name, array in read_variables(tmp_path / "mtf").items()
        if name != "global_step"
    }
    assert {kind for name, kind in types.items() if "_slot_" not in name} == {"bfloat16"}
    assert {kind for name, kind in types.items() if "_slot_" in name} == {"float32"}
    # What is asked for by name comes first, and no other format has masters.
    convert(tmp_path / "jax", tmp_path / "wide", "mtf", gin_file=asked, master_dtype="float32")
    assert_same_bits(read_variables(tiny_checkpoint), read_variables(tmp_path / "wide"))
    with pytest.raises(UserError, match="Only Mesh TensorFlow has masters"):
        convert(tiny_checkpoint, tmp_path / "out", "jax", master_dtype="bfloat16")
