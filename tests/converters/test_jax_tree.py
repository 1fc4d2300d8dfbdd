from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from t0repro.converters.convert import convert
from t0repro.converters.jax_tree import add_dummies, find_dummies
from t0repro.converters.sources import load_any
from t0repro.parameters import naming
from t0repro.parameters.shape import ModelShape

from .checkpoint_files import assert_same_bits


def tree_of(shapes: list[tuple[int, ...]], factored: bool, momentum: bool) -> dict[str, np.ndarray]:
    """A tree without dummies; matrices are factored or not, whatever their size."""
    tree = {}
    for number, shape in enumerate(shapes):
        path = f"parameter_{number}"
        tree[naming.PARAMETERS + path] = np.ones(shape)
        slots = ["v_row", "v_col"] if factored and len(shape) > 1 else ["v"]
        for slot in slots + ["m"] * momentum:
            tree[naming.slot_key(path, slot)] = np.ones(naming.slot_shape(slot, shape))
    return tree


SIZES = st.integers(1, 3)


@given(
    st.lists(st.one_of(st.tuples(SIZES), st.tuples(SIZES, SIZES)), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_dummies_are_told_from_slots_of_the_same_shape(shapes, factored, momentum):
    # A T5 always has matrices, which tell whether there is momentum.
    tree = tree_of([(2, 3), *shapes], factored, momentum)
    complete = add_dummies(tree)
    added = complete.keys() - tree.keys()
    assert set(find_dummies(complete)) == added
    assert all(complete[key].shape == (1,) and not complete[key].any() for key in added)


def test_a_tree_without_slots_gets_no_dummies():
    tree = {"target/a": np.ones((2, 3))}
    assert add_dummies(tree) == tree


def test_a_scanned_decoder_alone_is_read_layer_by_layer_with_means_of_its_second_moments(
    mesh_variables, write_mesh_checkpoint, tmp_path
):
    family = ModelShape(0, 2, 4, 8, 2, 2, 16, 4, ("wi_0", "wi_1"), False)
    source = write_mesh_checkpoint(tmp_path / "source", mesh_variables(family))
    (source / "operative_config.gin").write_text("Unitransformer.input_full_attention = False\n")
    convert(source, tmp_path / "scanned", "t5x", scan=True)
    tree, scanned = load_any(source), load_any(tmp_path / "scanned")
    parameters = {name for name in tree if name.startswith("target/")}
    assert_same_bits(*({name: each[name] for name in parameters} for each in (tree, scanned)))
    moments = "state/param_states/decoder/layers_1/mlp/wo/kernel/v"
    # T5X's v_row is the mean over the longest axis, here d_ff.
    for axis, slot in enumerate(("v_row", "v_col")):
        expected = tree[moments].mean(axis=axis, dtype=np.float64).astype(np.float32)
        np.testing.assert_array_equal(scanned[moments.replace("/v", f"/{slot}")], expected)
