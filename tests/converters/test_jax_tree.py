from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from t0repro.converters.jax_tree import add_dummies, find_dummies
from t0repro.parameters import naming


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
