"""Memory for tensors that is used again as soon as nothing refers to it any more.

A conversion goes through as many bytes as the checkpoint has, a tensor's worth at a time. Fresh
memory from the system costs more than all that is done with it (0.5 GB/s measured on a virtual
machine, against 5 GB/s for reading a cached file), and the system takes large blocks back at once.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

_SMALLEST = 1 << 20  # bytes; the allocator of the process keeps smaller ones itself
_KEPT = 2  # blocks that wait to be used again
_WASTE = 3  # a block may be so many times what is asked for

_free: list[memoryview] = []
_lock = threading.Lock()


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """An array with any content, in memory that is used again when the last view of it is gone."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _SMALLEST:
        return np.empty(shape, dtype)
    block = _take(nbytes)
    # numpy lets views refer to the first array of their chain whose base is no array: to this one.
    lease = np.frombuffer(block, np.uint8, nbytes)
    weakref.finalize(lease, _give_back, block).atexit = False
    return lease.view(dtype).reshape(shape)


def _take(nbytes: int) -> memoryview:
    with _lock:
        fitting = [
            number
            for number, block in enumerate(_free)
            if nbytes <= block.nbytes <= nbytes * _WASTE
        ]
        if fitting:
            return _free.pop(fitting[-1])  # the smallest: they are sorted
        _free.clear()  # of another size than what is read now; their memory makes room for it
    return np.empty(nbytes, np.uint8).data


def _give_back(block: memoryview) -> None:
    with _lock:
        _free.append(block)
        _free.sort(key=lambda free: -free.nbytes)
        del _free[_KEPT:]


def transposed(matrix: np.ndarray) -> np.ndarray:
    """A matrix's transpose, C-contiguous."""
    result = empty(matrix.shape[::-1], matrix.dtype)
    # Sixteen rows at a time: whole, rows of 8 KiB fall on the same lines of the cache (measured:
    # 0.7 GB/s whole and 2.7 so, for 2048 x 5120 float32).
    for start in range(0, len(matrix), 16):
        result[:, start : start + 16] = matrix[start : start + 16].T
    return result
