from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from t0repro.converters import tensors
from t0repro.converters.convert import convert
from t0repro.parameters.shape import ModelShape

FLOAT32 = np.dtype(np.float32)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch):
    monkeypatch.setattr(tensors, "_free", [])


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_the_last_view_is_gone():
    array = tensors.empty((1024, 1024), FLOAT32)
    place, view = address(array), array[5:7].T
    del array
    other = tensors.empty((1024, 1024), FLOAT32)
    assert address(other) != place
    view[...] = 1  # still its own
    other[...] = 2
    assert np.all(view == 1)
    del view
    assert address(tensors.empty((512, 1024), FLOAT32)) == place


@pytest.mark.parametrize("keep", [lambda x: x.data, lambda x: x.view(np.uint8).reshape(-1).data])
def test_a_memoryview_keeps_its_memory(keep):
    array = tensors.empty((1024, 1024), FLOAT32)
    place, bytes_of_it = address(array), keep(array)
    del array
    assert address(tensors.empty((1024, 1024), FLOAT32)) != place
    del bytes_of_it
    assert len(tensors._free) == 2


def test_blocks_that_wait_are_few_and_the_smallest_that_fits_is_taken():
    arrays = [tensors.empty((n, MIB), np.dtype(np.uint8)) for n in (1, 3, 2, 5)]
    places = {array.nbytes // MIB: address(array) for array in arrays}
    arrays.clear()
    assert [block.nbytes // MIB for block in tensors._free] == [5, 3]
    assert address(tensors.empty((2, MIB), np.dtype(np.uint8))) == places[3]


def test_a_block_much_larger_than_what_is_asked_for_is_not_wasted_on_it():
    large = tensors.empty((8, MIB), np.dtype(np.uint8))
    del large
    small = tensors.empty((2, MIB), np.dtype(np.uint8))
    del small
    assert [block.nbytes // MIB for block in tensors._free] == [2]


def test_small_arrays_and_scalars_are_numpy_s_own():
    assert tensors.empty((3,), np.dtype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    assert tensors.empty((), np.dtype(np.int64)).shape == ()
    assert tensors._free == []


@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (40, 7), (1030, 520)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transpose_is_contiguous_and_right(shape, dtype):
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32).astype(dtype)
    result = tensors.transpose(matrix)
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(result.astype(np.float32), matrix.T.astype(np.float32))


MEASURED = """
import sys
from pathlib import Path
from t0repro.converters.convert import convert
convert(*sys.argv[1:])
# Not ru_maxrss, which begins with what the process had that started this one.
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_model_larger_than_the_bound_is_converted_within_three_tensors_and_500_mb(
    tmp_path, write_mesh_checkpoint
):
    from t0repro.parameters import naming

    family = ModelShape(9, 9, 1024, 1024, 16, 64, 128, 32, ("wi_0", "wi_1"), False)
    values = np.random.default_rng(0).normal(size=1024 * 1024).astype(np.float32)
    variables = {"global_step": np.asarray(7, np.int64)}
    for path, shape in family.parameters().items():
        variables[str(naming.path_to_mtf(path))] = values[: np.prod(shape)].reshape(shape)
    largest = max(array.nbytes for array in variables.values())
    bound = 3 * largest + 500e6
    assert sum(array.nbytes for array in variables.values()) > 1.2 * bound
    source = write_mesh_checkpoint(tmp_path / "source", variables)
    for arguments in ((source, tmp_path / "hf", "hf"), (tmp_path / "hf", tmp_path / "jax", "jax")):
        command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
        peak = int(subprocess.run(command, check=True, capture_output=True).stdout.split()[-1])
        assert peak * 1024 <= bound
    assert convert(tmp_path / "jax", tmp_path / "out", "mtf", dry_run=True).family == family
