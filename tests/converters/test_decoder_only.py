"""Decoder-only models, as Mesh TensorFlow itself saves them; test_continuation.py trains one on."""

from __future__ import annotations

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.errors import UserError

from .checkpoint_files import assert_same_bits, read_variables

pytestmark = pytest.mark.mtf


def test_it_comes_back_from_t5x_scanned_and_jax_bit_for_bit(mesh_checkpoints, tmp_path):
    source = mesh_checkpoints["lm_v1"]
    convert(source, tmp_path / "t5x", "t5x")
    convert(tmp_path / "t5x", tmp_path / "scanned", "t5x", scan=True)
    convert(tmp_path / "scanned", tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "mtf", "mtf")
    variables = read_variables(source)
    assert "transformer/block_001/layer_001/DenseReluDense/wi/kernel" in variables
    assert_same_bits(variables, read_variables(tmp_path / "mtf"))
    assert verify(tmp_path / "t5x").family.name == "T5, decoder only"


def test_its_tower_is_t5x_s_decoder_with_slots(mesh_checkpoints):
    tree = load_any(mesh_checkpoints["lm_v1"])
    variables = read_variables(mesh_checkpoints["lm_v1"])
    query = "transformer/block_001/layer_000/SelfAttention/q"
    path = "decoder/layers_1/self_attention/query/kernel"
    np.testing.assert_array_equal(tree[f"target/{path}"], variables[query])
    # A square matrix: the slots change places.
    v_row = tree[f"state/param_states/{path}/v_row"]
    np.testing.assert_array_equal(v_row, variables[f"{query}_slot_vc"])
    assert not any("encoder" in key for key in tree)


def test_transformers_has_no_such_model(mesh_checkpoints, tmp_path):
    with pytest.raises(UserError, match="no decoder-only T5"):
        convert(mesh_checkpoints["lm_v1"], tmp_path / "hf", "hf")
