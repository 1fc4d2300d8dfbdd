from __future__ import annotations

import numpy as np
import pytest

from t0repro.converters.convert import convert
from t0repro.converters.inspection import compare


@pytest.fixture
def changed(tmp_path, tiny_family, mesh_variables, write_mesh_checkpoint):
    """Makes a copy of `tiny_checkpoint` with some variables replaced."""

    def make(**replaced):
        variables = {**mesh_variables(tiny_family), **replaced}
        variables = {name: array for name, array in variables.items() if array is not None}
        return write_mesh_checkpoint(tmp_path / "changed", variables)

    return make


def test_a_converted_checkpoint_is_equal_across_formats(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "jax", "jax")
    comparison = compare(tiny_checkpoint, tmp_path / "jax")
    assert comparison.differences == ()
    manifest_tensors = convert(tiny_checkpoint, tmp_path / "x", "mtf", dry_run=True).tensors
    assert comparison.tensors == manifest_tensors


def test_largest_and_rms_difference_are_those_of_the_values(
    tiny_checkpoint, tiny_family, mesh_variables, changed
):
    name = "encoder/rms_norm/scale"
    array = mesh_variables(tiny_family)[name].copy()
    array[:2] += np.float32([0.5, -0.25])
    comparison = compare(tiny_checkpoint, changed(**{name: array}))
    (difference,) = comparison.differences
    assert difference.key == "target/encoder/encoder_norm/scale"
    assert difference.max == pytest.approx(0.5, rel=1e-6)
    assert difference.rms == pytest.approx(np.sqrt((0.25 + 0.0625) / 128), rel=1e-6)
    assert comparison.failures == comparison.differences


def test_a_tolerance_lets_small_differences_pass_and_large_ones_not(
    tiny_checkpoint, tiny_family, mesh_variables, changed
):
    array = mesh_variables(tiny_family)["encoder/rms_norm/scale"] + np.float32(0.01)
    other = changed(**{"encoder/rms_norm/scale": array})
    assert len(compare(tiny_checkpoint, other, tolerance=0.011).failures) == 0
    assert len(compare(tiny_checkpoint, other, tolerance=0.009).failures) == 1


def test_a_nan_never_passes(tiny_checkpoint, tiny_family, mesh_variables, changed):
    array = mesh_variables(tiny_family)["encoder/rms_norm/scale"].copy()
    array[3] = np.nan
    other = changed(**{"encoder/rms_norm/scale": array})
    assert len(compare(tiny_checkpoint, other, tolerance=1e9).failures) == 1


def test_zeros_of_different_signs_are_not_the_same_bits(
    tiny_checkpoint, tiny_family, mesh_variables, changed, tmp_path, write_mesh_checkpoint
):
    zeros = np.zeros(128, np.float32)
    variables = mesh_variables(tiny_family) | {"encoder/rms_norm/scale": zeros}
    write_mesh_checkpoint(tmp_path / "zeros", variables)
    other = changed(**{"encoder/rms_norm/scale": -zeros})
    assert [item.max for item in compare(tmp_path / "zeros", other).failures] == [0.0]
    assert compare(tmp_path / "zeros", other, tolerance=1e-9).failures == ()


def test_what_only_one_has_and_other_types_and_shapes_are_differences(
    tiny_checkpoint, tiny_family, mesh_variables, changed
):
    variables = mesh_variables(tiny_family)
    as_bfloat16 = variables["encoder/rms_norm/scale"].astype("bfloat16")
    other = changed(
        **{
            "encoder/rms_norm/scale_slot_v": None,
            "encoder/rms_norm/scale": as_bfloat16,
            "decoder/rms_norm/scale": np.ones(64, np.float32),
        }
    )
    found = {item.key: item for item in compare(tiny_checkpoint, other, tolerance=0.1).differences}
    assert found["state/param_states/encoder/encoder_norm/scale/v"].reason == "only in A"
    assert found["target/encoder/encoder_norm/scale"].detail == "float32 and bfloat16"
    assert found["target/decoder/decoder_norm/scale"].detail == "(128,) and (64,)"
    assert len(compare(tiny_checkpoint, other, tolerance=0.1).failures) == 2


def test_slots_can_be_left_out(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, tmp_path / "out", "jax", slots=False)
    assert compare(tiny_checkpoint, tmp_path / "out").failures
    assert not compare(tiny_checkpoint, tmp_path / "out", slots=False).failures
