"""Tensors that are read when they are used, and the types of a tree's parameters."""

import numpy as np

from t0repro.converters.tensors import StoredTensor, cast_parameters, compare_shapes


def test_a_stored_tensor_is_read_each_time_and_given_in_the_type_asked_for():
    reads = []
    stored = StoredTensor((2,), lambda: reads.append(1) or np.array([0.1, 1.0], np.float32))
    half = np.asarray(stored, np.float16)
    assert half.dtype == np.float16 and half.tolist() == [np.float16(0.1), 1.0]
    later = stored.astype(np.dtype(np.float16))
    assert len(reads) == 1
    assert np.asarray(later).dtype == np.float16 and np.asarray(stored).dtype == np.float32
    assert len(reads) == 3


def test_parameters_alone_are_cast():
    tree = {
        "target/kernel": np.ones(2, np.float32),
        "state/param_states/kernel/v": np.ones(2, np.float32),
        "state/step": np.array(7),
    }
    cast = {name: x.dtype.name for name, x in cast_parameters(tree, "bfloat16").items()}
    assert cast == {
        "target/kernel": "bfloat16",
        "state/param_states/kernel/v": "float32",
        "state/step": "int64",
    }


def test_shapes_that_differ_are_described_by_name():
    found = compare_shapes({"b": (1, 2), "c": (4,)}, {"a": (3,), "b": (2, 1), "c": (4,)})
    assert found == [("a", "none", "of shape [3]"), ("b", "of shape [1, 2]", "of shape [2, 1]")]
