"""bi_v1_shared, whose encoder has no parameters but the decoder's, as Mesh TensorFlow saves it."""

from __future__ import annotations

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.errors import UserError
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import assert_same_bits, read_variables

SHAPE = ModelShape(2, 2, 8, 16, 2, 4, 16, 4, ("wi",), True, shared_towers=True)


@pytest.fixture
def source(mesh_variables, write_mesh_checkpoint, tmp_path):
    return write_mesh_checkpoint(tmp_path / "source", mesh_variables(SHAPE))


def test_its_layers_are_named_by_kind_and_it_has_no_encoder(source):
    variables = read_variables(source)
    assert "decoder/block_001/dense_relu_dense/DenseReluDense/wi/kernel" in variables
    assert not any(name.startswith("encoder/") for name in variables)


@pytest.mark.parametrize("norm_names", ["rms_norm", "layer_norm"])
def test_it_goes_to_jax_and_back_bit_for_bit(
    mesh_variables, write_mesh_checkpoint, tmp_path, norm_names
):
    variables = mesh_variables(SHAPE, norm_names=norm_names)
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    report = convert(source, tmp_path / "jax", "jax")
    assert report.family == SHAPE
    assert report.family.name == "T5, shared towers"
    tree = load_any(tmp_path / "jax")
    assert "target/decoder/layers_1/encoder_decoder_attention/query/kernel" in tree
    assert not any("/encoder/" in key for key in tree)
    assert verify(tmp_path / "jax").problems == ()
    convert(tmp_path / "jax", tmp_path / "mtf", "mtf")
    assert_same_bits(variables, read_variables(tmp_path / "mtf"))


@pytest.mark.parametrize(("to", "peer"), [("t5x", "T5X"), ("hf", "transformers")])
def test_formats_whose_code_has_no_such_model_are_refused_by_name(source, tmp_path, to, peer):
    with pytest.raises(UserError, match=f"{peer} has no T5 whose encoder has the decoder's"):
        convert(source, tmp_path / "out", to)


def test_a_checkpoint_that_lost_its_encoder_is_no_shared_one(
    tiny_family, mesh_variables, write_mesh_checkpoint, tmp_path
):
    variables = mesh_variables(tiny_family)
    left = {name: x for name, x in variables.items() if not name.startswith("encoder/")}
    with pytest.raises(UserError, match="encoder's variables are missing"):
        convert(write_mesh_checkpoint(tmp_path / "source", left), tmp_path / "out", "jax")


@pytest.mark.mtf
def test_mesh_tensorflow_s_own_checkpoint_comes_back_and_trains_on_jax(
    train_mesh_tensorflow, tmp_path
):
    source = tmp_path / "mesh"
    train_mesh_tensorflow([{"model_dir": source, "model": "bi_v1_shared", "train_steps": 2}])
    convert(source, tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "mtf", "mtf")
    assert_same_bits(read_variables(source), read_variables(tmp_path / "mtf"))
    query = "decoder/block_001/self_attention/SelfAttention/q"
    np.testing.assert_array_equal(
        load_any(tmp_path / "jax")["target/decoder/layers_1/self_attention/query/kernel"],
        read_variables(source)[query],
    )
