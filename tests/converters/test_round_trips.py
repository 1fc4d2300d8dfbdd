from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t0repro.converters.convert import convert
from t0repro.converters.inspection import verify
from t0repro.converters.sources import load_any
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import assert_same_bits, read_variables


@pytest.mark.mtf
@pytest.mark.parametrize("model", ["t5_1_1", "t5_1_0"])
def test_mesh_tensorflow_s_checkpoint_comes_back_from_jax_bit_for_bit(
    mesh_checkpoints, model, tmp_path
):
    report = convert(mesh_checkpoints[model], tmp_path / "jax", "jax")
    convert(tmp_path / "jax", tmp_path / "mtf", "mtf")
    original = read_variables(mesh_checkpoints[model])
    assert_same_bits(original, read_variables(tmp_path / "mtf"))
    assert report.slots == "kept"
    assert report.tensors == len(original) - 1  # the step
    assert any(np.any(array) for name, array in original.items() if "_slot_" in name)


FAMILIES = st.builds(
    ModelShape,
    num_encoder_layers=st.integers(1, 2),
    num_decoder_layers=st.integers(1, 2),
    d_model=st.sampled_from([1, 4, 6, 8]),
    d_ff=st.sampled_from([1, 4, 8]),
    num_heads=st.sampled_from([1, 2]),
    d_kv=st.sampled_from([1, 2, 4]),
    vocab_size=st.sampled_from([4, 8, 9]),
    relative_attention_num_buckets=st.sampled_from([1, 2, 4]),
    wi_kernels=st.sampled_from([("wi",), ("wi_0", "wi_1")]),
    tied=st.booleans(),
)


@settings(max_examples=12)
@given(
    family=FAMILIES,
    step=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    factor_at=st.sampled_from([1, 4, 128]),
    momentum=st.booleans(),
    norm_names=st.sampled_from(["rms_norm", "layer_norm"]),
)
def test_any_t5_comes_back_from_jax_bit_for_bit(
    tmp_path_factory, mesh_variables, write_mesh_checkpoint, family, step, **choices
):
    variables = mesh_variables(family, step=step, **choices)
    root = tmp_path_factory.mktemp("round_trip")
    write_mesh_checkpoint(root / "source", variables)
    assert convert(root / "source", root / "jax", "jax").family == family
    convert(root / "jax", root / "mtf", "mtf")
    assert_same_bits(variables, read_variables(root / "mtf"))
    assert verify(root / "mtf").problems == ()


def test_the_position_bias_of_one_head_is_a_vector_in_mesh_tensorflow_alone(
    mesh_variables, write_mesh_checkpoint, tmp_path
):
    family = ModelShape(1, 1, 4, 4, 1, 2, 8, 4, ("wi",), True)
    variables = mesh_variables(family, momentum=True)
    name = "encoder/block_000/layer_000/SelfAttention/relative_attention_bias"
    assert variables[name].shape == variables[f"{name}_slot_m"].shape == (4,)
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    tree = load_any(str(source), None, slots=True)
    assert tree["target/encoder/relpos_bias/rel_embedding"].shape == (1, 4)
    assert tree["state/param_states/encoder/relpos_bias/rel_embedding/m"].shape == (1, 4)
    for to in ("t5x", "hf", "mtf"):
        assert convert(source, tmp_path / to, to).family == family
        source = tmp_path / to
    assert verify(source).problems == ()
    assert read_variables(source)[name].shape == (4,)


def test_slots_of_square_matrices_change_names_and_others_keep_them(tiny_checkpoint, tmp_path):
    from t0repro.training.checkpoints import load_tree

    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    variables = read_variables(tiny_checkpoint)
    tree = load_tree(tmp_path / "jax" / "checkpoint_7")
    square = "encoder/layers_0/attention/query/kernel"
    name = naming.path_to_mtf(square)
    v_row, v_col = (tree[naming.slot_key(square, slot)] for slot in ("v_row", "v_col"))
    np.testing.assert_array_equal(v_row, variables[f"{name}_slot_vc"])
    np.testing.assert_array_equal(v_col, variables[f"{name}_slot_vr"])
    # The straight mapping, T5X's importer's, would give these.
    assert not np.array_equal(v_row, variables[f"{name}_slot_vr"])
    unfactored = "encoder/layers_0/mlp/wo/kernel"
    np.testing.assert_array_equal(
        tree[naming.slot_key(unfactored, "v")],
        variables[f"{naming.path_to_mtf(unfactored)}_slot_v"],
    )


def test_without_slots_parameters_and_step_are_left(tiny_checkpoint, tiny_family, tmp_path):
    report = convert(tiny_checkpoint, tmp_path / "out", "mtf", slots=False)
    assert report.slots == "dropped"
    assert len(read_variables(tmp_path / "out")) == len(tiny_family.parameters()) + 1
    assert convert(tmp_path / "out", tmp_path / "again", "jax").slots == "none"


def test_norm_names_can_be_chosen(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "old", "mtf", norm_names="layer_norm")
    names = read_variables(tmp_path / "old").keys()
    assert "encoder/final_layer_norm/scale" in names
    assert not any("rms_norm" in name for name in names)
