"""What a Mesh TensorFlow checkpoint holds, for tests that compare checkpoints bit for bit."""

from __future__ import annotations

import os

import numpy as np

from t0repro.converters.finding import find_checkpoint
from t0repro.converters.tensor_bundle import BundleReader


def read_variables(directory: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The variables of a directory's latest checkpoint."""
    reader = BundleReader(find_checkpoint(directory).path)
    return {name: reader.read(name) for name in reader.entries}


def assert_same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    """Names, types, shapes and every bit."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (array.dtype, array.shape) == (right[name].dtype, right[name].shape), name
        assert array.tobytes() == right[name].tobytes(), name
